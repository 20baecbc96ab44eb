// Packed latents that rows read many times are decoded once, ahead of the kernel that reads them: the sliding windows
// of all rows, and the entries, of which only selected ones where those are fewer.

#include "common/check.h"
#include "kernels/attention/keys.cuh"
#include "kernels/attention/unpack_seen.h"
#include "kernels/unpack/latent.cuh"

namespace redknot::attention {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kTogether = 8;  // rows of a pool that a warp reads at once
constexpr int kStep = kWarps * kTogether;
constexpr int kSegments = 32;
constexpr int64_t kNoRow = -1;

struct Job {
  SegLatentAttentionParams op;  // of packed pools
  int32_t first_row, rows;
  int32_t window_blocks;  // each of kMaxUnitRows rows
  bool chosen;            // entries are unpacked as they are selected, not all of the pool
  int64_t entries;        // of the selection or of the pool
  uint4* latents;         // bf16
  uint4* entry_latents;   // bf16
};

// Pool rows of the first kTogether lanes; a warp.
__device__ __forceinline__ void unpack_rows(void const* packed, uint4* plain, int64_t own, int lane) {
  constexpr int kChunks = kHeadDim / kVector;
  uint4 chunks[kTogether][kChunks / kWarp];
  int64_t rows[kTogether];
#pragma unroll
  for (int i = 0; i < kTogether; ++i) {
    rows[i] = __shfl_sync(~0u, own, i);
    if (rows[i] == kNoRow) continue;
#pragma unroll
    for (int j = 0; j < kChunks / kWarp; ++j) {
      chunks[i][j] = latent_chunk(static_cast<uint8_t const*>(packed) + rows[i] * kPackedLatentBytes, kWarp * j + lane);
    }
  }
#pragma unroll
  for (int i = 0; i < kTogether; ++i) {
    if (rows[i] == kNoRow) continue;
#pragma unroll
    for (int j = 0; j < kChunks / kWarp; ++j) plain[rows[i] * kChunks + kWarp * j + lane] = chunks[i][j];
  }
}

// What a block's rows have in their windows, sequence by sequence.
__device__ __forceinline__ void unpack_windows(Job const& job, int block, int warp, int lane) {
  __shared__ KeyTable<kMaxUnitRows, kSegments> table;
  SegLatentAttentionParams const& op = job.op;
  // Keys that count rows: a key lies as many bytes behind the pool's start as it has rows before it.
  Keys<KeyTable<kMaxUnitRows, kSegments>> counted(op, table, 1);
  int const first = job.first_row + block * kMaxUnitRows, rows = min(kMaxUnitRows, job.first_row + job.rows - first);
  int64_t const row = first + min(lane, rows - 1), segments = op.segment_count;
  auto const segment = [&](int which) {
    return static_cast<int>(max(int64_t{0}, min(segments, __ldg(op.row_segments + 2 * row + which))));
  };
  int const position = narrow(__ldg(op.positions + row)), visible = narrow(__ldg(op.visible + row));
  int const span[2] = {segment(0), segment(1)};
  for (int begin = 0; begin < rows; begin = table.group.end) {
    __syncthreads();  // the table is used no more
    if (warp == 0) counted.enter(begin, rows, position, visible, span[0], span[1], lane);
    __syncthreads();
    for (int slot = warp * kTogether; slot < table.group.window_slots; slot += kStep) {
      Key const key = counted.in_window(slot + lane % kTogether);
      int64_t const own = key.x == kNoKey ? kNoRow : key.latent - static_cast<uint8_t const*>(op.latents);
      unpack_rows(op.latents, job.latents, own, lane);
    }
  }
}

__device__ __forceinline__ void unpack_entries(Job const& job, int block, int warp, int lane) {
  int64_t const at = int64_t{block} * kStep + warp * kTogether + lane % kTogether;
  int64_t own = at < job.entries ? at : kNoRow;
  if (job.chosen && own != kNoRow) {
    own = __ldg(job.op.selected + int64_t{job.first_row} * job.op.top_k + at);
    if (own < 0 || own >= job.op.entry_rows) own = kNoRow;
  }
  unpack_rows(job.op.entries, job.entry_latents, own, lane);
}

__global__ void __launch_bounds__(kThreads) unpack_kernel(__grid_constant__ Job const job) {
  cudaTriggerProgrammaticLaunchCompletion();
  int const warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  int const block = static_cast<int>(blockIdx.x);
  // Keys that do not exist are read from the first latent where a row has none of its own.
  if (block == 0 && warp == 0) unpack_rows(job.op.latents, job.latents, lane == 0 ? 0 : kNoRow, lane);
  if (block < job.window_blocks) {
    unpack_windows(job, block, warp, lane);
  } else {
    unpack_entries(job, block - job.window_blocks, warp, lane);
  }
}

}  // namespace

Status unpack_seen(Launch& launch, void* workspace, cudaStream_t stream) {
  SegLatentAttentionParams& op = launch.op;
  if (op.latent_rows == 0) return Status::kSuccess;  // nothing is read
  Region const& first = launch.full.units > 0 ? launch.full : launch.tail;
  int const rows = (launch.full.units > 0 ? launch.full.rows : 0) + (launch.tail.units > 0 ? launch.tail.rows : 0);
  int64_t const selected = int64_t{rows} * op.top_k;
  bool const chosen = op.selected != nullptr && selected < op.entry_rows;
  int64_t const entries = op.entries == nullptr ? 0 : chosen ? selected : op.entry_rows;
  auto* const latents = static_cast<uint4*>(workspace);
  auto* const entry_latents = latents + op.latent_rows * (kHeadDim / kVector);
  int const window_blocks = (rows + kMaxUnitRows - 1) / kMaxUnitRows;
  int64_t const blocks = window_blocks + (entries + kStep - 1) / kStep;
  REDKNOT_SUPPORTED(blocks <= INT32_MAX);
  unpack_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
      Job{op, first.first_row, rows, window_blocks, chosen, entries, latents, entry_latents});
  REDKNOT_LAUNCHED();
  op.latents = latents;
  if (op.entries != nullptr) op.entries = entry_latents;
  op.pool_dtype = Dtype::kBFloat16;
  return Status::kSuccess;
}

}  // namespace redknot::attention
