// A stable counting sort of (row, slot) pairs by expert in two kernels, then the rows themselves. No atomics decide an
// order: the same ids give the same permutation.

#include <algorithm>

#include "common/check.h"
#include "common/device.h"
#include "common/launch_after.h"
#include "common/layout.h"
#include "common/ptx.cuh"
#include "common/vector.cuh"
#include "kernels/moe/launch.h"

namespace redknot {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarp;
constexpr int kMinPairs = 2048;      // of one block; a multiple of kThreads
constexpr int64_t kMaxBlocks = 256;  // every block sums the counts of all
constexpr int kScatterThreads = 256;
constexpr int kScatterBlocks = 4 * kHopperProcessors;
constexpr int kAhead = 8;  // vectors of a row that a lane holds at once
constexpr int kStrip = kAhead * kWarp * kVector;
constexpr int kPrefetched = 4;  // strips of a warp

// Pairs of one block of the sort.
int64_t pairs_a_block(int64_t pairs) {
  return std::max<int64_t>(kMinPairs, ceil_to((pairs + kMaxBlocks - 1) / kMaxBlocks, kThreads));
}
int64_t sort_blocks(int64_t pairs) {
  int64_t const each = pairs_a_block(pairs);
  return (pairs + each - 1) / each;
}

__device__ __forceinline__ int local_expert(MoePermuteParams const& params, int64_t pair) {
  if (pair >= params.rows * params.top_k) return -1;
  int64_t const expert = params.ids[pair] - params.first;
  return expert >= 0 && expert < params.experts ? static_cast<int>(expert) : -1;
}

// Pairs of each expert in one block: counts [blocks, experts].
__global__ void __launch_bounds__(kThreads) count_kernel(MoePermuteParams const params, int pairs) {
  extern __shared__ int32_t counts[];
  cudaTriggerProgrammaticLaunchCompletion();
  for (int expert = static_cast<int>(threadIdx.x); expert < params.experts; expert += kThreads) counts[expert] = 0;
  __syncthreads();
  int64_t const first = static_cast<int64_t>(blockIdx.x) * pairs;
#pragma unroll 4
  for (int offset = static_cast<int>(threadIdx.x); offset < pairs; offset += kThreads) {
    int const expert = local_expert(params, first + offset);
    if (expert >= 0) atomicAdd(counts + expert, 1);
  }
  __syncthreads();
  int32_t* const out = static_cast<int32_t*>(params.workspace) + static_cast<int64_t>(blockIdx.x) * params.experts;
  for (int expert = static_cast<int>(threadIdx.x); expert < params.experts; expert += kThreads) {
    out[expert] = counts[expert];
  }
}

__device__ __forceinline__ int32_t inclusive_sum(int32_t value, int lane) {
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    int32_t const below = __shfl_up_sync(kAllLanes, value, offset);
    if (lane >= offset) value += below;
  }
  return value;
}

// bases[expert] becomes the first permuted row of this block's pairs of the expert. Block 0 writes the experts' ends.
__device__ __forceinline__ void sum_counts(MoePermuteParams const& params, int32_t* totals, int32_t* bases) {
  int const experts = params.experts;
  int const thread = static_cast<int>(threadIdx.x);
  auto const* const counts = static_cast<int32_t const*>(params.workspace);
  for (int expert = thread; expert < experts; expert += kThreads) totals[expert] = bases[expert] = 0;
  __syncthreads();
  // Threads share an expert's blocks where there are more threads than experts.
  int const teams = max(1, kThreads / experts);
  if (thread < teams * min(experts, kThreads)) {
    for (int expert = thread % min(experts, kThreads); expert < experts; expert += kThreads) {
      int32_t all = 0, before = 0;
#pragma unroll 4
      for (int block = thread / min(experts, kThreads); block < static_cast<int>(gridDim.x); block += teams) {
        int32_t const count = counts[block * experts + expert];
        all += count;
        before += block < static_cast<int>(blockIdx.x) ? count : 0;
      }
      atomicAdd(totals + expert, all);
      atomicAdd(bases + expert, before);
    }
  }
  __syncthreads();
  if (thread < kWarp) {
    int32_t passed = 0;
    for (int first = 0; first < experts; first += kWarp) {
      int const expert = first + thread;
      int32_t const total = expert < experts ? totals[expert] : 0;
      int32_t const end = passed + inclusive_sum(total, thread);
      if (expert < experts) {
        bases[expert] += end - total;
        if (blockIdx.x == 0) params.ends[expert] = end;
      }
      passed = __shfl_sync(kAllLanes, end, kWarp - 1);
    }
  }
  __syncthreads();
}

// Place of every pair: first row of its (block, expert), plus the pairs of that expert before it in the block.
__global__ void __launch_bounds__(kThreads) place_kernel(MoePermuteParams const params, int pairs) {
  extern __shared__ int32_t next[];  // [warps, experts], then totals [experts] and bases [experts]
  int const lane = static_cast<int>(threadIdx.x) % kWarp;
  int const warp = static_cast<int>(threadIdx.x) / kWarp;
  int const experts = params.experts;
  int32_t* const totals = next + kWarps * experts;
  int32_t* const bases = totals + experts;
  cudaTriggerProgrammaticLaunchCompletion();
  for (int index = static_cast<int>(threadIdx.x); index < kWarps * experts; index += kThreads) next[index] = 0;
  __syncthreads();
  int const own = pairs / kWarps;  // consecutive pairs of one warp
  int64_t const first = static_cast<int64_t>(blockIdx.x) * pairs + warp * own + lane;
#pragma unroll 4
  for (int offset = 0; offset < own; offset += kWarp) {
    int const expert = local_expert(params, first + offset);
    if (expert >= 0) atomicAdd(next + warp * experts + expert, 1);
  }
  cudaGridDependencySynchronize();
  sum_counts(params, totals, bases);
  for (int expert = static_cast<int>(threadIdx.x); expert < experts; expert += kThreads) {
    int32_t running = bases[expert];
#pragma unroll
    for (int other = 0; other < kWarps; ++other) {
      int32_t const count = next[other * experts + expert];
      next[other * experts + expert] = running;
      running += count;
    }
  }
  __syncthreads();
  for (int offset = 0; offset < own; offset += kWarp) {
    int64_t const pair = first + offset;
    int const expert = local_expert(params, pair);
    unsigned const same = __match_any_sync(kAllLanes, expert);
    int const before = __popc(same & ((1U << lane) - 1U));
    int32_t const base = expert >= 0 ? next[warp * experts + expert] : 0;
    __syncwarp();
    if (expert >= 0 && before == 0) next[warp * experts + expert] = base + __popc(same);
    __syncwarp();
    if (pair < params.rows * params.top_k) params.inverse[pair] = expert >= 0 ? base + before : -1;
  }
}

// Writes 2048 channels of a row, from `first` on, to every place that a lane holds.
__device__ __forceinline__ void scatter_strip(MoePermuteParams const& params, int64_t row, int first, int32_t place) {
  unsigned const held = __ballot_sync(kAllLanes, place >= 0);
  auto const* const source = static_cast<__nv_bfloat16 const*>(params.x) + row * params.hidden;
  auto* const permuted = static_cast<__nv_bfloat16*>(params.permuted);
  int const own = first + static_cast<int>(threadIdx.x) % kWarp * kVector;
  uint4 raw[kAhead];
#pragma unroll
  for (int index = 0; index < kAhead; ++index) {
    int const channel = own + index * kWarp * kVector;
    if (held != 0 && channel < params.hidden) raw[index] = load_once(source + channel);
  }
  for (unsigned left = held; left != 0; left &= left - 1) {
    int64_t const target = __shfl_sync(kAllLanes, place, __ffs(static_cast<int>(left)) - 1);
#pragma unroll
    for (int index = 0; index < kAhead; ++index) {
      int const channel = own + index * kWarp * kVector;
      if (channel < params.hidden) store_once(permuted + target * params.hidden + channel, raw[index]);
    }
  }
}

// Brings a strip of a row that has a place here into the L2 cache.
__device__ __forceinline__ void prefetch_strip(MoePermuteParams const& params, int64_t row, int first, int lane) {
  if (row >= params.rows) return;
  bool const held = lane < params.top_k && local_expert(params, row * params.top_k + lane) >= 0;
  if (!__any_sync(kAllLanes, held)) return;
  constexpr int kLine = 128 / static_cast<int>(sizeof(__nv_bfloat16));
#pragma unroll
  for (int channel = 0; channel < kStrip; channel += kWarp * kLine) {
    int const own = first + channel + lane * kLine;
    if (own < params.hidden) {
      ptx::prefetch(static_cast<__nv_bfloat16 const*>(params.x) + row * params.hidden + own);
    }
  }
}

// Warps take strips of rows: every row is read once; slots that are not held here are skipped. Places of a warp's next
// strip are on their way. Rows and ids are older than the kernels that sort: the first strips come while those work.
__global__ void __launch_bounds__(kScatterThreads, 4) scatter_kernel(MoePermuteParams const params) {
  int const lane = static_cast<int>(threadIdx.x) % kWarp;
  int const strips = (params.hidden + kStrip - 1) / kStrip;
  int const warp = static_cast<int>(blockIdx.x * kScatterThreads + threadIdx.x) / kWarp;
  int const all = static_cast<int>(gridDim.x) * (kScatterThreads / kWarp);
  for (int turn = 0; turn < kPrefetched; ++turn) {
    int64_t const item = warp + static_cast<int64_t>(turn) * all;
    prefetch_strip(params, item / strips, static_cast<int>(item % strips) * kStrip, lane);
  }
  cudaGridDependencySynchronize();
  auto const place_of = [&](int64_t row) {
    return lane < params.top_k && row < params.rows ? __ldg(params.inverse + row * params.top_k + lane) : -1;
  };
  int64_t row = warp / strips;
  int strip = warp % strips;
  int32_t place = place_of(row);
  while (row < params.rows) {
    int const next_strip = (strip + all % strips) % strips;
    int64_t const next_row = row + all / strips + (strip + all % strips) / strips;
    int32_t const next_place = place_of(next_row);
    scatter_strip(params, row, strip * kStrip, place);
    row = next_row;
    strip = next_strip;
    place = next_place;
  }
}

}  // namespace

size_t moe_permute_workspace(int64_t rows, int32_t top_k, int32_t experts) {
  if (rows <= 0 || top_k <= 0 || experts <= 0) return 0;
  // Not sort_blocks(): one pair more may take larger blocks, and fewer.
  int64_t const most_blocks = std::min(kMaxBlocks, (rows * top_k + kMinPairs - 1) / kMinPairs);
  return static_cast<size_t>(most_blocks) * static_cast<size_t>(experts) * sizeof(int32_t);
}

Status moe_permute(MoePermuteParams const& params, cudaStream_t stream) {
  REDKNOT_VALID(params.rows >= 0 && params.hidden > 0 && params.top_k > 0 && params.experts > 0);
  REDKNOT_SUPPORTED(params.experts <= kMaxExperts && params.top_k <= kMaxTopK && params.hidden % kVector == 0);
  REDKNOT_SUPPORTED(params.rows <= INT32_MAX / params.top_k);
  REDKNOT_VALID(params.ends != nullptr);
  if (params.rows == 0) {
    REDKNOT_CUDA(cudaMemsetAsync(params.ends, 0, sizeof(int32_t) * static_cast<size_t>(params.experts), stream));
    return Status::kSuccess;
  }
  REDKNOT_VALID(params.x != nullptr && params.ids != nullptr && params.permuted != nullptr);
  REDKNOT_VALID(params.inverse != nullptr && params.workspace != nullptr);
  REDKNOT_REQUIRE(aligned(params.x, 16) && aligned(params.permuted, 16) && aligned(params.workspace, 4),
                  Status::kMisaligned);
  REDKNOT_REQUIRE(params.workspace_bytes >= moe_permute_workspace(params.rows, params.top_k, params.experts),
                  Status::kWorkspaceTooSmall);
  int64_t const pairs = params.rows * params.top_k;
  auto const each = static_cast<int>(pairs_a_block(pairs));
  auto const blocks = static_cast<unsigned>(sort_blocks(pairs));
  size_t const row_bytes = sizeof(int32_t) * static_cast<size_t>(params.experts);
  constexpr int kPlaceRows = kWarps + 2;
  REDKNOT_CUDA(cudaFuncSetAttribute(place_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(kPlaceRows * kMaxExperts * sizeof(int32_t))));
  count_kernel<<<blocks, kThreads, row_bytes, stream>>>(params, each);
  REDKNOT_LAUNCHED();
  REDKNOT_CUDA(launch_after(place_kernel, blocks, kThreads, kPlaceRows * row_bytes, stream, params, each));
  int64_t const strips = params.rows * ((params.hidden + kStrip - 1) / kStrip);
  constexpr int kStripsABlock = kScatterThreads / kWarp;
  int64_t const scatter_blocks = std::min<int64_t>(kScatterBlocks, (strips + kStripsABlock - 1) / kStripsABlock);
  REDKNOT_CUDA(launch_after(scatter_kernel, static_cast<unsigned>(scatter_blocks), kScatterThreads, 0, stream, params));
  return Status::kSuccess;
}

}  // namespace redknot
