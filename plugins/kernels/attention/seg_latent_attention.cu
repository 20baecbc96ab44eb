#include "common/check.h"
#include "kernels/attention/seg_latent_attention.h"
#include "kernels/attention/units.cuh"

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

// Blocks that keep every multiprocessor of the largest supported GPU busy.
constexpr int64_t kEnoughBlocks = 264;
constexpr int kMostColumns = 64;

// Columns of a block. Rows that share no keys use as few as hold their heads; rows that share them read each key for as
// many columns as there are, as long as enough blocks remain.
int columns_for(SegLatentAttentionParams const& op) {
  int const most_heads = op.full_rows > 0 ? op.global_heads + op.local_heads : op.global_heads;
  int needed = 8;
  while (needed < most_heads && needed < kMostColumns) needed *= 2;
  if (op.selected != nullptr) return needed;
  int64_t const used = int64_t{op.rows} * op.global_heads + int64_t{op.full_rows} * op.local_heads;
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
  if (op.rows == 0) return Status::kSuccess;
  REDKNOT_VALID(op.rope_positions > 0 && op.latents != nullptr && op.segments != nullptr && op.row_segments != nullptr);
  REDKNOT_VALID(op.positions != nullptr && op.visible != nullptr && op.rope != nullptr);
  REDKNOT_VALID(op.global_heads == 0 ||
                (op.q_global != nullptr && op.out_global != nullptr && op.sinks_global != nullptr));
  REDKNOT_VALID(op.full_rows == 0 || op.local_heads == 0 ||
                (op.q_local != nullptr && op.out_local != nullptr && op.sinks_local != nullptr));
  for (void const* pointer : {op.q_global, op.q_local, static_cast<void const*>(op.out_global),
                              static_cast<void const*>(op.out_local), op.latents, op.entries}) {
    REDKNOT_REQUIRE(aligned(pointer, 16), Status::kMisaligned);
  }
  return Status::kSuccess;
}

}  // namespace
}  // namespace attention

Status seg_latent_attention(SegLatentAttentionParams const& params, cudaStream_t stream) {
  Status const valid = attention::check(params);
  if (valid != Status::kSuccess) return valid;
  int const columns = attention::columns_for(params);
  bool const shares_keys = params.selected == nullptr;
  attention::Launch const launch{
      params,
      attention::make_region(0, params.full_rows, params.global_heads + params.local_heads, columns, shares_keys),
      attention::make_region(params.full_rows, params.rows - params.full_rows, params.global_heads, columns,
                             shares_keys)};
  if (launch.full.units + launch.tail.units == 0) return Status::kSuccess;
  Status const device = require_warpgroup_products();
  if (device != Status::kSuccess) return device;
  return params.pool_dtype == Dtype::kPacked ? attention::launch_with<true>(columns, launch, stream)
                                             : attention::launch_with<false>(columns, launch, stream);
}

}  // namespace redknot
