#pragma once

// Scores, probabilities and outputs from the keys in the stages.
//
// Fragments: g = lane / 4, t = lane % 4. Score fragments hold keys g, g + 8 of the warp's 16 and columns 2t, 2t + 1;
// output fragments two channels of the warp's 16 and the same columns. Packed codes become fp16 exactly. Their block
// scales multiply each block's part of the scores and, as fp16 powers of two relative to the largest seen (a block 2^28
// below that is lost), copies of the probabilities for the output. Rope channels and bf16 pools are multiplied as bf16.

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
      peak_[n][0] = peak_[n][1] = kNone;
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
  // Of fragments and products: one is multiplied while the other is made, where registers suffice.
  static constexpr int kBuffers = T::kColumns == 64 ? 1 : 2;
  using WideScore = wgmma::Product<8 * kO, true>;
  using HalfScore = wgmma::Product<8 * kO, false>;
  using WideSum = wgmma::Product<T::kColumns, true>;
  using HalfSum = wgmma::Product<T::kColumns, false>;

  SegLatentAttentionParams const& op_;
  Shared<T>& shared_;
  Unit const unit_;
  int const lane_, warp_, g_, t_;
  Cursor<T::kStages> cursor_;

  float o_[T::kOwn][kN][4];
  float peak_[kO][2], sum_[kO][2];             // log2 units; sums of this thread's keys
  int largest_ = 0;                            // biased exponent that fp16 values are relative to
  float scale_[kPacked ? kBlocks - 1 : 1][2];  // of this thread's keys, relative to largest_

  // Blocks that hold bf16 channels: all of a bf16 pool, the rope channels of a packed one.
  static __device__ __forceinline__ constexpr bool is_wide(int block) { return !kPacked || block == kBlocks - 1; }
  static __device__ __forceinline__ constexpr int bytes_before(int block) {
    return block * (kPacked ? kBlockChannels : 2 * kBlockChannels);
  }
  static __device__ __forceinline__ constexpr int block_of(int own) { return kGroup * T::kOwn + own; }
  __device__ __forceinline__ int column_of(int own_tile, int i) const {
    return 8 * (kGroup * kO + own_tile) + 2 * t_ + i;
  }

  // This warp needs a half of the stage's channels no more.
  __device__ __forceinline__ void release(int half) const {
    __syncwarp();
    if (lane_ == 0) ptx::barrier_arrive(ptx::shared_address(&shared_.empty[cursor_.stage][half]));
  }
  __device__ __forceinline__ void rescale(int largest);
  __device__ __forceinline__ void read_scales(Stage<T> const& stage);
  __device__ __forceinline__ void score(Stage<T> const& stage, float (&s)[kO][4]) const;
  __device__ __forceinline__ void mask(Stage<T> const& stage, float (&s)[kO][4]) const;
  __device__ __forceinline__ void softmax(float (&s)[kO][4]);
  __device__ __forceinline__ void accumulate(Stage<T> const& stage);
};

// q of every column, turned by the row's position. Blocks of packed codes have their channels in the order of the
// fragments: place 8h + 2t + e of 16 is channel 4t + 2h + e.
template <typename T, int kGroup>
__device__ __forceinline__ void Worker<T, kGroup>::load_queries() {
  int const last = unit_.rows * unit_.heads - 1;
  constexpr int kChunks = kHeadDim / 8;
#pragma unroll 4
  for (int index = threadIdx.x; index < T::kColumns * kChunks; index += T::kWorkers) {
    int const column = index / kChunks, chunk = index % kChunks, block = chunk / 8;
    // Columns past the last repeat it: nothing of them is written.
    int const shown = min(column, last), row = shared_.column_row[shown];
    auto const* q = column_pointer(op_, unit_, row, shown, static_cast<__nv_bfloat16 const*>(op_.q_global),
                                   static_cast<__nv_bfloat16 const*>(op_.q_local));
    uint4 const four = __ldg(reinterpret_cast<uint4 const*>(q + 8 * chunk));
    uint32_t words[4] = {four.x, four.y, four.z, four.w};
    if (block == kBlocks - 1) {
      float2 const* angles = rope_at(op_, shared_.row_position[row]) + 4 * (chunk % 8);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float2 const x = ptx::unpack_bf16(words[i]), cs = __ldg(angles + i);
        words[i] = ptx::pack_bf16(x.x * cs.x - x.y * cs.y, x.y * cs.x + x.x * cs.y);
      }
    }
    if (is_wide(block)) {
      *reinterpret_cast<uint4*>(shared_.query[block] + wgmma::swizzled(column, chunk % 8)) = {words[0], words[1],
                                                                                              words[2], words[3]};
      continue;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float2 const x = ptx::unpack_bf16(words[i]);
      // Channels 8 (chunk % 2) + 2i and the next, of 16.
      int const t = 2 * (chunk % 2) + i / 2, half = i % 2;
      *reinterpret_cast<uint32_t*>(shared_.query[block] + wgmma::swizzled(column, chunk % 8 / 2 * 2 + half) + 4 * t) =
          ptx::pack_f16(x.x, x.y);
    }
  }
  wgmma::publish();
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
    uint2 const words =
        *reinterpret_cast<uint2 const*>(stage.rows + (16 * warp_ + 8 * h + g_) * T::kStride + kLatentScaleOffset);
#pragma unroll
    for (int block = 0; block < kBlocks - 1; ++block) {
      int const exponent = static_cast<int>(__byte_perm(words.x, words.y, 0x4440 + block)) & 0xff;
      scale_[block][h] = __int_as_float(max(exponent - base, 0) << 23);
    }
  }
}

// Scores of the tile's keys and this group's columns, in log2 units.
template <typename T, int kGroup>
__device__ __forceinline__ void Worker<T, kGroup>::score(Stage<T> const& stage, float (&s)[kO][4]) const {
  uint32_t const at = ptx::shared_address(stage.rows) + (16 * warp_ + lane_ % 16) * T::kStride + lane_ / 16 * 16;
  // Of a packed pool: the products of a block, which are added up while those of the next are made.
  float product[kBuffers][kO][4], half[kO][4];
#pragma unroll
  for (int n = 0; n < kO; ++n) half[n][0] = half[n][1] = half[n][2] = half[n][3] = 0;
  auto const add = [&](int block) {
#pragma unroll
    for (int n = 0; n < kO; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) half[n][i] += product[block % kBuffers][n][i] * scale_[block][i / 2];
    }
  };
  uint32_t a[kBuffers][4][4];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    uint32_t (&fragments)[4][4] = a[b % kBuffers];
    if (b == kBlocks / 2) {
      ptx::barrier_wait(ptx::shared_address(&shared_.full[cursor_.stage][1]), cursor_.parity);
    }
    if (is_wide(b)) {
#pragma unroll
      for (int step = 0; step < 4; ++step) ptx::load_matrices(fragments[step], at + bytes_before(b) + 32 * step);
    } else {
      uint32_t codes[2][4];
      ptx::load_matrices(codes[0], at + bytes_before(b));
      ptx::load_matrices(codes[1], at + bytes_before(b) + 32);
#pragma unroll
      for (int step = 0; step < 4; ++step) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          ptx::e4m3_to_f16(codes[step / 2][2 * (step % 2) + h], fragments[step][h], fragments[step][2 + h]);
        }
      }
    }
    uint64_t const q = wgmma::descriptor(ptx::shared_address(shared_.query[b]) + kGroup * kO * 8 * 128);
    wgmma::fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      if constexpr (!kPacked) {
        WideScore::multiply_registers(s, fragments[step], q + step * (32 >> 4), b + step > 0);
      } else if (is_wide(b)) {
        WideScore::multiply_registers(product[b % kBuffers], fragments[step], q + step * (32 >> 4), step > 0);
      } else {
        HalfScore::multiply_registers(product[b % kBuffers], fragments[step], q + step * (32 >> 4), step > 0);
      }
    }
    wgmma::commit();
    wgmma::wait<kBuffers - 1>();
    if constexpr (kPacked) {
      if (int const ready = b - (kBuffers - 1); ready >= 0 && !is_wide(ready)) add(ready);
    }
  }
  wgmma::wait<0>();
  // log2(e) / sqrt(512): probabilities are powers of two from here on.
  constexpr float kScale = 1.4426950408889634f * 0.04419417382415922f;
  float const scale = kPacked ? kScale * exp2f(static_cast<float>(largest_ - 127 - kScaleHeadroom)) : 0;
#pragma unroll
  for (int n = 0; n < kO; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[n][i] = kPacked ? product[(kBlocks - 1) % kBuffers][n][i] * kScale + half[n][i] * scale : s[n][i] * kScale;
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

// Scores to probabilities in shared memory; the output shrinks where a column's largest score grew. Ends with the
// barrier after which the probabilities may be multiplied.
template <typename T, int kGroup>
__device__ __forceinline__ void Worker<T, kGroup>::softmax(float (&s)[kO][4]) {
  float most[kO][2];
#pragma unroll
  for (int n = 0; n < kO; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) most[n][i] = fmaxf(s[n][i], s[n][i + 2]);
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
  int const chunk = 2 * warp_ + lane_ / 8 % 2;
  uint32_t const place =
      ptx::shared_address(shared_.probabilities[0]) + 8 * kGroup * kO * 128 + wgmma::swizzled(lane_ % 8, chunk);
#pragma unroll
  for (int n = 0; n < kO; ++n) {
    float2 all[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) all[w] = *reinterpret_cast<float2 const*>(&shared_.peak[w][column_of(n, 0)]);
    most[n][0] = fmaxf(fmaxf(all[0].x, all[1].x), fmaxf(all[2].x, all[3].x));
    most[n][1] = fmaxf(fmaxf(all[0].y, all[1].y), fmaxf(all[2].y, all[3].y));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float const peak = fmaxf(peak_[n][i], most[n][i]), base = peak == kNone ? 0.0f : peak;
      alpha[n][i] = peak == kNone ? 1.0f : ptx::exp2_fast(peak_[n][i] - base);
      peak_[n][i] = peak;
      s[n][i] = ptx::exp2_fast(s[n][i] - base);
      s[n][i + 2] = ptx::exp2_fast(s[n][i + 2] - base);
      sum_[n][i] = sum_[n][i] * alpha[n][i] + s[n][i] + s[n][i + 2];
    }
    if constexpr (T::kGroups == 2) {
      if (warp_ == 0 && g_ == 0) {
        *reinterpret_cast<float2*>(&shared_.factor[column_of(n, 0)]) = {alpha[n][0], alpha[n][1]};
      }
    }
    uint32_t const to = place + n * 8 * 128;
    if constexpr (kPacked) {
      uint32_t const low = ptx::pack_f16(s[n][0], s[n][1]), high = ptx::pack_f16(s[n][2], s[n][3]);
#pragma unroll
      for (int b = 0; b < kBlocks - 1; ++b) {
        ptx::store_matrices_transposed(to + b * T::kColumns * 128,
                                       ptx::multiply_f16(low, ptx::pack_f16(scale_[b][0], scale_[b][0])),
                                       ptx::multiply_f16(high, ptx::pack_f16(scale_[b][1], scale_[b][1])));
      }
    }
    ptx::store_matrices_transposed(to + (T::kCopies - 1) * T::kColumns * 128, ptx::pack_bf16(s[n][0], s[n][1]),
                                   ptx::pack_bf16(s[n][2], s[n][3]));
  }
  wgmma::publish();
  ptx::sync_threads(kWorkersMeet, T::kWorkers);
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    float2 factor;
    if constexpr (T::kGroups == 1) {
      factor = {alpha[n][0], alpha[n][1]};
    } else {
      factor = *reinterpret_cast<float2 const*>(&shared_.factor[8 * n + 2 * t_]);
    }
    if (factor.x == 1.0f && factor.y == 1.0f) continue;
#pragma unroll
    for (int c = 0; c < T::kOwn; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o_[c][n][i] *= i & 1 ? factor.y : factor.x;
    }
  }
  __syncwarp();
}

// Adds the probabilities times the latents to this group's blocks of the output.
template <typename T, int kGroup>
__device__ __forceinline__ void Worker<T, kGroup>::accumulate(Stage<T> const& stage) {
  uint32_t const rows = ptx::shared_address(stage.rows);
  uint32_t a[kBuffers][4][4];
  if constexpr (T::kGroups == 2) release(1 - kGroup);
#pragma unroll
  for (int c = 0; c < T::kOwn; ++c) {
    int const block = block_of(c);
    uint32_t (&fragments)[4][4] = a[c % kBuffers];
    if (is_wide(block)) {
      uint32_t const at =
          rows + (lane_ / 16 * 8 + lane_ % 8) * T::kStride + bytes_before(block) + 32 * warp_ + lane_ / 8 % 2 * 16;
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        ptx::load_matrices_transposed(fragments[step], at + 16 * step * T::kStride);
      }
    } else {
      uint32_t const at = rows + lane_ * T::kStride + bytes_before(block) + 16 * warp_;
      uint32_t codes[2][4];
      ptx::load_matrices_transposed(codes[0], at);
      ptx::load_matrices_transposed(codes[1], at + 32 * T::kStride);
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
    uint64_t const p = wgmma::descriptor(ptx::shared_address(shared_.probabilities[kPacked ? block : 0]));
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
  int const tiles = shared_.tiles;
  for (int tile = 0; tile < tiles; ++tile) {
    Stage<T>& stage = shared_.stages[cursor_.stage];
    ptx::barrier_wait(ptx::shared_address(&shared_.full[cursor_.stage][0]), cursor_.parity);
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
  if (warp_ == 0 && g_ == 0) {
#pragma unroll
    for (int n = 0; n < kO; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int const column = column_of(n, i), row = shared_.column_row[column];
        float factor = 0;
        if (row >= 0 && peak_[n][i] != kNone) {
          float const total =
              shared_.peak[0][column] + shared_.peak[1][column] + shared_.peak[2][column] + shared_.peak[3][column];
          int const head = unit_.head + column - row * unit_.heads;
          float const sink =
              1.4426950408889634f *
              __ldg(head < op_.global_heads ? op_.sinks_global + head : op_.sinks_local + head - op_.global_heads);
          float const peak = fmaxf(peak_[n][i], sink), scale = ptx::exp2_fast(peak_[n][i] - peak);
          factor = scale / (total * scale + ptx::exp2_fast(sink - peak));
        }
        shared_.factor[column] = factor;
      }
    }
  }
  ptx::sync_threads(kWorkersMeet, T::kWorkers);
  // Outputs as bf16 [column][channel] in the place of the stages, so that they leave in whole lines.
  static_assert(sizeof(shared_.stages) >= T::kColumns * kHeadDim * 2);
  float const power = kPacked ? exp2f(static_cast<float>(largest_ - 127 - kScaleHeadroom)) : 1;
  uint8_t* const staging = reinterpret_cast<uint8_t*>(shared_.stages);
  auto const place = [&](int column, int channel) {
    return staging + column * 2 * kHeadDim + ((channel / 8 ^ (column & 7)) << 4) + channel % 8 * 2;
  };
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    float2 const factor = *reinterpret_cast<float2 const*>(&shared_.factor[8 * n + 2 * t_]);
#pragma unroll
    for (int c = 0; c < T::kOwn; ++c) {
      int const block = block_of(c), first = block * kBlockChannels + 16 * warp_;
      float v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        v[i] = o_[c][n][i] * (i & 1 ? factor.y : factor.x) * (is_wide(block) ? 1.0f : power);
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
