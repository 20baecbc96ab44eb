#pragma once

// Scores, probabilities and outputs from the keys that the loaders bring.
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
  __device__ Worker(SegLatentAttentionParams const& op, Shared<T>& shared, int team)
      : op_(op), shared_(shared.teams[team]), team_(team), tails_(shared.tails_of(team)) {}

  __device__ __forceinline__ void serve(Unit const& unit) {
    unit_ = unit;
    thread_ = ptx::found_anew(threadIdx.x % T::kWorkers);
    lane_ = thread_ % 32;
    warp_ = thread_ / 32 % 4;
    g_ = lane_ / 4;
    t_ = lane_ % 4;
    start();
    load_queries();
    meet();
    walk();
    finish();
  }

 private:
  static constexpr bool kPacked = T::kPacked;
  static constexpr int kN = T::kTiles;
  static constexpr int kO = T::kOwnTiles;
  // Of fragments: one is multiplied while the other is made, where registers suffice; and of products of codes.
  static constexpr int kBuffers = 2;
  static constexpr int kProducts = T::kColumns == 8 ? 4 : kO < 4 ? 2 : 1;
  static constexpr float kSecondTerm = 1.0f / 16;  // of q
  using Codes = uint32_t[2][2][4];                 // of even and odd blocks
  // Loaded while the block before is multiplied, where registers suffice: codes, and rope channels.
  static constexpr bool kCodesAhead = T::kColumns <= 16, kRopeAhead = T::kColumns == 16;
  using WideScore = wgmma::Product<8 * kO, true>;
  using CodeScore = wgmma::CodeProduct<16 * kO>;
  using WideSum = wgmma::Product<T::kColumns, true>;
  using HalfSum = wgmma::Product<T::kColumns, false>;

  SegLatentAttentionParams const& op_;
  Team<T>& shared_;
  int const team_;
  uint32_t const tails_;
  Unit unit_{};
  int thread_ = 0, lane_ = 0, warp_ = 0, g_ = 0, t_ = 0;
  int odd_ = 0;  // whether the tile is
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

  __device__ __forceinline__ void meet() const { ptx::sync_threads(kWorkersMeet + team_, T::kWorkers); }
  // This thread needs a half of the tile's channels no more.
  __device__ __forceinline__ void release(int half) const {
    ptx::barrier_arrive(ptx::shared_address(&shared_.empty[cursor_.stage][half]));
  }
  __device__ __forceinline__ uint32_t lines(int half) const {
    return ptx::shared_address(shared_.halves[cursor_.stage][half]);
  }
  __device__ __forceinline__ void start();
  __device__ __forceinline__ void load_queries();
  __device__ __forceinline__ void place_rows(int begin, int end);
  __device__ __forceinline__ void walk();
  __device__ __forceinline__ void finish();
  __device__ __forceinline__ void store_query(int column, int position, uint4 const (&chunks)[2]);
  __device__ __forceinline__ void rescale(int largest);
  __device__ __forceinline__ void read_scales(uint2 const (&exponents)[2]);
  __device__ __forceinline__ bool await_tile() const;
  __device__ __forceinline__ void await_rest() const;
  __device__ __forceinline__ void score(Header<T> const& header, bool whole, float (&s)[kO][4]);
  __device__ __forceinline__ void mask(Header<T> const& header, float (&s)[kO][4]) const;
  __device__ __forceinline__ uint32_t rope_chunk(int key, int chunk) const;
  __device__ __forceinline__ void turn(Header<T> const& header) const;
  __device__ __forceinline__ void store_probabilities(float const (&s)[kO][4], float (&sum)[kO][2]) const;
  __device__ __forceinline__ void softmax(float const (&s)[kO][4]);
  __device__ __forceinline__ void load_codes(int block, Codes& codes) const;
  __device__ __forceinline__ void load_rope(Codes& codes) const;
  __device__ __forceinline__ void accumulate(Codes& codes);
};

// What is known of the unit's rows and columns; nothing is summed yet.
template <typename T, int kGroup>
__device__ __forceinline__ void Worker<T, kGroup>::start() {
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
  largest_ = 0;
  meet();  // the outputs of the unit before have left
  if (int const i = thread_; i < unit_.rows) {
    shared_.row_position[i] = narrow(__ldg(op_.positions + unit_.row + i));
    shared_.row_visible[i] = narrow(__ldg(op_.visible + unit_.row + i));
  }
  if (int const column = thread_; column < T::kColumns) {
    int const row = column / unit_.heads, head = unit_.head + column - row * unit_.heads;
    shared_.column_row[column] = row < unit_.rows ? row : -1;
    shared_.sink[column] =
        row < unit_.rows
            ? 1.4426950408889634f *
                  __ldg(head < op_.global_heads ? op_.sinks_global + head : op_.sinks_local + head - op_.global_heads)
            : 0.0f;
  }
  meet();
  place_rows(0, unit_.rows);
}

// q of every column, turned by the row's position. Columns past the last repeat it: nothing of them is written.
template <typename T, int kGroup>
__device__ __forceinline__ void Worker<T, kGroup>::load_queries() {
  constexpr int kChunks = kHeadDim / 8;
  constexpr int kAtOnce = 4;  // columns of a warp whose loads are on their way together
  constexpr int kWarps = T::kWorkers / 32;
  constexpr int kOwnColumns = T::kColumns / kWarps, kTogether = kOwnColumns < kAtOnce ? kOwnColumns : kAtOnce;
  int const last = unit_.rows * unit_.heads - 1;
  int const warp = thread_ / 32;
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
      // Beside the last codes: half of the channels with the first terms, half with the second ones.
      int const chunk = lane_ - kRopeLane;
      *reinterpret_cast<uint4*>(shared_.query + 3 * 2 * kLine +
                                wgmma::swizzled(at + chunk / 4 * 8 * kO, 4 + chunk % 4)) = wide[1];
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
    uint4 const words = ptx::load_shared_16(at);
    uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float2 const x = ptx::unpack_bf16(pairs[i]);
      float const c = (i % 2 ? two[i / 2].z : two[i / 2].x) * inverse;
      float const s = (i % 2 ? two[i / 2].w : two[i / 2].y) * inverse;
      pairs[i] = ptx::pack_bf16(x.x * c - x.y * s, x.y * c + x.x * s);
    }
    if (frame != 0) ptx::store_16(at, {pairs[0], pairs[1], pairs[2], pairs[3]});
  }
  wgmma::publish();
  meet();
}

// Scores of the tile's keys and this group's columns, in log2 units.
template <typename T, int kGroup>
__device__ __forceinline__ void Worker<T, kGroup>::score(Header<T> const& header, bool whole, float (&s)[kO][4]) {
  // log2(e) / sqrt(512): probabilities are powers of two from here on.
  constexpr float kScale = 1.4426950408889634f * 0.04419417382415922f;
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
      for (int i = 0; i < 4; ++i) s[n][i] *= kScale;
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
    float const scale = kScale * exp2f(static_cast<float>(largest_ - 127 - kScaleHeadroom));
#pragma unroll
    for (int n = 0; n < kO; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[n][i] = s[n][i] * kScale + half[n][i] * (scale * (i & 1 ? columns[n].y : columns[n].x));
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

// Codes of this warp's channels of a block, transposed, to its place.
template <typename T, int kGroup>
__device__ __forceinline__ void Worker<T, kGroup>::load_codes(int block, Codes& codes) const {
  uint32_t const at =
      lines(block / 4) + (key_place(lane_, 16 * warp_) ^ (block % 2 * 64)) + block % 4 / 2 * kLineStride;
  ptx::load_matrices_transposed(codes[block % 2][0], at);
  ptx::load_matrices_transposed(codes[block % 2][1], at + 32 * kLineBytes);
}

// The same of the rope channels, which take the place of two blocks.
template <typename T, int kGroup>
__device__ __forceinline__ void Worker<T, kGroup>::load_rope(Codes& codes) const {
  // Chunks 2 warp and 2 warp + 1 of the rope channels.
  int const key = lane_ / 16 * 8 + lane_ % 8, chunk = 2 * (warp_ % 2) + lane_ / 8 % 2;
  uint32_t const at = warp_ < 2 ? lines(1) + kLineStride + wgmma::swizzled(key, 4 + chunk)
                                : tails_ + wgmma::swizzled(key, tail_chunk<T>(team_, cursor_.stage) + chunk);
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    ptx::load_matrices_transposed(codes[step / 2][step % 2], at + 16 * step * kLineBytes);
  }
}

// Adds the probabilities times the latents to this group's blocks of the output. Codes that are loaded ahead begin with
// its first block's.
template <typename T, int kGroup>
__device__ __forceinline__ void Worker<T, kGroup>::accumulate(Codes& codes) {
  if constexpr (T::kGroups == 2) release(1 - kGroup);
  if constexpr (!kPacked) {
    uint64_t const keys[2] = {wgmma::descriptor(lines(0)), wgmma::descriptor(lines(1))};
    uint64_t const p = wgmma::descriptor(ptx::shared_address(shared_.probabilities[0]));
    wgmma::fence();
#pragma unroll
    for (int c = 0; c < T::kOwn; ++c) {
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        WideSum::multiply_transposed(
            o_[c], keys[block_of(c) / 4] + ((block_of(c) % 4 * kLineStride + 16 * step * kLineBytes) >> 4),
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
    uint32_t a[kBuffers][4][4];
#pragma unroll
    for (int c = 0; c < T::kOwn; ++c) {
      int const block = block_of(c);
      uint32_t (&fragments)[4][4] = a[c % kBuffers];
      if (kCodesAhead ? c + 1 < T::kOwn && !is_wide(block + 1) : !is_wide(block)) {
        load_codes(block + (kCodesAhead ? 1 : 0), codes);
      }
      if (!is_wide(block)) {
#pragma unroll
        for (int step = 0; step < 4; ++step) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            // Bytes (key 2t: channel 2g, 2g + 1), (key 2t + 1: the same) become two channels of two keys.
            uint32_t const pair = __byte_perm(codes[block % 2][step / 2][2 * (step % 2) + h], 0, 0x3120);
            ptx::e4m3_to_f16(pair, fragments[step][2 * h], fragments[step][2 * h + 1]);
          }
        }
      }
      if (kRopeAhead ? c + 1 < T::kOwn && is_wide(block + 1) : is_wide(block)) load_rope(codes);
      uint64_t const p = wgmma::descriptor(ptx::shared_address(shared_.probabilities[block]));
      wgmma::fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        if (is_wide(block)) {
          WideSum::multiply_registers(o_[c], codes[step / 2][step % 2], p + step * (32 >> 4), true);
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

// The tiles that follow are those of rows [begin, end) of the unit. A barrier must follow.
template <typename T, int kGroup>
__device__ __forceinline__ void Worker<T, kGroup>::place_rows(int begin, int end) {
  if (int const column = thread_; column < T::kColumns) {
    int const row = shared_.column_row[column];
    bool const inside = row >= begin && row < end;
    shared_.position[column] = inside ? shared_.row_position[row] : INT32_MIN / 2;
    shared_.visible[column] = inside ? shared_.row_visible[row] : INT32_MIN;
  }
}

template <typename T, int kGroup>
__device__ __forceinline__ void Worker<T, kGroup>::walk() {
  for (bool more = true; more;) {
    Header<T> const& header = shared_.headers[odd_];
    bool whole = await_tile();
    uint4 const words = *reinterpret_cast<uint4 const*>(header.flags);
    if (any_of(words.x, kFramed)) {
      if (!whole) await_rest();
      whole = true;
      turn(header);
    }
    float s[kO][4];
    score(header, whole, s);
    more = (words.y & kLastTile) == 0;
    if ((words.y & kOtherRows) != 0) {
      meet();  // no warp masks keys of the rows before
      place_rows(header.begin, header.end);
      meet();
    }
    if (any_of(words.x, kMasked)) mask(header, s);
    Codes codes;
    if constexpr (kPacked && kCodesAhead) load_codes(block_of(0), codes);  // they arrive while probabilities are made
    softmax(s);
    accumulate(codes);
    ptx::barrier_arrive(ptx::shared_address(&shared_.drained));
    cursor_.step();
    odd_ ^= 1;
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
  meet();
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
    meet();
  }
  // Outputs as bf16 [column][channel] in the place of q, so that they leave in whole lines.
  static_assert(sizeof(shared_.query) >= T::kColumns * kHeadDim * 2);
  float const power = kPacked ? exp2f(static_cast<float>(largest_ - 127 - kScaleHeadroom)) : 1;
  uint8_t* const staging = shared_.query;
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
  meet();
  constexpr int kChunks = kHeadDim / 8;
#pragma unroll 4
  for (int index = thread_; index < T::kColumns * kChunks; index += T::kWorkers) {
    int const column = index / kChunks, chunk = index % kChunks;
    int const row = shared_.column_row[column];
    if (row < 0) continue;
    auto* const out = column_pointer(op_, unit_, row, column, static_cast<__nv_bfloat16*>(op_.out_global),
                                     static_cast<__nv_bfloat16*>(op_.out_local));
    __stcs(reinterpret_cast<uint4*>(out + 8 * chunk), *reinterpret_cast<uint4 const*>(place(column, 8 * chunk)));
  }
}

}  // namespace redknot::attention
