#pragma once

// One block, W warps, one unit of up to 8 W columns (a column is a head of a row). Keys are the M dimension of every
// matrix product and columns the N dimension, so 8 columns waste nothing. Warp w owns channels [512 w / W, 512 (w + 1) / W):
// it keeps its slice of q in registers, computes its part of every score, and accumulates its slice of the output.
// With W > 1 the parts of the scores meet in shared memory, warp w turns those of columns 8 w .. 8 w + 7 into probabilities,
// and all warps read them back.
//
// Fragments of mma.m16n8k16: g = lane / 4, t = lane % 4. Score fragments hold keys g, g + 8 and columns 2t, 2t + 1.
// Packed latents are multiplied as they are: e4m3 codes become fp16 exactly, block scales multiply 64-channel parts of the
// scores, and the probabilities (relative to a running largest scale of each block, so that fp16 never overflows).

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

template <int kWarps_, bool kPacked_>
struct Traits {
  static constexpr int kWarps = kWarps_;
  static constexpr bool kPacked = kPacked_;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kColumns = 8 * kWarps;
  static constexpr int kParts = kWarps == 1 || (!kPacked && kWarps == 2) ? 1 : 2;  // 16-key parts of a tile
  static constexpr int kKeys = 16 * kParts;
  static constexpr int kStages = kPacked && kWarps == 4 ? 3 : 2;
  static constexpr int kChunks = kBlocks / kWarps;  // 64-channel blocks of a warp
  static constexpr int kRowBytes = kPacked ? kPackedLatentBytes : 2 * kHeadDim;
  static constexpr int kStride = kPacked ? 592 : 1040;  // odd multiples of 16: ldmatrix without bank conflicts
  static constexpr int kLaneScales = kChunks > 1 ? kChunks / 2 : 1;
};

template <typename T>
struct Shared {
  static constexpr bool kShares = T::kWarps > 1;
  alignas(16) uint8_t tiles[T::kStages][T::kKeys * T::kStride];
  float4 rope_sum[T::kWarps][4][32];  // rope channels summed over finished segments, in the rows' common frame
  float4 partial[kShares ? T::kWarps : 1][T::kParts][T::kWarps][kShares ? 32 : 1];
  uint4 probabilities[kShares ? T::kWarps : 1][T::kParts][kShares ? 32 : 1];
  __half scales[T::kWarps][T::kPacked ? T::kChunks * T::kKeys : 8];
  float2 alpha[T::kWarps][4];
  float2 peak[T::kWarps][4];
  RunTable table;
  int32_t list[kMaxSelected];
};

template <typename T>
class Worker {
 public:
  __device__ Worker(Launch const& launch, Shared<T>& shared)
      : op_(launch.op), shared_(shared), unit_(unit_of(launch, blockIdx.x)), lane_(threadIdx.x % 32),
        warp_(T::kWarps == 1 ? 0 : threadIdx.x / 32), g_(lane_ / 4), t_(lane_ % 4) {}

  __device__ __forceinline__ void run() {
    start();
    for (int begin = 0; begin < unit_.rows;) {
      Group const group = group_at(begin);
      enter(group);
      for (int next = group.first_segment; next < group.last_segment;) {
        if (warp_ == 0) build_runs(shared_.table, shared_.list, op_, group, unit_.row, next, lane_);
        sync();
        walk();
        next = shared_.table.next_segment;
        sync();
      }
      begin = group.end;
    }
    fold();
    finish();
  }

 private:
  static constexpr int kW = T::kWarps;
  static constexpr int kC = T::kChunks;

  SegLatentAttentionParams const& op_;
  Shared<T>& shared_;
  Unit const unit_;
  int const lane_, warp_, g_, t_;

  int position_, visible_, first_segment_, last_segment_;  // of row `lane` of the unit
  Group group_;
  int row_[2];                                    // rows of this thread's softmax columns, -1 for none
  int window_low_[2], window_high_[2], entry_high_[2];  // keys those columns see
  uint32_t q_[kC][4][kW][2];
  float o_[kC][4][kW][4];
  float peak_[2], sum_[2];                        // log2 units; sums of this thread's keys
  float rope_peak_[kW][2];                        // what rope_sum is relative to
  int largest_[T::kLaneScales];                   // biased exponents, of the chunks this lane looks after
  int frame_ = 0;                                 // origin of the segment the rope channels are in
  bool in_segment_ = false;

  __device__ __forceinline__ void sync() const {
    if constexpr (kW == 1) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }
  __device__ __forceinline__ bool rope_warp() const { return kW == 1 || warp_ == kW - 1; }
  __device__ __forceinline__ bool is_rope(int chunk) const { return chunk == kC - 1 && rope_warp(); }
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
  __device__ __forceinline__ float2 const* rope_row(int row, int frame) const {
    int const position = row < 0 ? 0 : __shfl_sync(~0u, position_, row);
    (void)position;
    return nullptr;
  }

  __device__ __forceinline__ void start();
  __device__ __forceinline__ Group group_at(int begin) const;
  __device__ __forceinline__ void enter(Group const& group);
  __device__ __forceinline__ void walk();
  __device__ __forceinline__ void load(int& run, int& offset, int stage);
  __device__ __forceinline__ void rotate_queries();
  __device__ __forceinline__ void fold();
  __device__ __forceinline__ void attend(Run const& run, int offset, uint32_t tile);
  __device__ __forceinline__ void score(uint32_t tile, int part, float (&s)[kW][4]) const;
  __device__ __forceinline__ void mask(Run const& run, int offset, float (&s)[T::kParts][4]) const;
  __device__ __forceinline__ void read_scales(uint32_t tile);
  __device__ __forceinline__ void accumulate(uint32_t tile, int part, uint32_t const (&p16)[kW][2],
                                             uint32_t const (&pb16)[kW][2]);
  __device__ __forceinline__ void finish();
};

}  // namespace redknot::attention
