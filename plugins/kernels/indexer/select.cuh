#pragma once

// The best top_k of a row's scores, best first, ties to the earlier entry. One block a row.
// A candidate is one 64-bit key, score above complemented entry, so keys differ and "larger" settles every tie. A
// sample of the scores gives a bound that a few more than top_k should pass; one pass over the scores collects those,
// and they are sorted. Where too few or too many passed (a sample may mislead, very many scores may be equal), digits
// of the keys are counted from the top until what lies above the digit of the k-th key, and in it, fits in shared
// memory.

#include <cstdint>

#include "kernels/indexer/score.cuh"

namespace redknot::indexer {

inline constexpr int kSelectThreads = 512;
inline constexpr int kDigitBits = 11;
inline constexpr int kBins = 1 << kDigitBits;
inline constexpr int kCandidates = 4096;
inline constexpr int kKeyBits = 64;
inline constexpr int kSample = kCandidates;
inline constexpr int kSamplePiece = 4;  // neighbouring entries of the sample: half a sector of memory
inline constexpr int kQuad = 4;         // scores of one load
inline constexpr int kLoads = 4;        // quads that a thread has on their way

struct SelectShared {
  unsigned long long keys[kCandidates];
  int bins[kBins];
  int warp_sums[kSelectThreads / 32];
  float2 extremes[kSelectThreads / 32];
  int digit, above, count;
};

__device__ __forceinline__ uint32_t order_score(float score) {
  uint32_t const bits = __float_as_uint(score + 0.0f);  // -0 and 0 tie
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ unsigned long long order_key(float score, int entry) {
  return static_cast<unsigned long long>(order_score(score)) << 32 | ~static_cast<uint32_t>(entry);
}

// Finds the digit of the `wanted`-th largest key: sets digit, and how many keys have a larger one.
__device__ inline void find_digit(SelectShared& shared, int wanted) {
  constexpr int kOwn = kBins / kSelectThreads;
  int const thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  int own[kOwn], total = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    own[i] = shared.bins[kBins - 1 - (thread * kOwn + i)];  // from the largest digit down
    total += own[i];
  }
  int through = total;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    int const other = __shfl_up_sync(~0u, through, step);
    if (lane >= step) through += other;
  }
  if (lane == 31) shared.warp_sums[warp] = through;
  __syncthreads();
  int before = through - total;
  for (int w = 0; w < warp; ++w) before += shared.warp_sums[w];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    if (before < wanted && before + own[i] >= wanted) {
      shared.digit = kBins - 1 - (thread * kOwn + i);
      shared.above = before;
      shared.count = own[i];
    }
    before += own[i];
  }
  __syncthreads();
}

__device__ __forceinline__ void clear_bins(SelectShared& shared) {
  for (int i = threadIdx.x; i < kBins; i += kSelectThreads) shared.bins[i] = 0;
  __syncthreads();
}

// Least and largest of the block's values, NaN aside, in every thread.
__device__ __forceinline__ float2 block_extremes(SelectShared& shared, float least, float most) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    least = fminf(least, __shfl_xor_sync(~0u, least, step));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
  }
  if (threadIdx.x % 32 == 0) shared.extremes[threadIdx.x / 32] = {least, most};
  __syncthreads();
#pragma unroll 1
  for (float2 const other : shared.extremes) {
    least = fminf(least, other.x);
    most = fmaxf(most, other.y);
  }
  return {least, most};
}

// A bound on ordered scores: in the sample about as many pass it as make `chosen` of all entries, and three deviations
// of that number more. Any bound is right, a good one saves time: bins between the sample's extremes are narrow enough.
// More than kCandidates entries.
__device__ inline uint32_t sampled_bound(SelectShared& shared, float const* scores, int entries, int chosen) {
  constexpr int kOwn = kSample / kSelectThreads;
  int const stride = entries / (kSample / kSamplePiece);
  float sample[kOwn];
  float least = INFINITY, most = -INFINITY;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    int const at = i * kSelectThreads + threadIdx.x;
    sample[i] = scores[at / kSamplePiece * stride + at % kSamplePiece];
    least = fminf(least, sample[i]);
    most = fmaxf(most, sample[i]);
  }
  clear_bins(shared);
  float2 const extremes = block_extremes(shared, least, most);
  float const range = extremes.y - extremes.x;
  if (!(range > 0 && range < INFINITY)) return 0;  // everything passes: the digits will tell
  float const scale = kBins / range;
#pragma unroll
  for (float const value : sample) {
    atomicAdd(&shared.bins[min(kBins - 1, max(0, static_cast<int>((value - extremes.x) * scale)))], 1);
  }
  __syncthreads();
  float const expected = static_cast<float>(chosen) * kSample / static_cast<float>(entries);
  find_digit(shared, min(kSample, static_cast<int>(expected + 3.0f * sqrtf(expected)) + 4));
  return order_score(extremes.x + static_cast<float>(shared.digit) * (range / kBins));
}

// The least key of at most kCandidates keys that hold the `chosen` largest.
__device__ inline unsigned long long exact_bound(SelectShared& shared, float const* scores, int entries, int chosen) {
  unsigned long long prefix = 0, least = 0;
  int sure = 0;
  for (int shift = kKeyBits; shift > 0;) {
    int const digits = min(kDigitBits, shift);
    int const next = shift - digits;
    clear_bins(shared);
    for (int entry = threadIdx.x; entry < entries; entry += kSelectThreads) {
      unsigned long long const key = order_key(scores[entry], entry);
      if (shift == kKeyBits || key >> shift == prefix) {
        atomicAdd(&shared.bins[key >> next & ((1u << digits) - 1)], 1);
      }
    }
    __syncthreads();
    find_digit(shared, chosen - sure);
    prefix = (shift == kKeyBits ? 0 : prefix << digits) | static_cast<unsigned>(shared.digit);
    sure += shared.above;
    int const open = shared.count;
    least = prefix << next;
    shift = next;
    __syncthreads();
    if (sure + open <= kCandidates) break;
  }
  return least;
}

__device__ __forceinline__ void collect_one(SelectShared& shared, float score, int entry, unsigned long long least) {
  unsigned long long const key = order_key(score, entry);
  if (key < least) return;
  int const at = atomicAdd(&shared.count, 1);
  if (at < kCandidates) shared.keys[at] = key;
}

// Keys at or above `least` into shared memory, in any order; how many there are, which may be more than fit. Aligned
// quads of scores are loaded whole.
__device__ inline int collect(SelectShared& shared, float const* scores, int entries, unsigned long long least) {
  if (threadIdx.x == 0) shared.count = 0;
  __syncthreads();
  auto const words = static_cast<unsigned>(reinterpret_cast<uintptr_t>(scores) / sizeof(float));
  int const head = min(entries, static_cast<int>(-words % kQuad));
  int const quads = (entries - head) / kQuad;
  auto const* const whole = reinterpret_cast<float4 const*>(scores + head);
  int const thread = threadIdx.x;
  if (thread < head) collect_one(shared, scores[thread], thread, least);
  int const tail = head + quads * kQuad + thread;
  if (tail < entries) collect_one(shared, scores[tail], tail, least);
  for (int first = thread; first < quads; first += kLoads * kSelectThreads) {
    float4 loaded[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      int const quad = first + i * kSelectThreads;
      if (quad < quads) loaded[i] = whole[quad];
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      int const quad = first + i * kSelectThreads;
      if (quad >= quads) continue;
      int const entry = head + quad * kQuad;
      collect_one(shared, loaded[i].x, entry, least);
      collect_one(shared, loaded[i].y, entry + 1, least);
      collect_one(shared, loaded[i].z, entry + 2, least);
      collect_one(shared, loaded[i].w, entry + 3, least);
    }
  }
  __syncthreads();
  int const found = shared.count;
  __syncthreads();
  return found;
}

// Largest first. Pairs up to 32 apart lie in 64 keys of one warp, which needs no barrier of the block.
__device__ inline void sort_keys(SelectShared& shared, int found) {
  int size = 2;
  while (size < found) size *= 2;
  for (int i = found + threadIdx.x; i < size; i += kSelectThreads) shared.keys[i] = 0;
  __syncthreads();
  for (int width = 2; width <= size; width *= 2) {
    for (int step = width / 2; step > 0; step /= 2) {
      for (int i = threadIdx.x; i < size / 2; i += kSelectThreads) {
        int const left = 2 * i - (i & (step - 1)), right = left + step;
        unsigned long long const a = shared.keys[left], b = shared.keys[right];
        bool const descending = (left & width) == 0;
        if (descending ? a < b : a > b) {
          shared.keys[left] = b;
          shared.keys[right] = a;
        }
      }
      bool const crosses = step > 32 || (step == 1 && width > 32);
      if (crosses) {
        __syncthreads();
      } else {
        __syncwarp();
      }
    }
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kSelectThreads) select_kernel(__grid_constant__ Scoring const s) {
  extern __shared__ __align__(16) uint8_t select_raw[];
  auto& shared = *reinterpret_cast<SelectShared*>(select_raw);
  int64_t const row = int64_t{s.first_row} + blockIdx.x;
  float const* scores = s.scores + int64_t{blockIdx.x} * s.op.entries;
  int64_t const first = max(int64_t{0}, __ldg(s.op.row_segments + 2 * row));
  int64_t const last = min(int64_t{s.op.segment_count}, __ldg(s.op.row_segments + 2 * row + 1));
  int64_t first_entry = 0, held = 0;
  if (first < last) {
    int64_t const* tail = s.op.segments + 5 * (last - 1);
    first_entry = max(int64_t{0}, __ldg(s.op.segments + 5 * first + 3));
    held = min(__ldg(tail + 3) + __ldg(tail + 4), s.op.entries) - first_entry;
  }
  int const entries = static_cast<int>(max(int64_t{0}, min(held, __ldg(s.op.visible + row))));
  int64_t* out = s.op.selected + row * s.op.top_k;
  int const chosen = min(s.op.top_k, entries);

  int found = 0;
  if (entries > kCandidates) {
    uint32_t const bound = sampled_bound(shared, scores, entries, chosen);
    found = collect(shared, scores, entries, static_cast<unsigned long long>(bound) << 32);
  }
  if (found < chosen || found > kCandidates) {
    unsigned long long const least = entries > kCandidates ? exact_bound(shared, scores, entries, chosen) : 0;
    found = collect(shared, scores, entries, least);
  }
  sort_keys(shared, found);
  for (int i = threadIdx.x; i < s.op.top_k; i += kSelectThreads) {
    out[i] = i < chosen ? first_entry + static_cast<uint32_t>(~shared.keys[i]) : -1;
  }
}

}  // namespace redknot::indexer
