// A stable counting sort of (row, slot) pairs by expert in three kernels, then the rows themselves. No atomics decide
// an order: the same ids give the same permutation.

#include <algorithm>

#include "common/check.h"
#include "common/vector.cuh"
#include "kernels/moe/launch.h"

namespace redknot {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarp;
constexpr int kPairs = 4096;                 // pairs of one block
constexpr int kWarpPairs = kPairs / kWarps;  // consecutive pairs of one warp
constexpr int kMaxExperts = 1024;
constexpr int kMaxTopK = 32;
constexpr int kScatterThreads = 512;

int64_t sort_blocks(int64_t rows, int64_t top_k) { return (rows * top_k + kPairs - 1) / kPairs; }

__device__ __forceinline__ int local_expert(MoePermuteParams const& params, int64_t pair) {
  if (pair >= params.rows * params.top_k) return -1;
  int64_t const expert = params.ids[pair] - params.first;
  return expert >= 0 && expert < params.experts ? static_cast<int>(expert) : -1;
}

// Pairs of each expert in one block: counts [blocks, experts].
__global__ void __launch_bounds__(kThreads) count_kernel(MoePermuteParams const params) {
  extern __shared__ int32_t counts[];
  for (int expert = static_cast<int>(threadIdx.x); expert < params.experts; expert += kThreads) counts[expert] = 0;
  __syncthreads();
  int64_t const first = static_cast<int64_t>(blockIdx.x) * kPairs;
  for (int offset = static_cast<int>(threadIdx.x); offset < kPairs; offset += kThreads) {
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

// Counts become the first permuted row of each (block, expert); ends of the experts. One block; warps take experts in
// turn.
__global__ void __launch_bounds__(kMaxExperts) scan_kernel(MoePermuteParams const params, int blocks) {
  __shared__ int32_t firsts[kMaxExperts];  // pairs of each expert, then its first row
  __shared__ int32_t sums[kMaxExperts / kWarp];
  int const thread = static_cast<int>(threadIdx.x);
  int const lane = thread % kWarp;
  int const warp = thread / kWarp;
  auto* const counts = static_cast<int32_t*>(params.workspace);
  for (int expert = warp; expert < params.experts; expert += kMaxExperts / kWarp) {
    int32_t total = 0;
    for (int block = lane; block < blocks; block += kWarp) total += counts[block * params.experts + expert];
    total = __reduce_add_sync(kAllLanes, total);
    if (lane == 0) firsts[expert] = total;
  }
  __syncthreads();
  int32_t const total = thread < params.experts ? firsts[thread] : 0;
  int32_t end = inclusive_sum(total, lane);
  if (lane == kWarp - 1) sums[warp] = end;
  __syncthreads();
  for (int other = 0; other < warp; ++other) end += sums[other];
  if (thread < params.experts) {
    params.ends[thread] = end;
    firsts[thread] = end - total;
  }
  __syncthreads();
  for (int expert = warp; expert < params.experts; expert += kMaxExperts / kWarp) {
    int32_t next = firsts[expert];
    for (int first = 0; first < blocks; first += kWarp) {
      int const block = first + lane;
      int32_t const count = block < blocks ? counts[block * params.experts + expert] : 0;
      int32_t const through = inclusive_sum(count, lane);
      if (block < blocks) counts[block * params.experts + expert] = next + through - count;
      next += __shfl_sync(kAllLanes, through, kWarp - 1);
    }
  }
}

// Place of every pair: first row of its (block, expert), plus the pairs of that expert before it in the block.
__global__ void __launch_bounds__(kThreads) place_kernel(MoePermuteParams const params) {
  extern __shared__ int32_t next[];  // [warps, experts]
  int const lane = static_cast<int>(threadIdx.x) % kWarp;
  int const warp = static_cast<int>(threadIdx.x) / kWarp;
  int const experts = params.experts;
  for (int index = static_cast<int>(threadIdx.x); index < kWarps * experts; index += kThreads) next[index] = 0;
  __syncthreads();
  int64_t const first = static_cast<int64_t>(blockIdx.x) * kPairs + warp * kWarpPairs + lane;
  for (int offset = 0; offset < kWarpPairs; offset += kWarp) {
    int const expert = local_expert(params, first + offset);
    if (expert >= 0) atomicAdd(next + warp * experts + expert, 1);
  }
  __syncthreads();
  int32_t const* const bases =
      static_cast<int32_t const*>(params.workspace) + static_cast<int64_t>(blockIdx.x) * experts;
  for (int expert = static_cast<int>(threadIdx.x); expert < experts; expert += kThreads) {
    int32_t running = bases[expert];
    for (int other = 0; other < kWarps; ++other) {
      int32_t const count = next[other * experts + expert];
      next[other * experts + expert] = running;
      running += count;
    }
  }
  __syncthreads();
  for (int offset = 0; offset < kWarpPairs; offset += kWarp) {
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

// Every row of x is read once and written to each of its places; slots that are not held here are skipped.
__global__ void __launch_bounds__(kScatterThreads) scatter_kernel(MoePermuteParams const params) {
  __shared__ int32_t places[kMaxTopK];
  __shared__ int wanted;
  int64_t const row = blockIdx.x;
  if (threadIdx.x < kWarp) {
    int const slot = static_cast<int>(threadIdx.x);
    int32_t const place = slot < params.top_k ? params.inverse[row * params.top_k + slot] : -1;
    unsigned const held = __ballot_sync(kAllLanes, place >= 0);
    if (place >= 0) places[__popc(held & ((1U << slot) - 1U))] = place;
    if (slot == 0) wanted = __popc(held);
  }
  __syncthreads();
  if (wanted == 0) return;
  auto const* source = static_cast<__nv_bfloat16 const*>(params.x) + row * params.hidden;
  for (int channel = static_cast<int>(threadIdx.x) * kVector; channel < params.hidden;
       channel += kScatterThreads * kVector) {
    uint4 const raw = load_once(source + channel);
    for (int index = 0; index < wanted; ++index) {
      auto* target = static_cast<__nv_bfloat16*>(params.permuted) + static_cast<int64_t>(places[index]) * params.hidden;
      *reinterpret_cast<uint4*>(target + channel) = raw;
    }
  }
}

}  // namespace

size_t moe_permute_workspace(int64_t rows, int32_t top_k, int32_t experts) {
  if (rows <= 0 || top_k <= 0 || experts <= 0) return 0;
  return static_cast<size_t>(sort_blocks(rows, top_k)) * static_cast<size_t>(experts) * sizeof(int32_t);
}

Status moe_permute(MoePermuteParams const& params, cudaStream_t stream) {
  REDKNOT_VALID(params.rows >= 0 && params.hidden > 0 && params.top_k > 0 && params.experts > 0);
  REDKNOT_SUPPORTED(params.experts <= kMaxExperts && params.top_k <= kMaxTopK && params.hidden % kVector == 0);
  REDKNOT_SUPPORTED(params.rows <= INT32_MAX / params.top_k);
  REDKNOT_SUPPORTED(sort_blocks(params.rows, params.top_k) * params.experts <= INT32_MAX);
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
  int64_t const blocks = sort_blocks(params.rows, params.top_k);
  size_t const shared = sizeof(int32_t) * static_cast<size_t>(params.experts);
  REDKNOT_CUDA(cudaFuncSetAttribute(place_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(kWarps * kMaxExperts * sizeof(int32_t))));
  count_kernel<<<static_cast<unsigned>(blocks), kThreads, shared, stream>>>(params);
  REDKNOT_LAUNCHED();
  scan_kernel<<<1, kMaxExperts, 0, stream>>>(params, static_cast<int>(blocks));
  REDKNOT_LAUNCHED();
  place_kernel<<<static_cast<unsigned>(blocks), kThreads, kWarps * shared, stream>>>(params);
  REDKNOT_LAUNCHED();
  scatter_kernel<<<static_cast<unsigned>(params.rows), kScatterThreads, 0, stream>>>(params);
  REDKNOT_LAUNCHED();
  return Status::kSuccess;
}

}  // namespace redknot
