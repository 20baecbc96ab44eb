#pragma once

// From the keys in a stage to probabilities.

#include "common/turn.cuh"
#include "kernels/attention/worker.cuh"

namespace redknot::attention {

// fp16 values become relative to another scale.
template <typename T, int kGroup>
__device__ __forceinline__ void Worker<T, kGroup>::rescale(int largest) {
  float const shrink = exp2f(static_cast<float>(largest_ - largest));
  largest_ = largest;
#pragma unroll
  for (int c = 0; c < T::kOwn; ++c) {
    if (is_wide(block_of(c))) continue;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o_[c][n][i] *= shrink;
    }
  }
}

template <typename T, int kGroup>
__device__ __forceinline__ void Worker<T, kGroup>::read_scales(uint2 const (&exponents)[2]) {
  int const base = largest_ - kScaleHeadroom - 127;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int block = 0; block < kBlocks - 1; ++block) {
      int const exponent = static_cast<int>(__byte_perm(exponents[h].x, exponents[h].y, 0x4440 + block)) & 0xff;
      scale_[block][h] = __int_as_float(max(exponent - base, 0) << 23);
    }
  }
}

// Waits for the first half of the tile's channels, for the matrix units as well; whether the second one is there, too.
template <typename T, int kGroup>
__device__ __forceinline__ bool Worker<T, kGroup>::await_tile() const {
  ptx::barrier_wait(ptx::shared_address(&shared_.full[cursor_.stage][0]), cursor_.parity);
  bool const whole = ptx::barrier_test(ptx::shared_address(&shared_.full[cursor_.stage][1]), cursor_.parity);
  wgmma::publish();
  return whole;
}
template <typename T, int kGroup>
__device__ __forceinline__ void Worker<T, kGroup>::await_rest() const {
  ptx::barrier_wait(ptx::shared_address(&shared_.full[cursor_.stage][1]), cursor_.parity);
  wgmma::publish();
}

// Where chunk `chunk` of 16 bytes of the rope channels of a key lies: those of packed keys end in the tails.
template <typename T, int kGroup>
__device__ __forceinline__ uint32_t Worker<T, kGroup>::rope_chunk(int key, int chunk) const {
  constexpr int kLineChunks = kLineBytes / 16, kFirst = kPacked ? kLineChunks / 2 : 0;
  int const at = kFirst + chunk;
  if (at >= kLineChunks) {
    return tails_ + wgmma::swizzled(key, tail_chunk<T>(team_, cursor_.stage) + at - kLineChunks);
  }
  return lines(1) + (T::kHalfLines - 1) * kLineStride + wgmma::swizzled(key, at);
}

// Turns the rope channels of the tile's keys by their frames; eight threads a key.
template <typename T, int kGroup>
__device__ __forceinline__ void Worker<T, kGroup>::turn(Header<T> const& header) const {
  constexpr int kChunks = 2 * kRopeDim / 16;
  float const inverse = 1.0f / __ldg(op_.rope);  // a constant factor of the table must not count twice
  int const chunk = thread_ % kChunks;
#pragma unroll 2
  for (int key = thread_ / kChunks; key < kTileKeys; key += T::kWorkers / kChunks) {
    int const frame = header.frame[key];
    uint32_t const at = rope_chunk(key, chunk);
    auto const* const angles = reinterpret_cast<float4 const*>(rope_at(op_, frame)) + 2 * chunk;
    float4 const two[2] = {__ldg(angles), __ldg(angles + 1)};
    uint4 const words = turned(ptx::load_shared_16(at), two, inverse);
    if (frame != 0) ptx::store_16(at, words);
  }
  wgmma::publish();
  meet();
}

// Scores of the tile's keys and this group's columns, in log2 units.
template <typename T, int kGroup>
__device__ __forceinline__ void Worker<T, kGroup>::score(Header<T> const& header, bool whole, float (&s)[kO][4]) {
  constexpr int kLine = T::kColumns * kLineBytes;
  uint64_t const keys[2] = {wgmma::descriptor(lines(0)), wgmma::descriptor(lines(1))};
  uint64_t const query = wgmma::descriptor(ptx::shared_address(shared_.query));
  auto const at = [](uint64_t descriptor, int bytes) { return descriptor + (bytes >> 4); };
  if constexpr (!kPacked) {
    wgmma::fence();
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      if (b == kBlocks / 2) {
        wgmma::commit();
        if (!whole) await_rest();
        wgmma::fence();
      }
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        WideScore::multiply(s, at(keys[b / 4], b % 4 * kLineStride + 32 * step),
                            at(query, b * kLine + kGroup * kO * 8 * kLineBytes + 32 * step), b + step > 0);
      }
    }
    wgmma::commit();
    wgmma::wait<0>();
#pragma unroll
    for (int n = 0; n < kO; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] *= kScoreScale;
    }
  } else {
    int4 const most = *reinterpret_cast<int4 const*>(header.largest);
    uint2 const exponents[2] = {header.scales[16 * warp_ + g_], header.scales[16 * warp_ + 8 + g_]};
    int const largest = max(max(most.x, most.y), max(most.z, most.w));
    if (largest > largest_ + kScaleSlack) rescale(largest);
    // The products of a block are added up while those of the next are made.
    float product[kProducts][2 * kO][4], half[kO][4];
#pragma unroll
    for (int n = 0; n < kO; ++n) half[n][0] = half[n][1] = half[n][2] = half[n][3] = 0;
    auto const add = [&](int block) {
#pragma unroll
      for (int n = 0; n < kO; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float const both = product[block % kProducts][n][i] + product[block % kProducts][kO + n][i] * kSecondTerm;
          half[n][i] += both * scale_[block][i / 2];
        }
      }
    };
    constexpr int kCodeBlocks = kBlocks - 1;
#pragma unroll
    for (int b = 0; b < kCodeBlocks; ++b) {
      if (b == kBlocks / 2 && !whole) await_rest();
      wgmma::fence();
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        CodeScore::multiply(product[b % kProducts], at(keys[b / 4], b % 4 / 2 * kLineStride + b % 2 * 64 + 32 * step),
                            at(query, b / 2 * 2 * kLine + kGroup * kO * 16 * kLineBytes + b % 2 * 64 + 32 * step),
                            step > 0);
      }
      wgmma::commit();
      if (b == kProducts - 1) read_scales(exponents);  // the first products are on their way
      if (b >= kProducts - 1) {
        wgmma::wait<kProducts - 1>();
        add(b - (kProducts - 1));
      }
    }
    uint64_t const tail = wgmma::descriptor(tails_ + 16 * tail_chunk<T>(team_, cursor_.stage));
    wgmma::fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      uint64_t const k = step < 2 ? at(keys[1], kLineStride + 64 + 32 * step) : at(tail, 32 * (step - 2));
      WideScore::multiply(
          s, k, at(query, 3 * 2 * kLine + (kGroup * 16 + step / 2 * 8) * kO * kLineBytes + 64 + 32 * (step % 2)),
          step > 0);
    }
    wgmma::commit();
    float2 columns[kO];
#pragma unroll
    for (int n = 0; n < kO; ++n) columns[n] = *reinterpret_cast<float2 const*>(&shared_.query_scale[column_of(n, 0)]);
    wgmma::wait<0>();
#pragma unroll
    for (int b = kCodeBlocks - (kProducts - 1); b < kCodeBlocks; ++b) add(b);
    float const scale = kScoreScale * exp2f(static_cast<float>(largest_ - 127 - kScaleHeadroom));
#pragma unroll
    for (int n = 0; n < kO; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[n][i] = s[n][i] * kScoreScale + half[n][i] * (scale * (i & 1 ? columns[n].y : columns[n].x));
      }
    }
  }
}

// Hides the keys that a column's row does not see.
template <typename T, int kGroup>
__device__ __forceinline__ void Worker<T, kGroup>::mask(Header<T> const& header, float (&s)[kO][4]) const {
  int const x[2] = {header.x[16 * warp_ + g_], header.x[16 * warp_ + 8 + g_]};
  Source const source = header.source;
#pragma unroll
  for (int n = 0; n < kO; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const column = column_of(n, i), position = shared_.position[column];
      int const low = source == Source::kWindow ? position - op_.window + 1 : INT32_MIN;
      int const high = source == Source::kSelected ? kNoKey
                       : source == Source::kWindow ? position + 1
                                                   : shared_.visible[column];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (x[h] < low || x[h] >= high) s[n][2 * h + i] = kNone;
      }
    }
  }
}

// Probabilities of this warp's keys, relative to the base of their column, to shared memory; returns their sums.
template <typename T, int kGroup>
__device__ __forceinline__ void Worker<T, kGroup>::store_probabilities(float const (&s)[kO][4],
                                                                       float (&sum)[kO][2]) const {
  int const chunk = 2 * warp_ + lane_ / 8 % 2;
  uint32_t const place =
      ptx::shared_address(shared_.probabilities[0]) + 8 * kGroup * kO * 128 + wgmma::swizzled(lane_ % 8, chunk);
#pragma unroll
  for (int n = 0; n < kO; ++n) {
    float p[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) p[i] = ptx::exp2_fast(s[n][i] - (base_[n][i & 1] == kNone ? 0.0f : base_[n][i & 1]));
#pragma unroll
    for (int i = 0; i < 2; ++i) sum[n][i] = p[i] + p[i + 2];
    uint32_t const to = place + n * 8 * 128;
    if constexpr (kPacked) {
      uint32_t const low = ptx::pack_f16(p[0], p[1]), high = ptx::pack_f16(p[2], p[3]);
#pragma unroll
      for (int b = 0; b < kBlocks - 1; ++b) {
        ptx::store_matrices_transposed(to + b * T::kColumns * 128,
                                       ptx::multiply_f16(low, ptx::pack_f16(scale_[b][0], scale_[b][0])),
                                       ptx::multiply_f16(high, ptx::pack_f16(scale_[b][1], scale_[b][1])));
      }
    }
    ptx::store_matrices_transposed(to + (T::kCopies - 1) * T::kColumns * 128, ptx::pack_bf16(p[0], p[1]),
                                   ptx::pack_bf16(p[2], p[3]));
  }
  wgmma::publish();
}

// Scores to probabilities in shared memory. Ends with a barrier after which they may be multiplied. Where some column's
// largest score is far above its base, the base is found anew and the output shrinks.
template <typename T, int kGroup>
__device__ __forceinline__ void Worker<T, kGroup>::softmax(float const (&s)[kO][4]) {
  float most[kO][2];
#pragma unroll
  for (int n = 0; n < kO; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) most[n][i] = fmaxf(s[n][i], s[n][i + 2]);
  }
  bool grown = false;
#pragma unroll
  for (int n = 0; n < kO; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) grown |= most[n][i] > base_[n][i] + kPeakSlack;
  }
  ptx::barrier_wait(ptx::shared_address(&shared_.drained), drained_ ^ 1);
  drained_ ^= 1;
  float sum[kO][2];
  store_probabilities(s, sum);
  if (!ptx::sync_threads_or(kWorkersMeet + team_, T::kWorkers, grown)) {
#pragma unroll
    for (int n = 0; n < kO; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) sum_[n][i] += sum[n][i];
    }
    return;
  }
#pragma unroll
  for (int step = 4; step < 32; step *= 2) {
#pragma unroll
    for (int n = 0; n < kO; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) most[n][i] = fmaxf(most[n][i], __shfl_xor_sync(~0u, most[n][i], step));
    }
  }
  if (g_ == 0) {
#pragma unroll
    for (int n = 0; n < kO; ++n) {
      *reinterpret_cast<float2*>(&shared_.peak[warp_][column_of(n, 0)]) = {most[n][0], most[n][1]};
    }
  }
  meet();
  float alpha[kO][2];
#pragma unroll
  for (int n = 0; n < kO; ++n) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      float2 const theirs = *reinterpret_cast<float2 const*>(&shared_.peak[w][column_of(n, 0)]);
      most[n][0] = fmaxf(most[n][0], theirs.x);
      most[n][1] = fmaxf(most[n][1], theirs.y);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float const peak = fmaxf(base_[n][i], most[n][i]);
      alpha[n][i] = peak == kNone ? 1.0f : ptx::exp2_fast(base_[n][i] - peak);
      base_[n][i] = peak;
    }
    if constexpr (T::kGroups == 2) {
      if (warp_ == 0 && g_ == 0) {
        *reinterpret_cast<float2*>(&shared_.factor[column_of(n, 0)]) = {alpha[n][0], alpha[n][1]};
      }
    }
  }
  store_probabilities(s, sum);
  meet();
#pragma unroll
  for (int n = 0; n < kO; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) sum_[n][i] = sum_[n][i] * alpha[n][i] + sum[n][i];
  }
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    float2 factor;
    if constexpr (T::kGroups == 1) {
      factor = {alpha[n][0], alpha[n][1]};
    } else {
      factor = *reinterpret_cast<float2 const*>(&shared_.factor[8 * n + 2 * t_]);
    }
#pragma unroll
    for (int c = 0; c < T::kOwn; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o_[c][n][i] *= i & 1 ? factor.y : factor.x;
    }
  }
}

}  // namespace redknot::attention
