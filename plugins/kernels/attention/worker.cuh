#pragma once

// Scores, probabilities and outputs from the keys in the stages.
//
// Fragments: g = lane / 4, t = lane % 4. Score fragments hold keys g, g + 8 of the warp's 16 and columns 2t, 2t + 1;
// output fragments two channels of the warp's 16 and the same columns. Scores of packed keys are products of codes: q
// is the sum of two terms of e4m3, the second 2^-4 of the first, relative to the column's largest channel. For the
// output codes become fp16 exactly. Block scales multiply each block's part of the scores and, as fp16 powers of two
// relative to the largest seen (a block 2^28 below that is lost), copies of the probabilities for the output. Rope
// channels and bf16 pools are multiplied as bf16.

#include "common/ptx.cuh"
#include "common/wgmma.cuh"
#include "kernels/attention/shared.cuh"

namespace redknot::attention {

// What warpgroup kGroup does.
template <typename T, int kGroup>
class Worker {
 public:
  __device__ Worker(SegLatentAttentionParams const& op, Shared<T>& shared, Unit const& unit)
      : op_(op),
        shared_(shared),
        unit_(unit),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x / 32 % 4),
        g_(lane_ / 4),
        t_(lane_ % 4) {
#pragma unroll
    for (int c = 0; c < T::kOwn; ++c) {
#pragma unroll
      for (int n = 0; n < kN; ++n) o_[c][n][0] = o_[c][n][1] = o_[c][n][2] = o_[c][n][3] = 0;
    }
#pragma unroll
    for (int n = 0; n < kO; ++n) {
      base_[n][0] = base_[n][1] = kNone;
      sum_[n][0] = sum_[n][1] = 0;
    }
  }

  __device__ __forceinline__ void load_queries();
  __device__ __forceinline__ void walk();
  __device__ __forceinline__ void finish();

 private:
  static constexpr bool kPacked = T::kPacked;
  static constexpr int kN = T::kTiles;
  static constexpr int kO = T::kOwnTiles;
  // Of fragments: one is multiplied while the other is made, where registers suffice; and of products of codes.
  static constexpr int kBuffers = 2;
  static constexpr int kProducts = T::kColumns == 8 ? 4 : kO < 4 ? 2 : 1;
  static constexpr float kSecondTerm = 1.0f / 16;  // of q
  using WideScore = wgmma::Product<8 * kO, true>;
  using CodeScore = wgmma::CodeProduct<16 * kO>;
  using WideSum = wgmma::Product<T::kColumns, true>;
  using HalfSum = wgmma::Product<T::kColumns, false>;

  SegLatentAttentionParams const& op_;
  Shared<T>& shared_;
  Unit const unit_;
  int const lane_, warp_, g_, t_;
  Cursor<T::kStages> cursor_;

  float o_[T::kOwn][kN][4];
  float base_[kO][2], sum_[kO][2];             // log2 of what probabilities are relative to; sums of this thread's keys
  int drained_ = 0;                            // parity of what `shared.drained` completes next
  int largest_ = 0;                            // biased exponent that fp16 values are relative to
  float scale_[kPacked ? kBlocks - 1 : 1][2];  // of this thread's keys, relative to largest_

  // Blocks that hold bf16 channels: all of a bf16 pool, the rope channels of a packed one.
  static __device__ __forceinline__ constexpr bool is_wide(int block) { return !kPacked || block == kBlocks - 1; }
  // Rope channels begin in the middle of a line of packed keys.
  static constexpr int kRopeByte = kPacked ? kHeadDim - kRopeDim : 2 * (kHeadDim - kRopeDim);
  static __device__ __forceinline__ constexpr int block_of(int own) { return kGroup * T::kOwn + own; }
  __device__ __forceinline__ int column_of(int own_tile, int i) const {
    return 8 * (kGroup * kO + own_tile) + 2 * t_ + i;
  }

  // This thread needs a half of the stage's channels no more.
  __device__ __forceinline__ void release(int half) const {
    ptx::barrier_arrive(ptx::shared_address(&shared_.empty[cursor_.stage][half]));
  }
  __device__ __forceinline__ void store_query(int column, int position, uint4 const (&chunks)[2]);
  __device__ __forceinline__ void rescale(int largest);
  __device__ __forceinline__ void read_scales(Stage<T> const& stage);
  __device__ __forceinline__ void await(int half) const;
  __device__ __forceinline__ void score(Stage<T> const& stage, float (&s)[kO][4]) const;
  __device__ __forceinline__ void mask(Stage<T> const& stage, float (&s)[kO][4]) const;
  __device__ __forceinline__ void store_probabilities(float const (&s)[kO][4], float (&sum)[kO][2]) const;
  __device__ __forceinline__ void softmax(float const (&s)[kO][4]);
  __device__ __forceinline__ void accumulate(Stage<T> const& stage);
};

// q of every column, turned by the row's position. Columns past the last repeat it: nothing of them is written.
template <typename T, int kGroup>
__device__ __forceinline__ void Worker<T, kGroup>::load_queries() {
  constexpr int kChunks = kHeadDim / 8;
  constexpr int kAtOnce = 4;  // columns of a warp whose loads are on their way together
  constexpr int kWarps = T::kWorkers / 32;
  constexpr int kOwnColumns = T::kColumns / kWarps, kTogether = kOwnColumns < kAtOnce ? kOwnColumns : kAtOnce;
  int const last = unit_.rows * unit_.heads - 1;
  int const warp = threadIdx.x / 32;
#pragma unroll 1
  for (int first = 0; first < kOwnColumns; first += kTogether) {
    uint4 chunks[kTogether][2];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      int const shown = min(warp * kOwnColumns + first + i, last), row = shared_.column_row[shown];
      auto const* q = column_pointer(op_, unit_, row, shown, static_cast<__nv_bfloat16 const*>(op_.q_global),
                                     static_cast<__nv_bfloat16 const*>(op_.q_local));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        chunks[i][half] = __ldg(reinterpret_cast<uint4 const*>(q) + half * kChunks / 2 + lane_);
      }
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      int const column = warp * kOwnColumns + first + i, row = shared_.column_row[min(column, last)];
      store_query(column, shared_.row_position[row], chunks[i]);
    }
  }
  wgmma::publish();
}

// Chunks `lane` and `lane` + 32 of 8 channels of a column's q.
template <typename T, int kGroup>
__device__ __forceinline__ void Worker<T, kGroup>::store_query(int column, int position, uint4 const (&chunks)[2]) {
  constexpr int kLine = T::kColumns * kLineBytes;
  constexpr int kRopeLane = 32 - kRopeDim / 8;
  float x[2][8];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t const words[4] = {chunks[half].x, chunks[half].y, chunks[half].z, chunks[half].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float2 const pair = ptx::unpack_bf16(words[i]);
      x[half][2 * i] = pair.x, x[half][2 * i + 1] = pair.y;
    }
  }
  uint4 wide[2] = {chunks[0], chunks[1]};
  bool const rope = lane_ >= kRopeLane;  // of the second chunk
  if (rope) {
    float4 const* angles = reinterpret_cast<float4 const*>(rope_at(op_, position)) + 2 * (lane_ - kRopeLane);
    float4 const two[2] = {__ldg(angles), __ldg(angles + 1)};
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float const c = i % 2 ? two[i / 2].z : two[i / 2].x, s = i % 2 ? two[i / 2].w : two[i / 2].y;
      float const first = x[1][2 * i], second = x[1][2 * i + 1];
      words[i] = ptx::pack_bf16(first * c - second * s, second * c + first * s);
    }
    wide[1] = {words[0], words[1], words[2], words[3]};
  }
  if constexpr (!kPacked) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int const chunk = 32 * half + lane_;
      *reinterpret_cast<uint4*>(shared_.query + chunk / 8 * kLine + wgmma::swizzled(column, chunk % 8)) = wide[half];
    }
  } else {
    float most = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) most = fmaxf(most, fmaxf(fabsf(x[0][i]), rope ? 0.0f : fabsf(x[1][i])));
    // The largest channel becomes less than 2^8.
    int const exponent = max(16, min(240, static_cast<int>(__reduce_max_sync(~0u, __float_as_uint(most)) >> 23)));
    float const scale = __int_as_float((2 * 127 + 7 - exponent) << 23);
    if (lane_ == 0) shared_.query_scale[column] = __int_as_float((exponent - 7) << 23);
    // Rows of a line: the first terms of a warpgroup's columns, their second terms, then those of the next.
    int const at = column + column / (8 * kO) * 8 * kO;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half == 1 && rope) continue;
      uint2 terms[2];
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        float rest[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) rest[i] = x[half][4 * w + i] * scale;
        uint32_t const first = ptx::pack_e4m3(rest[0], rest[1], rest[2], rest[3]);
        uint32_t low, high;
        ptx::e4m3_to_f16(first, low, high);
        float2 const a = ptx::unpack_f16(low), b = ptx::unpack_f16(high);
        uint32_t const second = ptx::pack_e4m3((rest[0] - a.x) / kSecondTerm, (rest[1] - a.y) / kSecondTerm,
                                               (rest[2] - b.x) / kSecondTerm, (rest[3] - b.y) / kSecondTerm);
        (w == 0 ? terms[0].x : terms[0].y) = first;
        (w == 0 ? terms[1].x : terms[1].y) = second;
      }
      int const chunk = 32 * half + lane_;
#pragma unroll
      for (int term = 0; term < 2; ++term) {
        *reinterpret_cast<uint2*>(shared_.query + chunk / 16 * 2 * kLine +
                                  wgmma::swizzled(at + term * 8 * kO, chunk % 16 / 2) + chunk % 2 * 8) = terms[term];
      }
    }
    if (rope) {
      *reinterpret_cast<uint4*>(shared_.query + 8 * kLine + wgmma::swizzled(column, lane_ - kRopeLane)) = wide[1];
    }
  }
}

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
__device__ __forceinline__ void Worker<T, kGroup>::read_scales(Stage<T> const& stage) {
  int const base = largest_ - kScaleHeadroom - 127;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    uint2 const words = stage.scales[16 * warp_ + 8 * h + g_];
#pragma unroll
    for (int block = 0; block < kBlocks - 1; ++block) {
      int const exponent = static_cast<int>(__byte_perm(words.x, words.y, 0x4440 + block)) & 0xff;
      scale_[block][h] = __int_as_float(max(exponent - base, 0) << 23);
    }
  }
}

// Waits for half of the channels of the stage, for the matrix units as well.
template <typename T, int kGroup>
__device__ __forceinline__ void Worker<T, kGroup>::await(int half) const {
  ptx::barrier_wait(ptx::shared_address(&shared_.full[cursor_.stage][half]), cursor_.parity);
  wgmma::publish();
}

// Scores of the tile's keys and this group's columns, in log2 units.
template <typename T, int kGroup>
__device__ __forceinline__ void Worker<T, kGroup>::score(Stage<T> const& stage, float (&s)[kO][4]) const {
  // log2(e) / sqrt(512): probabilities are powers of two from here on.
  constexpr float kScale = 1.4426950408889634f * 0.04419417382415922f;
  constexpr int kLine = T::kColumns * kLineBytes;
  uint64_t const keys = wgmma::descriptor(ptx::shared_address(stage.rows));
  uint64_t const query = wgmma::descriptor(ptx::shared_address(shared_.query));
  auto const at = [](uint64_t descriptor, int bytes) { return descriptor + (bytes >> 4); };
  if constexpr (!kPacked) {
    wgmma::fence();
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      if (b == kBlocks / 2) {
        wgmma::commit();
        await(1);
        wgmma::fence();
      }
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        WideScore::multiply(s, at(keys, b * kLineStride + 32 * step),
                            at(query, b * kLine + kGroup * kO * 8 * kLineBytes + 32 * step), b + step > 0);
      }
    }
    wgmma::commit();
    wgmma::wait<0>();
#pragma unroll
    for (int n = 0; n < kO; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] *= kScale;
    }
  } else {
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
      if (b == kBlocks / 2) await(1);
      wgmma::fence();
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        CodeScore::multiply(product[b % kProducts], at(keys, b / 2 * kLineStride + b % 2 * 64 + 32 * step),
                            at(query, b / 2 * 2 * kLine + kGroup * kO * 16 * kLineBytes + b % 2 * 64 + 32 * step),
                            step > 0);
      }
      wgmma::commit();
      if (b >= kProducts - 1) {
        wgmma::wait<kProducts - 1>();
        add(b - (kProducts - 1));
      }
    }
    wgmma::fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      int const byte = kRopeByte + 32 * step;
      WideScore::multiply(s, at(keys, byte / kLineBytes * kLineStride + byte % kLineBytes),
                          at(query, 8 * kLine + kGroup * kO * 8 * kLineBytes + 32 * step), step > 0);
    }
    wgmma::commit();
    wgmma::wait<0>();
#pragma unroll
    for (int b = kCodeBlocks - (kProducts - 1); b < kCodeBlocks; ++b) add(b);
    float const scale = kScale * exp2f(static_cast<float>(largest_ - 127 - kScaleHeadroom));
#pragma unroll
    for (int n = 0; n < kO; ++n) {
      float2 const column = *reinterpret_cast<float2 const*>(&shared_.query_scale[column_of(n, 0)]);
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] = s[n][i] * kScale + half[n][i] * (scale * (i & 1 ? column.y : column.x));
    }
  }
}

// Hides the keys that a column's row does not see.
template <typename T, int kGroup>
__device__ __forceinline__ void Worker<T, kGroup>::mask(Stage<T> const& stage, float (&s)[kO][4]) const {
  int const x[2] = {stage.x[16 * warp_ + g_], stage.x[16 * warp_ + 8 + g_]};
  Source const source = stage.source;
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
  if (!ptx::sync_threads_or(kWorkersMeet, T::kWorkers, grown)) {
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
  ptx::sync_threads(kWorkersMeet, T::kWorkers);
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
  ptx::sync_threads(kWorkersMeet, T::kWorkers);
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

// Adds the probabilities times the latents to this group's blocks of the output.
template <typename T, int kGroup>
__device__ __forceinline__ void Worker<T, kGroup>::accumulate(Stage<T> const& stage) {
  uint32_t const rows = ptx::shared_address(stage.rows);
  if constexpr (T::kGroups == 2) release(1 - kGroup);
  if constexpr (!kPacked) {
    uint64_t const keys = wgmma::descriptor(rows);
    uint64_t const p = wgmma::descriptor(ptx::shared_address(shared_.probabilities[0]));
    wgmma::fence();
#pragma unroll
    for (int c = 0; c < T::kOwn; ++c) {
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        WideSum::multiply_transposed(o_[c], keys + ((block_of(c) * kLineStride + 16 * step * kLineBytes) >> 4),
                                     p + step * (32 >> 4), true);
      }
      if (block_of(c) % (kBlocks / 2) == kBlocks / 2 - 1) wgmma::commit();
    }
    if constexpr (T::kGroups == 1) {
      wgmma::wait<1>();
      release(0);
    }
    wgmma::wait<0>();
    release(T::kGroups == 1 ? 1 : kGroup);
  } else {
    // Of this lane's key: its codes of this warp's channels of even blocks, those of odd blocks are 64 bytes apart.
    uint32_t const own = rows + key_place(lane_, 16 * warp_);
    uint32_t a[kBuffers][4][4];
#pragma unroll
    for (int c = 0; c < T::kOwn; ++c) {
      int const block = block_of(c);
      uint32_t (&fragments)[4][4] = a[c % kBuffers];
      if (is_wide(block)) {
        uint32_t const at = rows + key_place(lane_ / 16 * 8 + lane_ % 8, kRopeByte + 32 * warp_ + lane_ / 8 % 2 * 16);
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          ptx::load_matrices_transposed(fragments[step], at + 16 * step * kLineBytes);
        }
      } else {
        uint32_t const at = (own ^ (block % 2 * 64)) + block / 2 * kLineStride;
        uint32_t codes[2][4];
        ptx::load_matrices_transposed(codes[0], at);
        ptx::load_matrices_transposed(codes[1], at + 32 * kLineBytes);
#pragma unroll
        for (int step = 0; step < 4; ++step) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            // Bytes (key 2t: channel 2g, 2g + 1), (key 2t + 1: the same) become two channels of two keys.
            uint32_t const pair = __byte_perm(codes[step / 2][2 * (step % 2) + h], 0, 0x3120);
            ptx::e4m3_to_f16(pair, fragments[step][2 * h], fragments[step][2 * h + 1]);
          }
        }
      }
      uint64_t const p = wgmma::descriptor(ptx::shared_address(shared_.probabilities[block]));
      wgmma::fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        if (is_wide(block)) {
          WideSum::multiply_registers(o_[c], fragments[step], p + step * (32 >> 4), true);
        } else {
          HalfSum::multiply_registers(o_[c], fragments[step], p + step * (32 >> 4), true);
        }
      }
      wgmma::commit();
      if (block % (kBlocks / 2) == kBlocks / 2 - 1) release(block / (kBlocks / 2));
      wgmma::wait<kBuffers - 1>();
    }
    wgmma::wait<0>();
  }
}

template <typename T, int kGroup>
__device__ __forceinline__ void Worker<T, kGroup>::walk() {
  Group const& group = shared_.table.group;
  if (int const column = threadIdx.x; column < T::kColumns) {
    int const row = shared_.column_row[column];
    bool const inside = row >= group.begin && row < group.end;
    shared_.position[column] = inside ? shared_.row_position[row] : INT32_MIN / 2;
    shared_.visible[column] = inside ? shared_.row_visible[row] : INT32_MIN;
  }
  ptx::sync_threads(kWorkersMeet, T::kWorkers);
  int const tiles = shared_.tiles.all;
  for (int tile = 0; tile < tiles; ++tile) {
    Stage<T>& stage = shared_.stages[cursor_.stage];
    await(0);
    int largest = stage.largest[0];
    bool masked = stage.masked[0];
#pragma unroll
    for (int w = 1; w < T::kLoaders; ++w) {
      largest = max(largest, stage.largest[w]);
      masked |= stage.masked[w];
    }
    if constexpr (kPacked) {
      if (largest > largest_ + kScaleSlack) rescale(largest);
      read_scales(stage);
    }
    float s[kO][4];
    score(stage, s);
    if (masked) mask(stage, s);
    softmax(s);
    accumulate(stage);
    ptx::barrier_arrive(ptx::shared_address(&shared_.drained));
    cursor_.step();
  }
}

template <typename T, int kGroup>
__device__ __forceinline__ void Worker<T, kGroup>::finish() {
  // The sums of all warps; then what the output is multiplied by.
#pragma unroll
  for (int n = 0; n < kO; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float total = sum_[n][i];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) total += __shfl_xor_sync(~0u, total, step);
      if (g_ == 0) shared_.peak[warp_][column_of(n, i)] = total;
    }
  }
  ptx::sync_threads(kWorkersMeet, T::kWorkers);
  float factor[kO][2];
#pragma unroll
  for (int n = 0; n < kO; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const column = column_of(n, i);
      float const total =
          shared_.peak[0][column] + shared_.peak[1][column] + shared_.peak[2][column] + shared_.peak[3][column];
      float const sink = shared_.sink[column], peak = fmaxf(base_[n][i], sink);
      float const scale = ptx::exp2_fast(base_[n][i] - peak);
      bool const any = shared_.column_row[column] >= 0 && base_[n][i] != kNone;
      factor[n][i] = any ? scale / (total * scale + ptx::exp2_fast(sink - peak)) : 0;
    }
  }
  if constexpr (T::kGroups == 2) {
    if (warp_ == 0 && g_ == 0) {
#pragma unroll
      for (int n = 0; n < kO; ++n) {
        *reinterpret_cast<float2*>(&shared_.factor[column_of(n, 0)]) = {factor[n][0], factor[n][1]};
      }
    }
    ptx::sync_threads(kWorkersMeet, T::kWorkers);
  }
  // Outputs as bf16 [column][channel] in the place of the stages, so that they leave in whole lines.
  static_assert(sizeof(shared_.stages) >= T::kColumns * kHeadDim * 2);
  float const power = kPacked ? exp2f(static_cast<float>(largest_ - 127 - kScaleHeadroom)) : 1;
  uint8_t* const staging = reinterpret_cast<uint8_t*>(shared_.stages);
  auto const place = [&](int column, int channel) {
    return staging + column * 2 * kHeadDim + ((channel / 8 ^ (column & 7)) << 4) + channel % 8 * 2;
  };
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    float2 by;
    if constexpr (T::kGroups == 1) {
      by = {factor[n][0], factor[n][1]};
    } else {
      by = *reinterpret_cast<float2 const*>(&shared_.factor[8 * n + 2 * t_]);
    }
#pragma unroll
    for (int c = 0; c < T::kOwn; ++c) {
      int const block = block_of(c), first = block * kBlockChannels + 16 * warp_;
      float v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        v[i] = o_[c][n][i] * (i & 1 ? by.y : by.x) * (is_wide(block) ? 1.0f : power);
      }
      if (!is_wide(block)) {
        // Rows g and g + 8 of the fragment are channels 2g and 2g + 1.
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          *reinterpret_cast<uint32_t*>(place(8 * n + 2 * t_ + i, first + 2 * g_)) = ptx::pack_bf16(v[i], v[i + 2]);
        }
        continue;
      }
      if (block == kBlocks - 1) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          int const row = max(shared_.column_row[8 * n + 2 * t_ + (i & 1)], 0);
          float2 const cs = __ldg(rope_at(op_, shared_.row_position[row]) + (16 * warp_ + 8 * (i / 2) + g_) / 2);
          float const pair = __shfl_xor_sync(~0u, v[i], 4);
          v[i] = v[i] * cs.x + (g_ & 1 ? -pair : pair) * cs.y;
        }
      }
      ptx::store_matrices_transposed(ptx::shared_address(place(8 * n + lane_ % 8, first + lane_ / 8 % 2 * 8)),
                                     ptx::pack_bf16(v[0], v[1]), ptx::pack_bf16(v[2], v[3]));
    }
  }
  ptx::sync_threads(kWorkersMeet, T::kWorkers);
  constexpr int kChunks = kHeadDim / 8;
#pragma unroll 4
  for (int index = threadIdx.x; index < T::kColumns * kChunks; index += T::kWorkers) {
    int const column = index / kChunks, chunk = index % kChunks;
    int const row = shared_.column_row[column];
    if (row < 0) continue;
    auto* const out = column_pointer(op_, unit_, row, column, static_cast<__nv_bfloat16*>(op_.out_global),
                                     static_cast<__nv_bfloat16*>(op_.out_local));
    *reinterpret_cast<uint4*>(out + 8 * chunk) = *reinterpret_cast<uint4 const*>(place(column, 8 * chunk));
  }
}

}  // namespace redknot::attention
