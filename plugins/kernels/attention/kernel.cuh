#pragma once

// One block, W warps, one unit of up to 8 N columns (a column is a head of a row). Keys are the M dimension of every
// matrix product and columns the N dimension, so 8 columns waste nothing. Warp w owns channels [512 w / W, 512 (w + 1)
// / W): it keeps its slice of q in registers, computes its part of every score, and accumulates its slice of the
// output. One tile of columns needs one warp, which exchanges nothing. With more, the parts of the scores meet in
// shared memory. With N < W every warp turns all of them into probabilities, which costs some arithmetic and saves a
// barrier; with N = W warp w does so for columns 8 w .. 8 w + 7 and all warps read them back.
//
// Fragments of mma.m16n8k16: g = lane / 4, t = lane % 4. Score fragments hold keys g, g + 8 and columns 2t, 2t + 1.
// Packed latents are multiplied as they are: e4m3 codes become fp16 exactly, block scales multiply 64-channel parts of
// the scores, and the probabilities (relative to a running largest scale of each block, so that fp16 never overflows).

#include "common/check.h"
#include "common/ptx.cuh"
#include "kernels/attention/runs.cuh"

namespace redknot::attention {

inline constexpr float kNone = -INFINITY;
inline constexpr int kBlockChannels = 64;
inline constexpr int kBlocks = kHeadDim / kBlockChannels;
// Scales enter the probabilities as 2^(exponent - largest + kScaleHeadroom): fp16 has room for P <= 1 times 2^10.
inline constexpr int kScaleHeadroom = 10;
// A new largest exponent is set this much higher than seen, so that it rarely moves again.
inline constexpr int kScaleSlack = 3;

template <int kTiles_, bool kPacked_>
struct Traits {
  static constexpr int kTiles = kTiles_;  // tiles of 8 columns
  static constexpr int kWarps = kTiles == 1 ? 1 : 4;
  static constexpr bool kPacked = kPacked_;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kColumns = 8 * kTiles;
  static constexpr bool kSplit = kTiles > 1 && kTiles == kWarps;  // each warp owns the softmax of one tile
  static constexpr int kOwned = kSplit ? 1 : kTiles;              // tiles whose softmax a warp computes
  static constexpr int kBlocksPerSm = kTiles == 1 ? 8 : kTiles == 2 ? 3 : 2;
  static constexpr int kParts = kTiles == 1 || (!kPacked && kTiles == 2) ? 1 : 2;  // 16-key parts of a tile of keys
  static constexpr int kKeys = 16 * kParts;
  static constexpr int kStages = kPacked && kTiles == 4 ? 3 : 2;
  static constexpr int kChunks = kBlocks / kWarps;  // 64-channel blocks of a warp
  static constexpr int kRowBytes = kPacked ? kPackedLatentBytes : 2 * kHeadDim;
  static constexpr int kStride = kPacked ? 592 : 1040;  // odd multiples of 16: ldmatrix without bank conflicts
  static constexpr int kLaneScales = kChunks > 1 ? kChunks / 2 : 1;
  static_assert(kTiles <= kWarps);
  static constexpr bool kAlone = kWarps == 1;  // no other warp to exchange scores with
  static constexpr int kUnitRows = kColumns < kMaxUnitRows ? kColumns : kMaxUnitRows;
};

template <typename T>
struct Shared {
  alignas(16) uint8_t tiles[T::kStages][T::kKeys * T::kStride];
  float4 rope_sum[T::kTiles][4][32];  // rope channels summed over finished segments, in the rows' common frame
  float4 partial[T::kAlone ? 1 : T::kTiles][T::kParts][T::kWarps][T::kAlone ? 1 : 32];
  uint4 probabilities[T::kSplit ? T::kTiles : 1][T::kParts][T::kSplit ? 32 : 1];
  __half scales[T::kWarps][T::kPacked ? T::kChunks * T::kKeys : 8];
  float2 alpha[T::kSplit ? T::kTiles : 1][4];
  float2 peak[T::kSplit ? T::kTiles : 1][4];
  RunTable<T::kWarps, T::kUnitRows> table;
  int32_t row_position[T::kUnitRows], row_visible[T::kUnitRows];
  int32_t row_first[T::kUnitRows], row_last[T::kUnitRows];  // segments
  Group group;                                              // rows that share the keys being read
  float sinks[T::kColumns];                                 // log2 units
  int32_t list[1];                                          // of as many places as entries are selected
};

template <typename T>
class Worker {
 public:
  __device__ Worker(Launch const& launch, Shared<T>& shared)
      : op_(launch.op),
        shared_(shared),
        unit_(unit_of(launch, blockIdx.x)),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x / 32),
        g_(lane_ / 4),
        t_(lane_ % 4) {}

  __device__ __forceinline__ void run() {
    load_rows();
    enter(0);
    build(shared_.group.first_segment);
    load_queries();
    for (;;) {
      walk();
      int const next = shared_.table.next_segment, last = shared_.group.last_segment, end = shared_.group.end;
      sync_block<kW>();
      if (next < last) {
        build(next);
      } else if (end < unit_.rows) {
        enter(end);
        build(shared_.group.first_segment);
      } else {
        break;
      }
    }
    fold();
    finish();
  }

 private:
  static constexpr int kW = T::kWarps;
  static constexpr int kN = T::kTiles;
  static constexpr int kC = T::kChunks;
  static constexpr int kO = T::kOwned;
  static constexpr int kTogether = kN == 1 ? T::kParts : 1;  // 16-key parts scored side by side
  static constexpr int kChains = kN == 1 ? 2 : 1;

  SegLatentAttentionParams const& op_;
  Shared<T>& shared_;
  Unit const unit_;
  int const lane_, warp_, g_, t_;

  uint32_t q_[kC][4][kN][2];
  float o_[kC][4][kN][4];
  float peak_[kO][2], sum_[kO][2];  // log2 units; sums of this thread's keys
  float rope_peak_[kN][2];          // what rope_sum is relative to
  int largest_[T::kLaneScales];     // biased exponents, of the chunks this lane looks after
  int frame_ = 0;                   // origin of the segment the rope channels are in
  bool in_segment_ = false;
  int least_ = 0, most_ = 0;  // first keys of tiles that need no mask

  __device__ __forceinline__ bool rope_warp() const { return warp_ == kW - 1; }
  __device__ __forceinline__ bool is_rope(int chunk) const { return chunk == kC - 1 && rope_warp(); }
  // The tile of columns whose softmax is the warp's i-th.
  __device__ __forceinline__ int owned(int i) const { return T::kSplit ? warp_ : i; }
  // Chunks that hold bf16 channels: all of a bf16 pool, the rope channels of a packed one.
  __device__ __forceinline__ bool is_wide(int chunk) const { return !T::kPacked || is_rope(chunk); }
  __device__ __forceinline__ int chunk_bytes(int chunk) const {
    return (warp_ * kC + chunk) * (T::kPacked ? kBlockChannels : 2 * kBlockChannels);
  }
  __device__ __forceinline__ int row_of(int column) const {
    int const row = column / unit_.heads;
    return row < unit_.rows ? row : -1;
  }
  // Channels of a column in q or in the output; null where the unit has no such column.
  template <typename P>
  __device__ __forceinline__ P* column_pointer(int column, P* global, P* local) const {
    int const row = row_of(column);
    if (row < 0) return nullptr;
    int const head = unit_.head + column - row * unit_.heads;
    int64_t const at = int64_t{unit_.row} + row;
    return head < op_.global_heads ? global + (at * op_.global_heads + head) * kHeadDim
                                   : local + (at * op_.local_heads + head - op_.global_heads) * kHeadDim;
  }
  // q of this lane's column of a tile. Columns past the last repeat it: nothing of them is written.
  __device__ __forceinline__ __nv_bfloat16 const* query(int tile) const {
    int const column = min(8 * tile + g_, unit_.rows * unit_.heads - 1);
    return column_pointer(column, static_cast<__nv_bfloat16 const*>(op_.q_global),
                          static_cast<__nv_bfloat16 const*>(op_.q_local));
  }
  // cos, sin of a column's row in the segment's frame. Rows before the segment see none of it: clamped to stay inside.
  __device__ __forceinline__ float2 const* rope_of(int column) const {
    int const row = max(row_of(column), 0);
    int64_t const frame = int64_t{shared_.row_position[row]} - frame_;
    return reinterpret_cast<float2 const*>(op_.rope) +
           max(int64_t{0}, min(frame, op_.rope_positions - 1)) * (kRopeDim / 2);
  }

  __device__ __forceinline__ void build(int next) {
    build_runs(shared_.table, shared_.list, op_, shared_.group, unit_.row, next, warp_, lane_);
  }
  __device__ __forceinline__ void load_rows();
  __device__ __forceinline__ void load_queries();
  __device__ __forceinline__ void enter(int begin);
  __device__ __forceinline__ void walk();
  __device__ __forceinline__ void load(int& run, int& offset, int stage);
  __device__ __forceinline__ void rotate_queries();
  __device__ __forceinline__ void fold();
  __device__ __forceinline__ void attend(Run const& run, int offset, uint32_t tile);
  __device__ __forceinline__ void score(uint32_t tile, float (&s)[kTogether][kN][4]) const;
  __device__ __forceinline__ void bound(Run const& run);
  __device__ __forceinline__ void mask(Run const& run, int offset, float (&s)[kO][T::kParts][4]) const;
  __device__ __forceinline__ void read_scales(uint32_t tile);
  __device__ __forceinline__ void accumulate(uint32_t tile, int part, uint32_t const (&p16)[kN][2],
                                             uint32_t const (&pb16)[kN][2]);
  __device__ __forceinline__ void finish();
};

template <typename T>
__device__ __forceinline__ void Worker<T>::load_rows() {
  bool const mine = lane_ < unit_.rows;
  int64_t const row = unit_.row + (mine ? lane_ : 0);
  if (warp_ == 0 && mine) {
    shared_.row_position[lane_] = narrow(__ldg(op_.positions + row));
    shared_.row_visible[lane_] = narrow(__ldg(op_.visible + row));
    shared_.row_first[lane_] = static_cast<int>(max(int64_t{0}, __ldg(op_.row_segments + 2 * row)));
    shared_.row_last[lane_] = static_cast<int>(min(int64_t{op_.segment_count}, __ldg(op_.row_segments + 2 * row + 1)));
  }
  if (int const column = threadIdx.x; column < T::kColumns && column < unit_.rows * unit_.heads) {
    int const head = unit_.head + column % unit_.heads;
    float const* sink = head < op_.global_heads ? op_.sinks_global + head : op_.sinks_local + head - op_.global_heads;
    shared_.sinks[column] = __ldg(sink) * 1.4426950408889634f;
  }
  sync_block<kW>();
}

// This warp's slice of q, and everything that sums up from nothing.
template <typename T>
__device__ __forceinline__ void Worker<T>::load_queries() {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    auto const* q = query(n) + warp_ * kC * kBlockChannels;
#pragma unroll
    for (int c = 0; c < kC; ++c) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        auto const* at = q + c * kBlockChannels + 16 * j;
        if constexpr (T::kPacked) {
          uint2 const four = __ldg(reinterpret_cast<uint2 const*>(at + 4 * t_));
          float2 const x = ptx::unpack_bf16(four.x), y = ptx::unpack_bf16(four.y);
          q_[c][j][n][0] = ptx::pack_f16(x.x, x.y);
          q_[c][j][n][1] = ptx::pack_f16(y.x, y.y);
        } else {
          q_[c][j][n][0] = __ldg(reinterpret_cast<uint32_t const*>(at + 2 * t_));
          q_[c][j][n][1] = __ldg(reinterpret_cast<uint32_t const*>(at + 8 + 2 * t_));
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) o_[c][j][n][i] = 0;
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    rope_peak_[n][0] = rope_peak_[n][1] = kNone;
    if (rope_warp()) {
#pragma unroll
      for (int m = 0; m < 4; ++m) shared_.rope_sum[n][m][lane_] = {0, 0, 0, 0};
    }
  }
#pragma unroll
  for (int o = 0; o < kO; ++o) {
    peak_[o][0] = peak_[o][1] = kNone;
    sum_[o][0] = sum_[o][1] = 0;
  }
#pragma unroll
  for (int i = 0; i < T::kLaneScales; ++i) largest_[i] = 0;
}

// Warp 0: the rows from `begin` on that share a sequence, and the windows they have.
template <typename T>
__device__ __forceinline__ void Worker<T>::enter(int begin) {
  if (warp_ == 0) {
    int const row = min(lane_, unit_.rows - 1);
    int const position = shared_.row_position[row], visible = shared_.row_visible[row];
    Group group;
    group.begin = begin;
    group.first_segment = shared_.row_first[begin];
    group.last_segment = shared_.row_last[begin];
    bool const other = lane_ >= unit_.rows || (lane_ > begin && (shared_.row_first[row] != group.first_segment ||
                                                                 shared_.row_last[row] != group.last_segment));
    unsigned const others = __ballot_sync(~0u, other) & ~((2u << begin) - 1);
    group.end = others != 0 ? __ffs(others) - 1 : 32;
    bool const mine = lane_ >= begin && lane_ < group.end;
    group.lowest_position = __reduce_min_sync(~0u, mine ? position : INT32_MAX);
    group.highest_position = __reduce_max_sync(~0u, mine ? position : INT32_MIN);
    group.least_visible = __reduce_min_sync(~0u, mine ? visible : INT32_MAX);
    group.most_visible = __reduce_max_sync(~0u, mine ? visible : INT32_MIN);
    build_windows(shared_.table, group, position, op_.window, lane_);
    if (lane_ == 0) shared_.group = group;
  }
  sync_block<kW>();
}

// Issues the copies of the next tile, if there is one, and commits them as one group either way. Eight lanes copy a
// key.
template <typename T>
__device__ __forceinline__ void Worker<T>::load(int& run_index, int& offset, int stage) {
  if (run_index < shared_.table.run_count) {
    Run const& run = shared_.table.runs[run_index];
    int const last = run.count - 1, row0 = run.row0;
    bool const selected = run.source == Source::kSelected;
    auto const* pool = static_cast<uint8_t const*>(run.source == Source::kWindow ? op_.latents : op_.entries);
    constexpr int kBytes = T::kPacked ? 8 : 16;  // of one copy
    constexpr int kCopies = (T::kRowBytes + 8 * kBytes - 1) / (8 * kBytes);
    constexpr int kOwn = T::kKeys / kW / 4;
    static_assert(T::kKeys % (4 * kW) == 0);
    uint8_t const* from[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      // Places past the end repeat the last key: what is masked is still a latent, never stale shared memory.
      int const place = row0 + min(offset + (warp_ * kOwn + i) * 4 + lane_ / 8, last);
      int const row = selected ? shared_.list[place] : place;
      from[i] = pool + int64_t{row} * T::kRowBytes + lane_ % 8 * kBytes;
    }
    uint32_t const to =
        ptx::shared_address(shared_.tiles[stage]) + (warp_ * kOwn * 4 + lane_ / 8) * T::kStride + lane_ % 8 * kBytes;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
      for (int copy = 0; copy < kCopies; ++copy) {
        int const byte = copy * 8 * kBytes;
        if (byte + 8 * kBytes > T::kRowBytes && byte + lane_ % 8 * kBytes >= T::kRowBytes) continue;
        if constexpr (T::kPacked) {
          ptx::copy_async_8(to + i * 4 * T::kStride + byte, from[i] + byte);
        } else {
          ptx::copy_async_16(to + i * 4 * T::kStride + byte, from[i] + byte);
        }
      }
    }
    offset += T::kKeys;
    if (offset > last) {
      offset = 0;
      ++run_index;
    }
  }
  ptx::copy_commit();
}

template <typename T>
__device__ __forceinline__ void Worker<T>::walk() {
  int ahead_run = 0, ahead_offset = 0;
#pragma unroll
  for (int stage = 0; stage < T::kStages - 1; ++stage) load(ahead_run, ahead_offset, stage);
  int stage = 0;
  int const runs = shared_.table.run_count;
  for (int index = 0; index < runs; ++index) {
    Run const run = shared_.table.runs[index];
    if (!in_segment_ || run.segment_start != frame_) {
      fold();
      frame_ = run.segment_start;
      in_segment_ = true;
      rotate_queries();
    }
    bound(run);
    for (int offset = 0; offset < run.count; offset += T::kKeys) {
      ptx::copy_wait<T::kStages - 2>();
      sync_block<kW>();
      load(ahead_run, ahead_offset, stage == 0 ? T::kStages - 1 : stage - 1);
      attend(run, offset, ptx::shared_address(shared_.tiles[stage]));
      stage = stage == T::kStages - 1 ? 0 : stage + 1;
    }
  }
  ptx::copy_wait<0>();
}

// The rope channels of q, turned by the row's position in the segment's frame.
template <typename T>
__device__ __forceinline__ void Worker<T>::rotate_queries() {
  if (!rope_warp()) return;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    auto const* q = query(n);
    float2 const* turn = rope_of(8 * n + g_);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int const pair = 8 * j + 4 * half + t_;
        float2 const x = ptx::unpack_bf16(__ldg(reinterpret_cast<uint32_t const*>(q + kNopeDim + 2 * pair)));
        float2 const cs = __ldg(turn + pair);
        q_[kC - 1][j][n][half] = ptx::pack_bf16(x.x * cs.x - x.y * cs.y, x.y * cs.x + x.x * cs.y);
      }
    }
  }
}

// Turns the rope channels of the segment's partial output back and adds them to rope_sum.
template <typename T>
__device__ __forceinline__ void Worker<T>::fold() {
  if (!rope_warp() || !in_segment_) return;
  bool const odd = g_ & 1;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    float2 const* turn[2] = {rope_of(8 * n + 2 * t_), rope_of(8 * n + 2 * t_ + 1)};
    float now[2], keep[2];
    if constexpr (!T::kSplit) {
      now[0] = peak_[n][0];
      now[1] = peak_[n][1];
    } else {
      float2 const peaks = shared_.peak[n][t_];
      now[0] = peaks.x;
      now[1] = peaks.y;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      keep[i] = now[i] == kNone ? 0.0f : ptx::exp2_fast(rope_peak_[n][i] - now[i]);
      rope_peak_[n][i] = now[i];
    }
    float2 angles[4][4];
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) angles[m][i] = __ldg(turn[i & 1] + 8 * m + 4 * (i / 2) + g_ / 2);
    }
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      float4 total = shared_.rope_sum[n][m][lane_];
      float* sums = &total.x;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float2 const cs = angles[m][i];
        float const own = o_[kC - 1][m][n][i], pair = __shfl_xor_sync(~0u, own, 4);
        sums[i] = sums[i] * keep[i & 1] + own * cs.x + (odd ? -pair : pair) * cs.y;
        o_[kC - 1][m][n][i] = 0;
      }
      shared_.rope_sum[n][m][lane_] = total;
    }
  }
}

// This warp's part of the scores of kTogether x 16 keys and all columns. The fragments of the next step are on their
// way while those of this one are multiplied, and steps alternate between sums: each chain of products stays short.
template <typename T>
__device__ __forceinline__ void Worker<T>::score(uint32_t tile, float (&s)[kTogether][kN][4]) const {
  uint32_t const base = tile + (lane_ % 16) * T::kStride + (lane_ / 16) * 16;
  uint32_t const scales = tile + g_ * T::kStride + kLatentScaleOffset + warp_ * kC;
  constexpr int kWordBytes = kC < 4 ? kC : 4;
  uint32_t exponents[kTogether][2][kC / kWordBytes];
#pragma unroll
  for (int p = 0; p < kTogether; ++p) {
    if constexpr (T::kPacked) {
#pragma unroll
      for (int word = 0; word < kC / kWordBytes; ++word) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          exponents[p][half][word] = ptx::load_bytes<kWordBytes>(scales + (p * 16 + 8 * half) * T::kStride + 4 * word);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kN; ++n) s[p][n][0] = s[p][n][1] = s[p][n][2] = s[p][n][3] = 0;
  }
#pragma unroll
  for (int c = 0; c < kC; ++c) {
    uint32_t const at = base + chunk_bytes(c);
    if (is_wide(c)) {
      uint32_t a[4][kTogether][4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int p = 0; p < kTogether; ++p) ptx::load_matrices(a[j][p], at + p * 16 * T::kStride + 32 * j);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int p = 0; p < kTogether; ++p) {
#pragma unroll
          for (int n = 0; n < kN; ++n) {
            ptx::mma_bf16(s[p][n], a[j][p][0], a[j][p][1], a[j][p][2], a[j][p][3], q_[c][j][n][0], q_[c][j][n][1]);
          }
        }
      }
    } else {
      uint32_t a[2][kTogether][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int p = 0; p < kTogether; ++p) ptx::load_matrices(a[half][p], at + p * 16 * T::kStride + 32 * half);
      }
      float x[kTogether][kChains][kN][4];
#pragma unroll
      for (int p = 0; p < kTogether; ++p) {
#pragma unroll
        for (int chain = 0; chain < kChains; ++chain) {
#pragma unroll
          for (int n = 0; n < kN; ++n) {
            x[p][chain][n][0] = x[p][chain][n][1] = x[p][chain][n][2] = x[p][chain][n][3] = 0;
          }
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
#pragma unroll
          for (int p = 0; p < kTogether; ++p) {
            uint32_t const(&f)[4] = a[half][p];
            uint32_t a0, a1, a2, a3;
            ptx::e4m3_to_f16(f[2 * j], a0, a2);
            ptx::e4m3_to_f16(f[2 * j + 1], a1, a3);
#pragma unroll
            for (int n = 0; n < kN; ++n) {
              ptx::mma_f16(x[p][j % kChains][n], a0, a1, a2, a3, q_[c][2 * half + j][n][0], q_[c][2 * half + j][n][1]);
            }
          }
        }
      }
#pragma unroll
      for (int p = 0; p < kTogether; ++p) {
        float const scale[2] = {ptx::power_of_two(exponents[p][0][c / 4], c % 4),
                                ptx::power_of_two(exponents[p][1][c / 4], c % 4)};
#pragma unroll
        for (int chain = 0; chain < kChains; ++chain) {
#pragma unroll
          for (int n = 0; n < kN; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) s[p][n][i] += x[p][chain][n][i] * scale[i / 2];
          }
        }
      }
    }
  }
}

// Keys [least_, most_) of the run are seen by every row of the unit: tiles inside need no mask.
template <typename T>
__device__ __forceinline__ void Worker<T>::bound(Run const& run) {
  Group const& group = shared_.group;
  bool const window = run.source == Source::kWindow;
  least_ = window ? group.highest_position - op_.window + 1 : INT32_MIN;
  // Selected keys were checked one by one when the list was made.
  most_ = run.source == Source::kSelected ? INT32_MAX : window ? group.lowest_position + 1 : group.least_visible;
  most_ = min(most_, run.x0 + run.count) - T::kKeys;
  if (group.begin != 0 || group.end != unit_.rows) most_ = INT32_MIN;
}

// Hides the keys that a column's row does not see.
template <typename T>
__device__ __forceinline__ void Worker<T>::mask(Run const& run, int offset, float (&s)[kO][T::kParts][4]) const {
  int const first = run.x0 + offset, end = run.x0 + run.count;
  if (first >= least_ && first <= most_) return;
  bool const window = run.source == Source::kWindow, selected = run.source == Source::kSelected;
  Group const& group = shared_.group;
#pragma unroll
  for (int o = 0; o < kO; ++o) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const row = row_of(8 * owned(o) + 2 * t_ + i);  // no row: every key is hidden
      bool const inside = row >= group.begin && row < group.end;
      int const position = shared_.row_position[max(row, 0)], visible = shared_.row_visible[max(row, 0)];
      int const low = window ? position - op_.window + 1 : INT32_MIN;
      int const high = !inside ? INT32_MIN : min(end, selected ? INT32_MAX : window ? position + 1 : visible);
#pragma unroll
      for (int part = 0; part < T::kParts; ++part) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          int const x = first + 16 * part + 8 * half + g_;
          if (x < low || x >= high) s[o][part][2 * half + i] = kNone;
        }
      }
    }
  }
}

// Block scales of the tile's keys as fp16 relative to the largest seen; when that grows, the output shrinks with it.
template <typename T>
__device__ __forceinline__ void Worker<T>::read_scales(uint32_t tile) {
  int const first = T::kLaneScales * (lane_ & 1) % kC;
  int exponent[T::kParts][T::kLaneScales];
  bool grew = false;
#pragma unroll
  for (int part = 0; part < T::kParts; ++part) {
    int const key = 16 * part + lane_ / 2;
    uint32_t const bytes =
        ptx::load_bytes<T::kLaneScales>(tile + key * T::kStride + kLatentScaleOffset + warp_ * kC + first);
#pragma unroll
    for (int i = 0; i < T::kLaneScales; ++i) {
      exponent[part][i] = static_cast<int>(bytes >> (8 * i) & 0xff);
      grew |= exponent[part][i] > largest_[i];
    }
  }
  if (__any_sync(~0u, grew)) {
    float shrink[T::kLaneScales];
#pragma unroll
    for (int i = 0; i < T::kLaneScales; ++i) {
      int most = exponent[0][i];
#pragma unroll
      for (int part = 1; part < T::kParts; ++part) most = max(most, exponent[part][i]);
#pragma unroll
      for (int step = 2; step < 32; step *= 2) most = max(most, __shfl_xor_sync(~0u, most, step));
      int const before = largest_[i];
      if (most > before) largest_[i] = most + kScaleSlack;
      shrink[i] = ptx::exp2_fast(static_cast<float>(before - largest_[i]));
    }
#pragma unroll
    for (int c = 0; c < kC; ++c) {
      float const factor = __shfl_sync(~0u, shrink[c % T::kLaneScales], c / T::kLaneScales);
      if (is_wide(c)) continue;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) o_[c][j][n][i] *= factor;
        }
      }
    }
  }
  __half* const table = shared_.scales[warp_];
#pragma unroll
  for (int part = 0; part < T::kParts; ++part) {
    // Keys 2t, 2t + 1, 2t + 8, 2t + 9 lie side by side: one 8-byte load gives a thread all it needs of a block.
    int const key = lane_ / 2, place = key % 8 / 2 * 4 + key / 8 * 2 + key % 2;
#pragma unroll
    for (int i = 0; i < T::kLaneScales; ++i) {
      int const field = max(exponent[part][i] - largest_[i] + kScaleHeadroom + 15, 0);
      table[((first + i) * T::kParts + part) * 16 + place] = __ushort_as_half(static_cast<unsigned short>(field << 10));
    }
  }
  __syncwarp();
}

// Adds the probabilities (B fragments: keys 2t, 2t + 1 and 2t + 8, 2t + 9 of column g) times the latents to the output.
template <typename T>
__device__ __forceinline__ void Worker<T>::accumulate(uint32_t tile, int part, uint32_t const (&p_f16)[kN][2],
                                                      uint32_t const (&p_bf16)[kN][2]) {
  uint32_t const base = tile + part * 16 * T::kStride + (lane_ % 16) * T::kStride + (lane_ / 16) * 16;
#pragma unroll
  for (int c = 0; c < kC; ++c) {
    uint32_t const at = base + chunk_bytes(c);
    if (is_wide(c)) {
      uint32_t a[4][4];
#pragma unroll
      for (int j = 0; j < 4; ++j) ptx::load_matrices_transposed(a[j], at + 32 * j);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          ptx::mma_bf16(o_[c][j][n], a[j][0], a[j][2], a[j][1], a[j][3], p_bf16[n][0], p_bf16[n][1]);
        }
      }
    } else {
      uint32_t a[2][4];
      ptx::load_matrices_transposed(a[0], at);
      ptx::load_matrices_transposed(a[1], at + 32);
      uint2 const scale = *reinterpret_cast<uint2 const*>(&shared_.scales[warp_][(c * T::kParts + part) * 16 + 4 * t_]);
      uint32_t p[kN][2];
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        p[n][0] = ptx::multiply_f16(p_f16[n][0], scale.x);
        p[n][1] = ptx::multiply_f16(p_f16[n][1], scale.y);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          // Bytes (key 2t: channel 2g, 2g + 1), (key 2t + 1: the same) become two channels of two keys.
          uint32_t const x = __byte_perm(a[half][2 * j], 0, 0x3120), y = __byte_perm(a[half][2 * j + 1], 0, 0x3120);
          uint32_t a0, a1, a2, a3;
          ptx::e4m3_to_f16(x, a0, a1);
          ptx::e4m3_to_f16(y, a2, a3);
#pragma unroll
          for (int n = 0; n < kN; ++n) ptx::mma_f16(o_[c][2 * half + j][n], a0, a1, a2, a3, p[n][0], p[n][1]);
        }
      }
    }
  }
}

template <typename T>
__device__ __forceinline__ void Worker<T>::attend(Run const& run, int offset, uint32_t tile) {
  float s[kO][T::kParts][4];
#pragma unroll
  for (int part = 0; part < T::kParts; part += kTogether) {
    float mine[kTogether][kN][4];
    score(tile + part * 16 * T::kStride, mine);
#pragma unroll
    for (int p = 0; p < kTogether; ++p) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        if constexpr (T::kAlone) {
#pragma unroll
          for (int i = 0; i < 4; ++i) s[n][part + p][i] = mine[p][n][i];
        } else {
          shared_.partial[n][part + p][warp_][lane_] = {mine[p][n][0], mine[p][n][1], mine[p][n][2], mine[p][n][3]};
        }
      }
    }
  }
  if constexpr (T::kPacked) read_scales(tile);
  if constexpr (!T::kAlone) __syncthreads();
  // log2(e) / sqrt(512): probabilities are powers of two from here on.
  constexpr float kScale = 1.4426950408889634f * 0.04419417382415922f;
#pragma unroll
  for (int o = 0; o < kO; ++o) {
#pragma unroll
    for (int part = 0; part < T::kParts; ++part) {
      if constexpr (T::kAlone) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[o][part][i] *= kScale;
      } else {
        float4 const(&parts)[kW][32] = shared_.partial[owned(o)][part];
        float4 total = parts[0][lane_];
#pragma unroll
        for (int w = 1; w < kW; ++w) {
          float4 const more = parts[w][lane_];
          total = {total.x + more.x, total.y + more.y, total.z + more.z, total.w + more.w};
        }
        s[o][part][0] = total.x * kScale;
        s[o][part][1] = total.y * kScale;
        s[o][part][2] = total.z * kScale;
        s[o][part][3] = total.w * kScale;
      }
    }
  }
  mask(run, offset, s);
  float alpha[kO][2];
  uint32_t p_f16[T::kParts][kN][2], p_bf16[T::kParts][kN][2];
  bool rescale = false;
#pragma unroll
  for (int o = 0; o < kO; ++o) {
    float base[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float most = fmaxf(s[o][0][i], s[o][0][i + 2]);
#pragma unroll
      for (int part = 1; part < T::kParts; ++part) most = fmaxf(most, fmaxf(s[o][part][i], s[o][part][i + 2]));
#pragma unroll
      for (int step = 4; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
      float const peak = fmaxf(peak_[o][i], most);
      base[i] = peak == kNone ? 0.0f : peak;
      alpha[o][i] = peak == kNone ? 1.0f : ptx::exp2_fast(peak_[o][i] - base[i]);
      rescale |= alpha[o][i] != 1.0f;
      peak_[o][i] = peak;
      sum_[o][i] *= alpha[o][i];
    }
#pragma unroll
    for (int part = 0; part < T::kParts; ++part) {
      float (&p)[4] = s[o][part];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        p[i] = ptx::exp2_fast(p[i] - base[i & 1]);
        sum_[o][i & 1] += p[i];
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float const a = p[2 * half], b = p[2 * half + 1];
        p_f16[part][o][half] = T::kPacked ? ptx::transpose_matrix(ptx::pack_f16(a, b)) : 0;
        p_bf16[part][o][half] = ptx::transpose_matrix(ptx::pack_bf16(a, b));
      }
    }
  }
  if constexpr (!T::kSplit) {
    rescale = __any_sync(~0u, rescale);
  } else {
#pragma unroll
    for (int part = 0; part < T::kParts; ++part) {
      shared_.probabilities[warp_][part][lane_] = {p_f16[part][0][0], p_f16[part][0][1], p_bf16[part][0][0],
                                                   p_bf16[part][0][1]};
    }
    if (g_ == 0) {
      shared_.alpha[warp_][t_] = {alpha[0][0], alpha[0][1]};
      shared_.peak[warp_][t_] = {peak_[0][0], peak_[0][1]};
    }
    rescale = __syncthreads_or(rescale);
#pragma unroll
    for (int part = 0; part < T::kParts; ++part) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        uint4 const p = shared_.probabilities[n][part][lane_];
        p_f16[part][n][0] = p.x;
        p_f16[part][n][1] = p.y;
        p_bf16[part][n][0] = p.z;
        p_bf16[part][n][1] = p.w;
      }
    }
  }
  if (rescale) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      float2 factor;
      if constexpr (T::kSplit) {
        factor = shared_.alpha[n][t_];
      } else {
        factor = {alpha[n][0], alpha[n][1]};
      }
#pragma unroll
      for (int c = 0; c < kC; ++c) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          o_[c][j][n][0] *= factor.x;
          o_[c][j][n][1] *= factor.y;
          o_[c][j][n][2] *= factor.x;
          o_[c][j][n][3] *= factor.y;
        }
      }
    }
  }
#pragma unroll
  for (int part = 0; part < T::kParts; ++part) accumulate(tile, part, p_f16[part], p_bf16[part]);
}

template <typename T>
__device__ __forceinline__ void Worker<T>::finish() {
  float factor[kO][2];
#pragma unroll
  for (int o = 0; o < kO; ++o) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float total = sum_[o][i];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) total += __shfl_xor_sync(~0u, total, step);
      int const column = 8 * owned(o) + 2 * t_ + i;
      factor[o][i] = 0;
      if (row_of(column) < 0 || peak_[o][i] == kNone) continue;
      float const sink = shared_.sinks[column];
      float const peak = fmaxf(peak_[o][i], sink), scale = ptx::exp2_fast(peak_[o][i] - peak);
      factor[o][i] = scale / (total * scale + ptx::exp2_fast(sink - peak));
    }
  }
  if constexpr (T::kSplit) {
    if (g_ == 0) shared_.alpha[warp_][t_] = {factor[0][0], factor[0][1]};
    sync_block<kW>();
  }
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    float2 scale;
    if constexpr (T::kSplit) {
      scale = shared_.alpha[n][t_];
    } else {
      scale = {factor[n][0], factor[n][1]};
    }
    __nv_bfloat16* out[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      out[i] = column_pointer(8 * n + 2 * t_ + i, static_cast<__nv_bfloat16*>(op_.out_global),
                              static_cast<__nv_bfloat16*>(op_.out_local));
    }
#pragma unroll
    for (int c = 0; c < kC; ++c) {
      int const channel = (warp_ * kC + c) * kBlockChannels;
      float block = 1;
      if constexpr (T::kPacked) {
        int const largest = __shfl_sync(~0u, largest_[c % T::kLaneScales], c / T::kLaneScales);
        if (!is_wide(c)) block = exp2f(static_cast<float>(largest - 127 - kScaleHeadroom));
      }
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        float v[4];
        float4 const folded = is_rope(c) ? shared_.rope_sum[n][m][lane_] : make_float4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          v[i] = (is_rope(c) ? (&folded.x)[i] : o_[c][m][n][i]) * block * (i & 1 ? scale.y : scale.x);
        }
        if (!is_wide(c)) {
          // Rows g and g + 8 of the fragment are channels 2g and 2g + 1.
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if (out[i] != nullptr) {
              *reinterpret_cast<uint32_t*>(out[i] + channel + 16 * m + 2 * g_) = ptx::pack_bf16(v[i], v[i + 2]);
            }
          }
          continue;
        }
        // Channels g and g + 1 lie in neighbouring lanes: even ones write the first column, odd ones the second.
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          bool const odd = g_ & 1;
          float const mine = odd ? v[2 * half + 1] : v[2 * half], other = odd ? v[2 * half] : v[2 * half + 1];
          float const theirs = __shfl_xor_sync(~0u, other, 4);
          __nv_bfloat16* const to = out[odd];
          if (to != nullptr) {
            *reinterpret_cast<uint32_t*>(to + channel + 16 * m + 8 * half + (g_ & ~1)) =
                odd ? ptx::pack_bf16(theirs, mine) : ptx::pack_bf16(mine, theirs);
          }
        }
      }
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads, T::kBlocksPerSm)
    attention_kernel(__grid_constant__ Launch const launch) {
  extern __shared__ __align__(16) uint8_t raw[];
  Worker<T>(launch, *reinterpret_cast<Shared<T>*>(raw)).run();
}

template <int kTiles, bool kPacked>
Status launch_attention(Launch const& launch, cudaStream_t stream) {
  using T = Traits<kTiles, kPacked>;
  constexpr int kBytes = static_cast<int>(sizeof(Shared<T>));
  int const bytes = kBytes + 4 * (launch.op.selected != nullptr ? launch.op.top_k : 0);
  int64_t const units = int64_t{launch.full.units} + launch.tail.units;
  REDKNOT_CUDA(cudaFuncSetAttribute(attention_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    kBytes + 4 * kMaxSelected));
  attention_kernel<T><<<static_cast<unsigned>(units), T::kThreads, bytes, stream>>>(launch);
  REDKNOT_LAUNCHED();
  return Status::kSuccess;
}

}  // namespace redknot::attention
