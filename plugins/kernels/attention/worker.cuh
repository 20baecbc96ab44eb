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
    shared_.sink[column] = row < unit_.rows ? sink_of(op_, head) : 0.0f;
  }
  meet();
  place_rows(0, unit_.rows);
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

}  // namespace redknot::attention
