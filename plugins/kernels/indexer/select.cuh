#pragma once

// The best top_k of a row's scores, best first, ties to the earlier entry. One block a row.
// A candidate is one 64-bit key, score above complemented entry, so keys differ and "larger" settles every tie. Digits
// of the keys are counted from the top until what lies above the digit of the k-th key, and in it, fits in shared
// memory; that is sorted there. Two passes over the scores are the rule, more where very many scores are equal.

#include <cstdint>

#include "kernels/indexer/score.cuh"

namespace redknot::indexer {

inline constexpr int kSelectThreads = 512;
inline constexpr int kDigitBits = 11;
inline constexpr int kBins = 1 << kDigitBits;
inline constexpr int kCandidates = 4096;
inline constexpr int kKeyBits = 64;

struct SelectShared {
  unsigned long long keys[kCandidates];
  int bins[kBins];
  int warp_sums[kSelectThreads / 32];
  int digit, above, count;
};

__device__ __forceinline__ unsigned long long order_key(float score, int entry) {
  uint32_t const bits = __float_as_uint(score + 0.0f);  // -0 and 0 tie
  uint32_t const ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<unsigned long long>(ordered) << 32 | ~static_cast<uint32_t>(entry);
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

  // Keys at or above `least` are the candidates: digits above were settled, `shift` bits remain open.
  unsigned long long least = 0;
  int sure = 0;
  if (entries > kCandidates) {
    unsigned long long prefix = 0;
    for (int shift = kKeyBits; shift > 0;) {
      int const digits = min(kDigitBits, shift);
      int const next = shift - digits;
      for (int i = threadIdx.x; i < kBins; i += kSelectThreads) shared.bins[i] = 0;
      __syncthreads();
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
  }
  if (threadIdx.x == 0) shared.count = 0;
  __syncthreads();
  for (int entry = threadIdx.x; entry < entries; entry += kSelectThreads) {
    unsigned long long const key = order_key(scores[entry], entry);
    if (key >= least) shared.keys[atomicAdd(&shared.count, 1)] = key;
  }
  __syncthreads();
  int const found = shared.count;
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
      __syncthreads();
    }
  }
  for (int i = threadIdx.x; i < s.op.top_k; i += kSelectThreads) {
    out[i] = i < chosen ? first_entry + static_cast<uint32_t>(~shared.keys[i]) : -1;
  }
}

}  // namespace redknot::indexer
