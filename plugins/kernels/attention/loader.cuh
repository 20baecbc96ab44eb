#pragma once

// Fills the stages of a block with keys.

#include "common/ptx.cuh"
#include "kernels/attention/shared.cuh"

namespace redknot::attention {

// A warp that fills its part of every stage. Lanes look for keys; 16 lanes copy one.
template <typename T>
class Loader {
 public:
  __device__ Loader(SegLatentAttentionParams const& op, Shared<T>& shared, Unit const& unit)
      : op_(op),
        shared_(shared),
        keys_(op, shared.table, T::kRowBytes),
        unit_(unit),
        warp_((threadIdx.x - T::kWorkers) / 32),
        lane_(threadIdx.x % 32) {}

  // Finds which rows from `begin` on form a group and how many tiles they need, and tells the workers.
  __device__ __forceinline__ void enter(int begin) {
    if (warp_ == 0) find(begin);
    ptx::sync_threads(kLoadersMeet, 32 * T::kLoaders);
    ptx::arrive_threads(kGroupKnown, T::kThreads);
  }

  __device__ __forceinline__ void fill() {
    window_tiles_ = shared_.tiles.windows;
    int const tiles = shared_.tiles.all;
    int selected = announce(0);
    for (int tile = 0; tile < tiles; ++tile) {
      Key const key = resolve(tile, selected);
      selected = announce(tile + 1);
      uint2 const scales =
          T::kPacked ? __ldg(reinterpret_cast<uint2 const*>(key.latent + kLatentScaleOffset)) : uint2{};
      int const largest = T::kPacked ? largest_scale(scales) : 0;
      bool const turned = __any_sync(~0u, key.frame != 0), absent = __any_sync(~0u, key.x == kNoKey);
      Stage<T>& stage = shared_.stages[cursor_.stage];
      uint32_t const full = ptx::shared_address(shared_.full[cursor_.stage]);
      uint32_t const empty = ptx::shared_address(shared_.empty[cursor_.stage]);
      uint32_t const rows = ptx::shared_address(stage.rows);
      int const slot = place();
      Group const& group = shared_.table.group;
      bool const whole = group.begin == 0 && group.end == unit_.rows;
      bool const seen = tile >= window_tiles_ && whole &&
                        (op_.selected != nullptr || (tile + 1 - window_tiles_) * kTileKeys <= group.least_visible);
      ptx::barrier_wait(empty, cursor_.parity ^ 1);
      stage.frame[slot] = key.frame;
      stage.x[slot] = key.x;
      if constexpr (T::kPacked) stage.scales[slot] = scales;
      if (lane_ == 0) {
        stage.source = tile < window_tiles_      ? Source::kWindow
                       : op_.selected != nullptr ? Source::kSelected
                                                 : Source::kEntries;
        stage.largest[warp_] = largest;
        stage.masked[warp_] = absent || !seen;
      }
      copy<0, kHalf>(key.latent, rows);
      ptx::barrier_arrive_after_copies(full);
      ptx::barrier_arrive(full);
      ptx::barrier_wait(empty + sizeof(uint64_t), cursor_.parity ^ 1);
      copy<kHalf, kEnd>(key.latent, rows);
      ptx::barrier_arrive_after_copies(full + sizeof(uint64_t));
      if (turned) turn(stage);
      ptx::barrier_arrive(full + sizeof(uint64_t));
      cursor_.step();
    }
  }

 private:
  static constexpr int kOwnKeys = kTileKeys / T::kLoaders;  // lanes past them look for the same keys again
  static_assert(kOwnKeys == 16);
  static constexpr int kHalf = T::kPacked ? kHeadDim / 2 : kHeadDim;  // bytes of the first half of the channels
  static constexpr int kEnd = T::kPacked ? kLatentScaleOffset : 2 * kHeadDim;  // of all channels

  SegLatentAttentionParams const& op_;
  Shared<T>& shared_;
  Keys<KeyTable<T::kUnitRows, T::kSegments>> keys_;
  Unit const unit_;
  int const warp_, lane_;
  int window_tiles_ = 0;
  Cursor<T::kStages> cursor_;

  // Place in the tile's sequence of keys of this lane's key.
  __device__ __forceinline__ int place() const { return warp_ * kOwnKeys + lane_ % kOwnKeys; }

  __device__ __forceinline__ void find(int begin) {
    int const row = min(lane_, unit_.rows - 1);
    keys_.enter(begin, unit_.rows, shared_.row_position[row], shared_.row_visible[row], shared_.row_first[row],
                shared_.row_last[row], lane_);
    if (lane_ == 0) shared_.tiles = keys_.tiles(kTileKeys);
  }

  // The selected entry that `resolve` will need.
  __device__ __forceinline__ int announce(int tile) const {
    return keys_.announce(unit_.row, (tile - window_tiles_) * kTileKeys + place());
  }

  __device__ __forceinline__ Key resolve(int tile, int selected) const {
    int const number = (tile - window_tiles_) * kTileKeys + place();
    return tile < window_tiles_ ? keys_.in_window(tile * kTileKeys + place()) : keys_.entry(number, selected);
  }

  static __device__ __forceinline__ int largest_scale(uint2 scales) {
    int most = 0;
#pragma unroll
    for (int block = 0; block < kBlocks - 1; ++block) {
      uint32_t const word = block < 4 ? scales.x : scales.y;
      most = max(most, static_cast<int>(word >> (8 * (block & 3)) & 0xff));
    }
    return __reduce_max_sync(~0u, most);
  }

  // Turns the rope channels of this warp's keys by their frames, once they are there; four lanes a key.
  __device__ __forceinline__ void turn(Stage<T>& stage) const {
    constexpr int kRopeBytes = T::kPacked ? kHeadDim - kRopeDim : 2 * (kHeadDim - kRopeDim);  // before the channels
    float const inverse = 1.0f / __ldg(op_.rope);  // a constant factor of the table must not count twice
    ptx::copy_commit();
    ptx::copy_wait<0>();
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < kOwnKeys; i += 8) {
      int const key = warp_ * kOwnKeys + i + lane_ / 4, frame = stage.frame[key];
      if (frame == 0) continue;
      auto const* angles = reinterpret_cast<float4 const*>(rope_at(op_, frame)) + lane_ % 4 * 4;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        auto* const at = reinterpret_cast<uint4*>(stage.rows + key_place(key, kRopeBytes + (lane_ % 4 * 2 + j) * 16));
        uint4 const words = *at;
        uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
        float4 const two[2] = {__ldg(angles + 2 * j), __ldg(angles + 2 * j + 1)};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          float2 const x = ptx::unpack_bf16(pairs[k]);
          float const c = (k % 2 ? two[k / 2].z : two[k / 2].x) * inverse;
          float const s = (k % 2 ? two[k / 2].w : two[k / 2].y) * inverse;
          pairs[k] = ptx::pack_bf16(x.x * c - x.y * s, x.y * c + x.x * s);
        }
        *at = {pairs[0], pairs[1], pairs[2], pairs[3]};
      }
    }
  }

  // Bytes [kFrom, kTo) of this warp's keys, half a warp a key.
  template <int kFrom, int kTo>
  __device__ __forceinline__ void copy(uint8_t const* latent, uint32_t rows) const {
    static_assert(kFrom % kLineBytes == 0);
    constexpr int kBytes = T::kPacked ? 8 : 16;  // of one copy
    auto const address = reinterpret_cast<uint64_t>(latent);
    int const own = lane_ % 16 * kBytes;
#pragma unroll 4
    for (int first = 0; first < kOwnKeys; first += 2) {
      int const key = first + lane_ / 16;
      auto const* const from = reinterpret_cast<uint8_t const*>(__shfl_sync(~0u, address, key)) + kFrom + own;
      uint32_t const to = rows + kFrom / kLineBytes * kLineStride + key_place(warp_ * kOwnKeys + key, own);
#pragma unroll
      for (int byte = 0; byte < kTo - kFrom; byte += 16 * kBytes) {
        if (kFrom + byte + 16 * kBytes > kTo && kFrom + byte + own >= kTo) continue;
        if constexpr (T::kPacked) {
          ptx::copy_async_8(to + byte / kLineBytes * kLineStride, from + byte);
        } else {
          ptx::copy_async_16(to + byte / kLineBytes * kLineStride, from + byte);
        }
      }
    }
  }
};

}  // namespace redknot::attention
