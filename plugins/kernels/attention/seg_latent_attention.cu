#include "common/check.h"
#include "common/device.h"
#include "kernels/attention/few_rows.h"
#include "kernels/attention/seg_latent_attention.h"
#include "kernels/attention/units.cuh"
#include "kernels/attention/unpack_seen.h"
#include "kernels/attention/wide.h"

namespace redknot {
namespace attention {

template <int kColumns, bool kPacked>
Status launch_attention(Launch const& launch, cudaStream_t stream);

extern template Status launch_attention<8, true>(Launch const&, cudaStream_t);
extern template Status launch_attention<16, true>(Launch const&, cudaStream_t);
extern template Status launch_attention<32, true>(Launch const&, cudaStream_t);
extern template Status launch_attention<64, true>(Launch const&, cudaStream_t);
extern template Status launch_attention<8, false>(Launch const&, cudaStream_t);
extern template Status launch_attention<16, false>(Launch const&, cudaStream_t);
extern template Status launch_attention<32, false>(Launch const&, cudaStream_t);
extern template Status launch_attention<64, false>(Launch const&, cudaStream_t);

namespace {

// Blocks that keep every multiprocessor busy.
constexpr int64_t kEnoughBlocks = 2 * kHopperProcessors;
constexpr int kMostColumns = 64;

// Rows with more heads than this fill the M dimension of the products by themselves (wide.h).
constexpr int kNarrowHeads = 32;

// Units of one row each.
Launch few_rows_launch(SegLatentAttentionParams const& op) {
  return {op, make_region(0, op.full_rows, op.global_heads + op.local_heads, kFewHeads, false),
          make_region(op.full_rows, op.rows - op.full_rows, op.global_heads, kFewHeads, false)};
}

bool are_few(SegLatentAttentionParams const& op) {
  Launch const few = few_rows_launch(op);
  return int64_t{few.full.units} + few.tail.units <= kFewUnits;
}

// Whether rows of a call have many heads. Few rows never do: where clusters do not serve them, blocks of columns do.
bool is_wide(SegLatentAttentionParams const& op, int heads) { return heads > kNarrowHeads && !are_few(op); }

// The regions of a call whose rows have many heads, or the others.
Launch regions(SegLatentAttentionParams const& op, bool wide, int columns, bool shares_keys) {
  auto const region = [&](int first_row, int rows, int heads) {
    return make_region(first_row, is_wide(op, heads) == wide ? rows : 0, heads, columns, shares_keys);
  };
  return {op, region(0, op.full_rows, op.global_heads + op.local_heads),
          region(op.full_rows, op.rows - op.full_rows, op.global_heads)};
}

// Columns of a block of the others. Rows that share no keys use as few as hold their heads; rows that share them read
// each key for as many columns as there are, as long as enough blocks remain.
int columns_for(SegLatentAttentionParams const& op) {
  int most_heads = 0;
  int64_t used = 0;
  auto const count = [&](int rows, int heads) {
    if (rows == 0 || is_wide(op, heads)) return;
    most_heads = most_heads < heads ? heads : most_heads;
    used += int64_t{rows} * heads;
  };
  count(op.full_rows, op.global_heads + op.local_heads);
  count(op.rows - op.full_rows, op.global_heads);
  int needed = 8;
  while (needed < most_heads && needed < kMostColumns) needed *= 2;
  if (op.selected != nullptr) return needed;
  int columns = kMostColumns;
  while (columns > needed && used < kEnoughBlocks * columns) columns /= 2;
  return columns;
}

template <bool kPacked>
Status launch_with(int columns, Launch const& launch, cudaStream_t stream) {
  switch (columns) {
    case 8: return launch_attention<8, kPacked>(launch, stream);
    case 16: return launch_attention<16, kPacked>(launch, stream);
    case 32: return launch_attention<32, kPacked>(launch, stream);
    default: return launch_attention<64, kPacked>(launch, stream);
  }
}

Status check(SegLatentAttentionParams const& op) {
  REDKNOT_VALID(op.rows >= 0 && op.full_rows >= 0 && op.full_rows <= op.rows);
  REDKNOT_VALID(op.global_heads >= 0 && op.local_heads >= 0 && op.window > 0 && op.top_k >= 0 && op.segment_count >= 0);
  REDKNOT_VALID(op.latent_rows >= 0 && op.latent_rows <= INT32_MAX && op.entry_rows >= 0 && op.entry_rows <= INT32_MAX);
  REDKNOT_SUPPORTED(op.pool_dtype == Dtype::kBFloat16 || op.pool_dtype == Dtype::kPacked);
  REDKNOT_SUPPORTED(op.selected == nullptr || op.top_k <= kMaxSelected);
  // Units, of which there are no more than heads of rows, are counted in 32 bits, past the last one too.
  REDKNOT_SUPPORTED(op.rows * (int64_t{op.global_heads} + op.local_heads) <= INT32_MAX / 2);
  if (op.rows == 0) return Status::kSuccess;
  REDKNOT_VALID(op.rope_positions > 0 && op.latents != nullptr && op.segments != nullptr && op.row_segments != nullptr);
  REDKNOT_VALID(op.positions != nullptr && op.visible != nullptr && op.rope != nullptr);
  REDKNOT_VALID(op.global_heads == 0 ||
                (op.q_global != nullptr && op.out_global != nullptr && op.sinks_global != nullptr));
  REDKNOT_VALID(op.full_rows == 0 || op.local_heads == 0 ||
                (op.q_local != nullptr && op.out_local != nullptr && op.sinks_local != nullptr));
  for (void const* pointer :
       {op.q_global, op.q_local, static_cast<void const*>(op.out_global), static_cast<void const*>(op.out_local),
        op.latents, op.entries, static_cast<void const*>(op.rope)}) {
    REDKNOT_REQUIRE(aligned(pointer, 16), Status::kMisaligned);
  }
  return Status::kSuccess;
}

// Rows with many heads.
Status attend_wide(Launch launch, cudaStream_t stream) {
  SegLatentAttentionParams const& op = launch.op;
  if (op.pool_dtype == Dtype::kPacked) {
    REDKNOT_REQUIRE(op.workspace_bytes >= unpacked_bytes(op), Status::kWorkspaceTooSmall);
    REDKNOT_REQUIRE(aligned(op.workspace, 16), Status::kMisaligned);
    REDKNOT_TRY(unpack_seen(launch, op.workspace, stream));
  }
  return launch_wide(launch, stream);
}

}  // namespace
}  // namespace attention

size_t seg_latent_attention_workspace(SegLatentAttentionParams const& params) {
  bool const wide = (params.full_rows > 0 && attention::is_wide(params, params.global_heads + params.local_heads)) ||
                    (params.rows > params.full_rows && attention::is_wide(params, params.global_heads));
  return wide && params.pool_dtype == Dtype::kPacked ? attention::unpacked_bytes(params) : 0;
}

Status seg_latent_attention(SegLatentAttentionParams const& params, cudaStream_t stream) {
  REDKNOT_TRY(attention::check(params));
  bool const packed = params.pool_dtype == Dtype::kPacked;
  int const columns = attention::columns_for(params);
  attention::Launch const wide = attention::regions(params, true, attention::kMostColumns, false);
  attention::Launch const narrow = attention::regions(params, false, columns, params.selected == nullptr);
  bool const any_wide = wide.full.units + wide.tail.units > 0, any_narrow = narrow.full.units + narrow.tail.units > 0;
  if (!any_wide && !any_narrow) return Status::kSuccess;
  REDKNOT_TRY(require_warpgroup_products());
  if (attention::are_few(params)) {
    Status const done = attention::attend_few_rows(attention::few_rows_launch(params), packed, stream);
    if (done != Status::kUnsupported) return done;
  }
  if (any_wide) REDKNOT_TRY(attention::attend_wide(wide, stream));
  if (!any_narrow) return Status::kSuccess;
  return packed ? attention::launch_with<true>(columns, narrow, stream)
                : attention::launch_with<false>(columns, narrow, stream);
}

}  // namespace redknot
