// A cluster of sixteen blocks works on one unit, each on a sixteenth of its keys: a single block would take as long as
// all keys of the row, one tile after the other, while the rest of the GPU has nothing to do. Keys become bf16 in
// shared memory, turned by their segments' frames; the next tile is on its way while one is multiplied. At the end each
// block merges a sixteenth of the channels of all blocks, through their shared memory.
//
// Fragments: g = lane / 4, t = lane % 4. Scores: keys g, g + 8 of a warp's 16 and heads 2t, 2t + 1. Outputs: channels
// g, g + 8 of 16 and the same heads.

#include "common/check.h"
#include "common/cluster.cuh"
#include "common/cluster_launch.h"
#include "common/packing.cuh"
#include "common/ptx.cuh"
#include "common/turn.cuh"
#include "kernels/attention/few_rows.h"
#include "kernels/attention/shared.cuh"

namespace redknot::attention {
namespace {

constexpr int kSplit = 16;  // blocks of a cluster
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kWarpKeys = kTileKeys / kWarps;       // that a warp brings
constexpr int kWarpChannels = kHeadDim / kWarps;    // whose outputs a warp computes
constexpr int kMergedChannels = kHeadDim / kSplit;  // of a block
constexpr int kRopeChunk = kNopeDim / 8;            // the first eight rope channels; a lane has two chunks a key
constexpr int kPitch = kHeadDim + 8;                // bf16; rows 16 bytes apart modulo the banks
constexpr int kProbabilityPitch = kTileKeys + 8;
constexpr int kScorePitch = kTileKeys + 4;       // floats
constexpr int kHalves = 2;                       // of the channels, whose scores are summed
constexpr int kSteps = kHeadDim / kHalves / 16;  // of a warp's score products
static_assert(kWarps == kFewHeads && kTileKeys / 16 * kHalves == kWarps && kMergedChannels == 32);

struct FewShared {
  union {
    __nv_bfloat16 keys[kTileKeys * kPitch];
    float outputs[kFewHeads][kHeadDim];  // when all keys are done
  };
  __nv_bfloat16 query[kFewHeads * kPitch];
  __nv_bfloat16 probabilities[kFewHeads * kProbabilityPitch];
  float scores[kHalves][kFewHeads][kScorePitch];
  bool present[kTileKeys];
  float factor[kFewHeads];
  float base[kFewHeads];  // log2 of what the block's outputs and sums are relative to
  float sum[kFewHeads];
  KeyTable<1, 32> table;
};

// Two chunks of each of the warp's keys, as they lie in the pool.
struct Brought {
  uint4 chunks[kWarpKeys][2];
  int frame;       // of key `lane` of the warp's
  uint32_t there;  // bit of each key that exists
  uint2 scales;    // of key `lane`; packed pools
  // Of the warp's first key, which mostly is the frame of all, and of its rope channels that are this lane's.
  int first_frame;
  float4 angles[2];
};

template <bool kPacked>
class FewRows {
 public:
  __device__ FewRows(SegLatentAttentionParams const& op, FewShared& shared, Unit const& unit)
      : op_(op),
        shared_(shared),
        unit_(unit),
        keys_(op, shared.table, kPacked ? kPackedLatentPitch : 2 * kHeadDim),
        lane_(static_cast<int>(threadIdx.x) % 32),
        warp_(static_cast<int>(threadIdx.x) / 32),
        g_(lane_ / 4),
        t_(lane_ % 4) {}

  __device__ __forceinline__ void run() {
    position_ = narrow(__ldg(op_.positions + unit_.row));
    load_query();
    if (warp_ == 0) {
      int const first = segment_bound(op_, unit_.row, 0), last = segment_bound(op_, unit_.row, 1);
      keys_.enter(0, 1, position_, narrow(__ldg(op_.visible + unit_.row)), first, last, lane_);
    }
    __syncthreads();
    share();
    Brought brought;
    if (begin_ < end_) bring(begin_, brought);
    load_query_fragments();
    for (int first = begin_; first < end_; first += kTileKeys) {
      place(brought);
      __syncthreads();
      if (first + kTileKeys < end_) bring(first + kTileKeys, brought);
      score();
      __syncthreads();
      soften();
      __syncthreads();
      accumulate();
      __syncthreads();
    }
    leave();
    cluster::synchronise();
    merge();
    cluster::synchronise();  // no block may go while another reads from it
  }

 private:
  SegLatentAttentionParams const& op_;
  FewShared& shared_;
  Unit const unit_;
  Keys<KeyTable<1, 32>> keys_;
  int const lane_, warp_, g_, t_;
  int position_ = 0;
  int begin_ = 0, end_ = 0;           // this block's key slots
  float base_ = kNone, sum_ = 0;      // of head `warp`
  float o_[kWarpChannels / 16][4]{};  // of the warp's channels
  uint32_t query_[kSteps][2];

  template <typename P>
  __device__ __forceinline__ P* head_pointer(int column, P* global, P* local) const {
    return column_pointer(op_, unit_, 0, column, global, local);
  }

  // Which slots of the row's keys are this block's.
  __device__ __forceinline__ void share() {
    int const slots = keys_.is_empty() ? 0 : shared_.table.group.window_slots + keys_.entry_slots();
    int const own = (slots + kSplit - 1) / kSplit;
    begin_ = min(slots, static_cast<int>(cluster::rank()) * own);
    end_ = min(slots, begin_ + own);
  }

  __device__ __forceinline__ Key find(int slot) const {
    int const number = slot - shared_.table.group.window_slots;
    if (slot >= end_) return keys_.none();
    return number < 0 ? keys_.in_window(slot) : keys_.entry(number, keys_.announce(unit_.row, number));
  }

  // Starts the loads of the tile of slots from `first` on.
  __device__ __forceinline__ void bring(int first, Brought& brought) const {
    Key const key = find(first + warp_ * kWarpKeys + lane_ % kWarpKeys);
    bool const exists = key.x != kNoKey;
    brought.there = __ballot_sync(~0u, exists);
    brought.frame = key.frame;
    brought.scales =
        kPacked && exists ? __ldg(reinterpret_cast<uint2 const*>(key.latent + kLatentScaleOffset)) : uint2{};
    brought.first_frame = __shfl_sync(~0u, key.frame, 0);
    if (lane_ + 32 >= kRopeChunk && brought.first_frame != 0) {
      load_angles(brought.first_frame, (lane_ + 32 - kRopeChunk) * 4, brought.angles);
    }
    auto const address = reinterpret_cast<uint64_t>(key.latent);
#pragma unroll
    for (int i = 0; i < kWarpKeys; ++i) {
      auto const* const latent = reinterpret_cast<uint8_t const*>(__shfl_sync(~0u, address, i));
      bool const there = brought.there >> i & 1;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int const chunk = 32 * half + lane_;
        uint4& into = brought.chunks[i][half];
        into = {};
        if (!there) continue;
        if constexpr (kPacked) {
          bool const rope = chunk >= kRopeChunk;
          auto const* const from =
              reinterpret_cast<uint2 const*>(latent + (rope ? kNopeDim + 16 * (chunk - kRopeChunk) : 8 * chunk));
          uint2 const low = __ldg(from), high = rope ? __ldg(from + 1) : uint2{};
          into = {low.x, low.y, high.x, high.y};
        } else {
          into = __ldg(reinterpret_cast<uint4 const*>(latent) + chunk);
        }
      }
    }
  }

  // Of four pairs of rope channels, from pair `pair` on.
  __device__ __forceinline__ void load_angles(int position, int pair, float4 (&angles)[2]) const {
    auto const* const from = reinterpret_cast<float4 const*>(rope_at(op_, position) + pair);
    angles[0] = __ldg(from);
    angles[1] = __ldg(from + 1);
  }

  // The tile into shared memory. Keys that do not exist become zeros, which add nothing.
  __device__ __forceinline__ void place(Brought const& brought) const {
    float const inverse = 1.0f / __ldg(op_.rope);  // a constant factor of the table must not count twice
#pragma unroll
    for (int i = 0; i < kWarpKeys; ++i) {
      int const key = warp_ * kWarpKeys + i, frame = __shfl_sync(~0u, brought.frame, i);
      uint32_t const low = __shfl_sync(~0u, brought.scales.x, i), high = __shfl_sync(~0u, brought.scales.y, i);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int const chunk = 32 * half + lane_;
        uint4 words = brought.chunks[i][half];
        if (kPacked && chunk < kRopeChunk) {
          int const block = chunk / (kBlockChannels / 8);
          uint32_t const exponent = (block < 4 ? low : high) >> (8 * (block & 3)) & 0xff;
          float values[kVector];
          decode_e4m3({words.x, words.y}, __uint_as_float(exponent << 23), values);
          words = pack_bf16(values);
        } else if (chunk >= kRopeChunk && frame != 0) {
          float4 angles[2] = {brought.angles[0], brought.angles[1]};
          if (frame != brought.first_frame) load_angles(frame, (chunk - kRopeChunk) * 4, angles);
          words = turned(words, angles, inverse);
        }
        *reinterpret_cast<uint4*>(shared_.keys + key * kPitch + 8 * chunk) = words;
      }
    }
    if (lane_ < kWarpKeys) shared_.present[warp_ * kWarpKeys + lane_] = brought.there >> lane_ & 1;
  }

  // q of head `warp`, turned by the row's position. Heads past the last repeat it: nothing of them is written.
  __device__ __forceinline__ void load_query() const {
    auto const* const q = head_pointer(min(warp_, unit_.heads - 1), static_cast<__nv_bfloat16 const*>(op_.q_global),
                                       static_cast<__nv_bfloat16 const*>(op_.q_local));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int const chunk = 32 * half + lane_;
      uint4 words = __ldg(reinterpret_cast<uint4 const*>(q) + chunk);
      if (chunk >= kRopeChunk) {
        float4 angles[2];
        load_angles(position_, (chunk - kRopeChunk) * 4, angles);
        words = turned(words, angles, 1.0f);
      }
      *reinterpret_cast<uint4*>(shared_.query + warp_ * kPitch + 8 * chunk) = words;
    }
  }

  __device__ __forceinline__ void load_query_fragments() {
    auto const* const own = shared_.query + g_ * kPitch + warp_ / 4 * (kHeadDim / kHalves) + 2 * t_;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 2; ++i) query_[step][i] = *reinterpret_cast<uint32_t const*>(own + 16 * step + 8 * i);
    }
  }

  // Products of 16 keys and half of the channels.
  __device__ __forceinline__ void score() const {
    int const half = warp_ / 4, first = warp_ % 4 * 16;
    uint32_t const keys = ptx::shared_address(shared_.keys + (first + lane_ / 8 % 2 * 8 + lane_ % 8) * kPitch +
                                              half * (kHeadDim / kHalves) + lane_ / 16 * 8);
    float s[2][4]{};  // two chains
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t a[4];
      ptx::load_matrices(a, keys + 32 * step);
      ptx::mma_bf16(s[step % 2], a[0], a[1], a[2], a[3], query_[step][0], query_[step][1]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      shared_.scores[half][2 * t_ + i % 2][first + g_ + i / 2 * 8] = s[0][i] + s[1][i];
    }
  }

  // Scores of head `warp` to probabilities, relative to the largest so far.
  __device__ __forceinline__ void soften() {
    float s[2], most = base_;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const key = 32 * i + lane_;
      s[i] = (shared_.scores[0][warp_][key] + shared_.scores[1][warp_][key]) * kScoreScale;
      if (!shared_.present[key]) s[i] = kNone;
      most = fmaxf(most, s[i]);
    }
    most = lane_max<kWarp>(most);
    float const origin = most == kNone ? 0.0f : most;
    float const factor = ptx::exp2_fast(base_ - origin);
    float total = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float const p = ptx::exp2_fast(s[i] - origin);
      total += p;
      shared_.probabilities[warp_ * kProbabilityPitch + 32 * i + lane_] = __float2bfloat16_rn(p);
    }
    sum_ = sum_ * factor + lane_sum<kWarp>(total);
    base_ = most;
    if (lane_ == 0) shared_.factor[warp_] = factor;
  }

  // Adds the probabilities times the keys to the outputs of the warp's channels.
  __device__ __forceinline__ void accumulate() {
    float2 const factor = *reinterpret_cast<float2 const*>(&shared_.factor[2 * t_]);
    uint32_t const keys = ptx::shared_address(shared_.keys + (lane_ / 16 * 8 + lane_ % 8) * kPitch +
                                              warp_ * kWarpChannels + lane_ / 8 % 2 * 8);
    auto const* const p = shared_.probabilities + g_ * kProbabilityPitch + 2 * t_;
#pragma unroll
    for (auto& o : o_) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o[i] *= i & 1 ? factor.y : factor.x;
    }
#pragma unroll
    for (int step = 0; step < kTileKeys / 16; ++step) {
      uint32_t const b0 = *reinterpret_cast<uint32_t const*>(p + 16 * step);
      uint32_t const b1 = *reinterpret_cast<uint32_t const*>(p + 16 * step + 8);
#pragma unroll
      for (int tile = 0; tile < kWarpChannels / 16; ++tile) {
        uint32_t a[4];
        ptx::load_matrices_transposed(a, keys + (step * 16 * kPitch + tile * 16) * 2);
        ptx::mma_bf16(o_[tile], a[0], a[1], a[2], a[3], b0, b1);
      }
    }
  }

  // What the block found, for the others to read.
  __device__ __forceinline__ void leave() const {
#pragma unroll
    for (int tile = 0; tile < kWarpChannels / 16; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        shared_.outputs[2 * t_ + i % 2][warp_ * kWarpChannels + tile * 16 + g_ + i / 2 * 8] = o_[tile][i];
      }
    }
    if (lane_ == 0) {
      shared_.base[warp_] = base_;
      shared_.sum[warp_] = sum_;
    }
  }

  // Head `warp`, a channel a lane: the sums of all blocks, and the sink once.
  __device__ __forceinline__ void merge() const {
    if (warp_ >= unit_.heads) return;
    int const channel = static_cast<int>(cluster::rank()) * kMergedChannels + lane_;
    float const base = lane_ < kSplit ? cluster::load(&shared_.base[warp_], lane_) : kNone;
    float const sum = lane_ < kSplit ? cluster::load(&shared_.sum[warp_], lane_) : 0;
    float const most = lane_max<kWarp>(base);
    bool const any = most != kNone;
    float const sink = sink_of(op_, unit_.head + warp_);
    float const peak = fmaxf(most, sink), weight = ptx::exp2_fast(base - peak);
    float const total = lane_sum<kWarp>(sum * weight);
    float value = 0;
#pragma unroll
    for (int block = 0; block < kSplit; ++block) {
      value += __shfl_sync(~0u, weight, block) * cluster::load(&shared_.outputs[warp_][channel], block);
    }
    value = any ? value / (total + ptx::exp2_fast(sink - peak)) : 0;
    if (channel >= kNopeDim) {
      // Turned back by the row's position.
      float2 const cs = __ldg(rope_at(op_, position_) + (channel - kNopeDim) / 2);
      float const pair = __shfl_xor_sync(~0u, value, 1);
      value = value * cs.x + (channel & 1 ? -pair : pair) * cs.y;
    }
    auto* const out =
        head_pointer(warp_, static_cast<__nv_bfloat16*>(op_.out_global), static_cast<__nv_bfloat16*>(op_.out_local));
    out[channel] = __float2bfloat16_rn(value);
  }
};

template <bool kPacked>
__global__ void __launch_bounds__(kThreads) few_rows_kernel(__grid_constant__ Launch const launch) {
  extern __shared__ __align__(16) uint8_t raw[];
  FewRows<kPacked>(launch.op, *reinterpret_cast<FewShared*>(raw),
                   unit_of(launch, static_cast<int>(blockIdx.x) / kSplit))
      .run();
}

template <bool kPacked>
Status start(Launch const& launch, cudaStream_t stream) {
  constexpr size_t kBytes = sizeof(FewShared);
  auto* const kernel = few_rows_kernel<kPacked>;
  REDKNOT_TRY(allow_clusters(kernel, kBytes));
  ClusterShape const shape{.cluster = kSplit,
                           .grid = static_cast<unsigned>(kSplit * (launch.full.units + launch.tail.units)),
                           .block = kThreads,
                           .shared = kBytes};
  return launch_clusters(kernel, shape, stream, launch);
}

}  // namespace

Status attend_few_rows(Launch const& launch, bool packed, cudaStream_t stream) {
  return packed ? start<true>(launch, stream) : start<false>(launch, stream);
}

}  // namespace redknot::attention
