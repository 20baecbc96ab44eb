#include "common/check.h"
#include "common/device.h"
#include "kernels/indexer/lightning_indexer.h"
#include "kernels/indexer/salience.cuh"
#include "kernels/indexer/select.cuh"

namespace redknot {
namespace indexer {
namespace {

constexpr int64_t kAlignment = 256;
constexpr int64_t kEnoughBlocks = kHopperProcessors;

int64_t round_up(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }
int64_t key_bytes(int64_t entries) { return round_up(entries * kIndexDim) + round_up(entries * 4); }

Status check(IndexScoreParams const& op) {
  REDKNOT_VALID(op.rows >= 0 && op.entries >= 0 && op.entries <= INT32_MAX && op.segment_count >= 0);
  REDKNOT_SUPPORTED(op.keys_dtype == Dtype::kPacked || op.keys_dtype == Dtype::kBFloat16);
  REDKNOT_SUPPORTED(op.fp8 || op.keys_dtype == Dtype::kBFloat16);
  if (op.rows == 0 || op.entries == 0) return Status::kSuccess;
  REDKNOT_VALID(op.q != nullptr && op.weights != nullptr && op.keys != nullptr && op.segments != nullptr);
  REDKNOT_VALID(op.row_segments != nullptr && op.positions != nullptr && op.visible != nullptr && op.rope != nullptr);
  REDKNOT_VALID(op.rope_positions > 0 && op.workspace != nullptr);
  REDKNOT_REQUIRE(aligned(op.q, 16) && aligned(op.keys, 16) && aligned(op.rope, 8) && aligned(op.workspace, kAlignment),
                  Status::kMisaligned);
  return Status::kSuccess;
}

// Few rows spread over the GPU by stretches: one of all entries would be walked by a single block.
int32_t stretch_for(int64_t entries, int64_t row_blocks) {
  constexpr int64_t kPair = 2 * kTileKeys;  // both warpgroups of a block have a tile
  int64_t const even = entries * row_blocks / kEnoughBlocks;
  int64_t const whole = (even + kPair - 1) / kPair * kPair;
  return static_cast<int32_t>(whole < kLeastStretch ? kLeastStretch : whole > kMostStretch ? kMostStretch : whole);
}

// Scores some rows after others into the workspace; `use` launches what reads the scores of a round.
template <bool kFp8, class Use>
Status score_rounds(Scoring scoring, int rows_at_a_time, cudaStream_t stream, Use const& use) {
  IndexScoreParams const& op = scoring.op;
  constexpr int kScoreBytes = static_cast<int>(sizeof(ScoreShared<kFp8>));
  REDKNOT_CUDA(cudaFuncSetAttribute(score_kernel<kFp8>, cudaFuncAttributeMaxDynamicSharedMemorySize, kScoreBytes));
  for (int row = 0; row < op.rows; row += rows_at_a_time) {
    scoring.first_row = row;
    scoring.rows = op.rows - row < rows_at_a_time ? op.rows - row : rows_at_a_time;
    int64_t const row_blocks = (scoring.rows + kRows - 1) / kRows;
    scoring.stretch = stretch_for(op.entries, row_blocks);
    int64_t const stretches = (op.entries + scoring.stretch - 1) / scoring.stretch;
    dim3 const grid(static_cast<unsigned>(row_blocks), static_cast<unsigned>(stretches));
    score_kernel<kFp8><<<grid, 256, kScoreBytes, stream>>>(scoring);
    REDKNOT_LAUNCHED();
    use(scoring);
    REDKNOT_LAUNCHED();
  }
  return Status::kSuccess;
}

// Keys as the matrix units read them, then the rounds. There are rows and entries.
template <class Use>
Status score(IndexScoreParams const& op, cudaStream_t stream, Use const& use) {
  REDKNOT_TRY(require_warpgroup_products());
  int64_t const score_bytes = op.workspace_bytes - key_bytes(op.entries);
  int64_t const fit = score_bytes / (op.entries * 4);
  REDKNOT_REQUIRE(fit >= kRows, Status::kWorkspaceTooSmall);
  int const rows_at_a_time = static_cast<int>(fit < op.rows ? fit / kRows * kRows : op.rows);

  auto* const codes = static_cast<uint8_t*>(op.workspace);
  auto* const scales = reinterpret_cast<float*>(codes + round_up(op.entries * kIndexDim));
  auto* const scores = reinterpret_cast<float*>(codes + key_bytes(op.entries));
  Scoring scoring{op, codes, scales, scores, 0, 0, 0};
  if (!op.fp8) {
    scoring.keys = static_cast<uint8_t const*>(op.keys);
    return score_rounds<false>(scoring, rows_at_a_time, stream, use);
  }
  auto const blocks = static_cast<unsigned>((op.entries + 7) / 8);
  if (op.keys_dtype == Dtype::kPacked) {
    align_keys<<<blocks, 256, 0, stream>>>(static_cast<uint32_t const*>(op.keys), reinterpret_cast<uint32_t*>(codes),
                                           scales, op.entries);
  } else {
    quantise_keys<<<blocks, 256, 0, stream>>>(static_cast<__nv_bfloat16 const*>(op.keys),
                                              reinterpret_cast<uint32_t*>(codes), scales, op.entries);
  }
  REDKNOT_LAUNCHED();
  return score_rounds<true>(scoring, rows_at_a_time, stream, use);
}

}  // namespace
}  // namespace indexer

int64_t lightning_indexer_workspace(int64_t entries, int64_t rows_at_a_time) {
  int64_t const rows = rows_at_a_time < indexer::kRows ? indexer::kRows : rows_at_a_time;
  return indexer::key_bytes(entries) + indexer::round_up(entries * 4 * rows) + indexer::kAlignment;
}

Status lightning_indexer(LightningIndexerParams const& op, cudaStream_t stream) {
  REDKNOT_VALID(op.top_k > 0);
  REDKNOT_SUPPORTED(op.top_k <= kMostSelected);
  REDKNOT_TRY(indexer::check(op));
  if (op.rows == 0) return Status::kSuccess;
  REDKNOT_VALID(op.selected != nullptr);
  if (op.entries == 0) {
    REDKNOT_CUDA(cudaMemsetAsync(op.selected, 0xff, sizeof(int64_t) * op.rows * op.top_k, stream));
    return Status::kSuccess;
  }
  constexpr int kSelectBytes = static_cast<int>(sizeof(indexer::SelectShared));
  REDKNOT_CUDA(cudaFuncSetAttribute(indexer::select_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSelectBytes));
  return indexer::score(op, stream, [&](indexer::Scoring const& scoring) {
    indexer::select_kernel<<<static_cast<unsigned>(scoring.rows), indexer::kSelectThreads, kSelectBytes, stream>>>(
        scoring, op.selected, op.top_k);
  });
}

Status index_salience(IndexSalienceParams const& op, cudaStream_t stream) {
  REDKNOT_VALID(op.sequence_entries >= 0 && op.sequence_entries <= op.entries);
  REDKNOT_TRY(indexer::check(op));
  if (op.sequence_entries == 0) return Status::kSuccess;
  REDKNOT_VALID(op.total != nullptr && op.seen != nullptr);
  if (op.rows == 0) {
    REDKNOT_CUDA(cudaMemsetAsync(op.total, 0, sizeof(float) * op.sequence_entries, stream));
    REDKNOT_CUDA(cudaMemsetAsync(op.seen, 0, sizeof(float) * op.sequence_entries, stream));
    return Status::kSuccess;
  }
  int64_t const blocks = (op.sequence_entries + indexer::kSalienceThreads - 1) / indexer::kSalienceThreads;
  return indexer::score(op, stream, [&](indexer::Scoring const& scoring) {
    indexer::salience_kernel<<<static_cast<unsigned>(blocks), indexer::kSalienceThreads, 0, stream>>>(
        scoring, op.total, op.seen, op.sequence_entries);
  });
}

}  // namespace redknot
