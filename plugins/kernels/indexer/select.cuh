#pragma once

// The best top_k of a row's scores, best first, ties to the earlier entry. One block a row.
// A candidate is one 64-bit key, score above complemented entry, so keys differ and "larger" settles every tie. A
// sample of the scores gives a bound that a few more than top_k should pass; one pass over the scores collects those.
// Where too few or too many passed (a sample may mislead, very many scores may be equal), digits of the keys are
// counted from the top until what lies above the digit of the k-th key, and in it, fits in shared memory. Candidates
// are put into narrow bins by their scores, and a key's rank is what the bins above hold and the larger keys of its
// own; where a bin is crowded they are sorted instead.

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
inline constexpr int kWarps = kSelectThreads / 32;
inline constexpr int kOwnBins = kBins / kSelectThreads;
inline constexpr int kMostInBin = 48;  // a key is compared with those of its bin one by one
inline constexpr int kBinned = kMostSelected + kMostInBin;

struct SelectShared {
  unsigned long long keys[kCandidates];
  unsigned long long binned[kBinned];
  int bins[kBins];
  int warp_sums[kWarps];
  uint2 extremes[kWarps];
  int digit, above, count;
};

__device__ __forceinline__ uint32_t order_score(float score) {
  uint32_t const bits = __float_as_uint(score + 0.0f);  // -0 and 0 tie
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float score_of(uint32_t ordered) {
  return __uint_as_float(ordered & 0x80000000u ? ordered & 0x7fffffffu : ~ordered);
}
__device__ __forceinline__ unsigned long long order_key(float score, int entry) {
  return static_cast<unsigned long long>(order_score(score)) << 32 | ~static_cast<uint32_t>(entry);
}

// A thread's bins, from the largest one of the block down, and how many keys lie in larger bins than its own.
__device__ inline int own_bins(SelectShared& shared, int (&own)[kOwnBins]) {
  int const thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  int total = 0;
#pragma unroll
  for (int i = 0; i < kOwnBins; ++i) {
    own[i] = shared.bins[kBins - 1 - (thread * kOwnBins + i)];
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
  return through - total + __reduce_add_sync(~0u, lane < warp ? shared.warp_sums[lane] : 0);
}

// Finds the digit of the `wanted`-th largest key: sets digit, and how many keys have a larger one.
__device__ inline void find_digit(SelectShared& shared, int wanted) {
  int own[kOwnBins];
  int before = own_bins(shared, own);
#pragma unroll
  for (int i = 0; i < kOwnBins; ++i) {
    if (before < wanted && before + own[i] >= wanted) {
      shared.digit = kBins - 1 - (static_cast<int>(threadIdx.x) * kOwnBins + i);
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

// Least and largest of the block's ordered scores, in every thread.
__device__ __forceinline__ float2 block_extremes(SelectShared& shared, uint32_t least, uint32_t most) {
  least = __reduce_min_sync(~0u, least);
  most = __reduce_max_sync(~0u, most);
  if (threadIdx.x % 32 == 0) shared.extremes[threadIdx.x / 32] = {least, most};
  __syncthreads();
  uint2 const other = shared.extremes[threadIdx.x % kWarps];
  return {score_of(__reduce_min_sync(~0u, other.x)), score_of(__reduce_max_sync(~0u, other.y))};
}

// A bound on ordered scores: in the sample about as many pass it as make `chosen` of all entries, and three deviations
// of that number more. Any bound is right, a good one saves time: bins between the sample's extremes are narrow enough.
// More than kCandidates entries.
__device__ inline uint32_t sampled_bound(SelectShared& shared, float const* scores, int entries, int chosen) {
  constexpr int kOwn = kSample / kSelectThreads;
  int const stride = entries / (kSample / kSamplePiece);
  float sample[kOwn];
  uint32_t least = ~0u, most = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    int const at = i * kSelectThreads + threadIdx.x;
    sample[i] = scores[at / kSamplePiece * stride + at % kSamplePiece];
    least = min(least, order_score(sample[i]));
    most = max(most, order_score(sample[i]));
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

__device__ __forceinline__ void collect_one(SelectShared& shared, float score, int entry, float least_score,
                                            unsigned long long least) {
  if (score < least_score) return;
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
  // NaN where everything is collected, which no score is less than.
  float const least_score = score_of(static_cast<uint32_t>(least >> 32));
  auto const words = static_cast<unsigned>(reinterpret_cast<uintptr_t>(scores) / sizeof(float));
  int const head = min(entries, static_cast<int>(-words % kQuad));
  int const quads = (entries - head) / kQuad;
  auto const* const whole = reinterpret_cast<float4 const*>(scores + head);
  int const thread = threadIdx.x;
  if (thread < head) collect_one(shared, scores[thread], thread, least_score, least);
  int const tail = head + quads * kQuad + thread;
  if (tail < entries) collect_one(shared, scores[tail], tail, least_score, least);
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
      collect_one(shared, loaded[i].x, entry, least_score, least);
      collect_one(shared, loaded[i].y, entry + 1, least_score, least);
      collect_one(shared, loaded[i].z, entry + 2, least_score, least);
      collect_one(shared, loaded[i].w, entry + 3, least_score, least);
    }
  }
  __syncthreads();
  int const found = shared.count;
  __syncthreads();
  return found;
}

// The `chosen` largest of `found` keys to the front, largest first, where no bin that matters is crowded; else nothing
// is changed, and false is returned. There are at least two keys.
__device__ inline bool rank_keys(SelectShared& shared, int found, int chosen) {
  uint32_t lowest = ~0u, highest = 0;
  for (int i = threadIdx.x; i < found; i += kSelectThreads) {
    auto const ordered = static_cast<uint32_t>(shared.keys[i] >> 32);
    lowest = min(lowest, ordered);
    highest = max(highest, ordered);
  }
  clear_bins(shared);
  float2 const extremes = block_extremes(shared, lowest, highest);
  float const range = extremes.y - extremes.x;
  if (!(range > 0 && range < INFINITY)) return false;
  float const scale = kBins / range;
  if (!(scale < INFINITY)) return false;
  // Never less for a larger score: differences and products round alike.
  auto const bin_of = [&](unsigned long long key) {
    return min(kBins - 1, static_cast<int>((score_of(static_cast<uint32_t>(key >> 32)) - extremes.x) * scale));
  };
  for (int i = threadIdx.x; i < found; i += kSelectThreads) atomicAdd(&shared.bins[bin_of(shared.keys[i])], 1);
  __syncthreads();
  int own[kOwnBins];
  int before = own_bins(shared, own);
  bool crowded = false;
#pragma unroll
  for (int i = 0; i < kOwnBins; ++i) {
    shared.bins[kBins - 1 - (static_cast<int>(threadIdx.x) * kOwnBins + i)] = before;
    crowded |= before < chosen && own[i] > kMostInBin;
    before += own[i];
  }
  if (__syncthreads_or(crowded)) return false;
  for (int i = threadIdx.x; i < found; i += kSelectThreads) {
    unsigned long long const key = shared.keys[i];
    int const slot = atomicAdd(&shared.bins[bin_of(key)], 1);
    if (slot < kBinned) shared.binned[slot] = key;
  }
  __syncthreads();
  // A bin's number is now where its keys end, and where those of the bin below begin.
  for (int slot = threadIdx.x; slot < min(found, chosen + kMostInBin); slot += kSelectThreads) {
    unsigned long long const key = shared.binned[slot];
    int const bin = bin_of(key);
    int const begin = bin + 1 < kBins ? shared.bins[bin + 1] : 0;
    if (begin >= chosen) continue;
    int rank = begin;
    int const end = shared.bins[bin];
    for (int other = begin; other < end; ++other) rank += shared.binned[other] > key ? 1 : 0;
    if (rank < chosen) shared.keys[rank] = key;
  }
  __syncthreads();
  return true;
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

__global__ void __launch_bounds__(kSelectThreads)
    select_kernel(__grid_constant__ Scoring const s, int64_t* selected, int32_t top_k) {
  extern __shared__ __align__(16) uint8_t select_raw[];
  auto& shared = *reinterpret_cast<SelectShared*>(select_raw);
  int64_t const row = int64_t{s.first_row} + blockIdx.x;
  float const* scores = s.scores + int64_t{blockIdx.x} * s.op.entries;
  int64_t const first = max(int64_t{0}, __ldg(s.op.row_segments + 2 * row));
  int64_t const last = min(int64_t{s.op.segment_count}, __ldg(s.op.row_segments + 2 * row + 1));
  int64_t first_entry = 0, held = 0;
  if (first < last) {
    int64_t const* tail = s.op.segments + segment::kColumnCount * (last - 1);
    first_entry = max(int64_t{0}, __ldg(s.op.segments + segment::kColumnCount * first + segment::kEntry));
    held = min(__ldg(tail + segment::kEntry) + __ldg(tail + segment::kEntries), s.op.entries) - first_entry;
  }
  int const entries = static_cast<int>(max(int64_t{0}, min(held, __ldg(s.op.visible + row))));
  int64_t* out = selected + row * top_k;
  int const chosen = min(top_k, entries);

  int found = 0;
  if (entries <= kCandidates) {
    for (int entry = threadIdx.x; entry < entries; entry += kSelectThreads) {
      shared.keys[entry] = order_key(scores[entry], entry);
    }
    found = entries;
    __syncthreads();
  } else {
    uint32_t const bound = sampled_bound(shared, scores, entries, chosen);
    found = collect(shared, scores, entries, static_cast<unsigned long long>(bound) << 32);
  }
  if (found < chosen || found > kCandidates) {
    found = collect(shared, scores, entries, exact_bound(shared, scores, entries, chosen));
  }
  if (found < 2 || !rank_keys(shared, found, chosen)) sort_keys(shared, found);
  for (int i = threadIdx.x; i < top_k; i += kSelectThreads) {
    out[i] = i < chosen ? first_entry + static_cast<uint32_t>(~shared.keys[i]) : -1;
  }
}

}  // namespace redknot::indexer
