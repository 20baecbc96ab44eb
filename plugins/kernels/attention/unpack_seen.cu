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
constexpr int kTogether = 4;  // rows of a pool that a warp reads at once
constexpr int kBlockEntries = kWarps * kTogether;
constexpr int kBlockRows = 16;  // whose windows a block unpacks
constexpr int kNoRow = -1;      // of a key that does not exist, too

using WindowTable = KeyTable<kBlockRows, 32>;

struct Job {
  SegLatentAttentionParams op;  // of packed pools
  int32_t first_row, rows;
  int32_t window_blocks;
  bool chosen;           // entries are unpacked as they are selected, not all of the pool
  int64_t entries;       // of the selection or of the pool
  uint4* latents;        // bf16
  uint4* entry_latents;  // bf16
};

// The pool rows that the lanes of a warp name. Its code is there once: warps come here once, too, and would wait for
// it to be fetched.
__device__ __noinline__ void unpack_rows(void const* packed, uint4* plain, int own, int lane) {
  constexpr int kChunks = kHeadDim / kVector;
  unsigned there = __ballot_sync(kAllLanes, own != kNoRow);
#pragma unroll 1
  while (there != 0) {
    LatentChunks chunks[kTogether];
    int rows[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      int const row = __shfl_sync(kAllLanes, own, __ffs(there) - 1);
      rows[i] = there != 0 ? row : kNoRow;
      there &= there - 1;
      // In place of none the first one is read and not written.
      chunks[i].load(static_cast<uint8_t const*>(packed) + int64_t{max(rows[i], 0)} * kPackedLatentPitch, lane);
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      uint4* const to = plain + int64_t{rows[i]} * kChunks + lane;
#pragma unroll
      for (int j = 0; j < LatentChunks::kCount; ++j) {
        uint4 const chunk = chunks[i].chunk(j, lane);
        if (rows[i] != kNoRow) to[kWarp * j] = chunk;
      }
    }
  }
}

// What a block's rows have in their windows, sequence by sequence, but for what the row before them has in its own.
__device__ __forceinline__ void unpack_windows(Job const& job, int block, int warp, int lane) {
  __shared__ WindowTable table;
  SegLatentAttentionParams const& op = job.op;
  Keys<WindowTable> keys(op, table, kPackedLatentPitch);
  int const first = job.first_row + block * kBlockRows, rows = min(kBlockRows, job.first_row + job.rows - first);
  int64_t const row = first + min(lane, rows - 1), before = max(first - 1, job.first_row);
  int const position = narrow(__ldg(op.positions + row)), visible = narrow(__ldg(op.visible + row));
  int const span[2] = {segment_bound(op, row, 0), segment_bound(op, row, 1)};
  int const span_before[2] = {segment_bound(op, before, 0), segment_bound(op, before, 1)};
  int64_t const high = narrow(__ldg(op.positions + before)), low = high - op.window + 1;  // the window before
  bool const follows = first > job.first_row && span[0] == span_before[0] && span[1] == span_before[1];
  for (int begin = 0; begin < rows; begin = table.group.end) {
    __syncthreads();  // the table is used no more
    if (warp == 0) keys.enter(begin, rows, position, visible, span[0], span[1], lane);
    __syncthreads();
    bool const known = begin == 0 && __shfl_sync(kAllLanes, follows, 0);
    // Neighbouring slots go to different warps: mostly only the last few are new.
    for (int slot = 0; slot < table.group.window_slots; slot += kThreads) {
      Key const key = keys.in_window(slot + lane * kWarps + warp);
      bool const unpacked = known && key.x >= low && key.x <= high;
      unpack_rows(op.latents, job.latents, unpacked ? kNoRow : key.row, lane);
    }
  }
}

__device__ __forceinline__ void unpack_entries(Job const& job, int block, int warp, int lane) {
  int64_t const at = int64_t{block} * kBlockEntries + warp * kTogether + lane;
  bool const mine = lane < kTogether && at < job.entries;
  int64_t entry = at;
  if (mine && job.chosen) entry = __ldg(job.op.selected + int64_t{job.first_row} * job.op.top_k + at);
  bool const there = mine && entry >= 0 && entry < job.op.entry_rows;
  unpack_rows(job.op.entries, job.entry_latents, there ? static_cast<int>(entry) : kNoRow, lane);
}

__global__ void __launch_bounds__(kThreads, 4) unpack_kernel(__grid_constant__ Job const job) {
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
  int const window_blocks = (rows + kBlockRows - 1) / kBlockRows;
  int64_t const blocks = window_blocks + (entries + kBlockEntries - 1) / kBlockEntries;
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
