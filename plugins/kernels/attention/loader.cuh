#pragma once

// Brings the keys of a team's units, one unit after the other, as far ahead of the workers as there is room.

#include "common/ptx.cuh"
#include "kernels/attention/shared.cuh"

namespace redknot::attention {

// A warp that brings its part of every tile. Lanes look for keys; eight lanes copy a line of one.
template <typename T>
class Loader {
 public:
  __device__ Loader(SegLatentAttentionParams const& op, Shared<T>& shared, int team, int warp)
      : op_(op),
        shared_(shared.teams[team]),
        team_(team),
        tails_(shared.tails_of(team)),
        keys_(op, shared_.table, T::kRowBytes),
        warp_(warp),
        lane_(ptx::found_anew(threadIdx.x % 32)) {}

  __device__ __forceinline__ void serve(Unit const& unit) {
    unit_ = unit;
    announce_queries();
    for (int begin = 0; begin < unit.rows; begin = shared_.table.group.end) {
      meet();  // no warp reads the table of the rows before
      if (warp_ == 0) find(begin);
      meet();
      fill();
    }
  }

 private:
  static constexpr int kOwnKeys = kTileKeys / T::kLoaders;
  static constexpr int kLaneKeys = (kOwnKeys + 31) / 32;    // that a lane looks for, 32 apart; lanes may share one
  static constexpr int kHalf = T::kHalfLines * kLineBytes;  // bytes of half of the channels, without the tail
  static constexpr int kTail = T::kPacked ? kLatentScaleOffset - 2 * kHalf : 0;
  static constexpr int kLanes = kLineBytes / 16, kAtOnce = 32 / kLanes;  // lanes of a line, and keys at once
  static constexpr int kRounds = kOwnKeys / kLaneKeys / kAtOnce;

  // This lane's keys of a tile.
  struct Found {
    int row[kLaneKeys], frame[kLaneKeys], x[kLaneKeys];
    uint2 scales[kLaneKeys];
    bool absent;  // some lane's key does not exist
    bool framed;  // some lane's key has another frame than the request's
  };

  SegLatentAttentionParams const& op_;
  Team<T>& shared_;
  int const team_;
  uint32_t const tails_;
  Keys<KeyTable<T::kUnitRows, T::kSegments>> keys_;
  Unit unit_{};
  int const warp_, lane_;
  int window_tiles_ = 0;
  int odd_ = 0;  // whether the tile is
  Cursor<T::kStages> cursor_;

  __device__ __forceinline__ void meet() const {
    if constexpr (T::kLoaders == 1) {
      __syncwarp();
    } else {
      ptx::sync_threads(kLoadersMeet + team_, 32 * T::kLoaders);
    }
  }
  // Place in the tile's sequence of keys of one of this lane's keys.
  __device__ __forceinline__ int place(int index) const {
    return kLaneKeys == 1 ? warp_ * kOwnKeys + lane_ % kOwnKeys : 32 * index + lane_;
  }
  __device__ __forceinline__ void await_room(int half) const {
    ptx::barrier_wait(ptx::shared_address(&shared_.empty[cursor_.stage][half]), cursor_.parity ^ 1);
  }
  // This thread's part of a half is on its way, or done where nothing is copied.
  __device__ __forceinline__ void arrive(int half) const {
    uint32_t const full = ptx::shared_address(&shared_.full[cursor_.stage][half]);
    ptx::barrier_arrive_after_copies(full);
    ptx::barrier_arrive(full);
  }

  // The workers will soon ask for q of the unit.
  __device__ __forceinline__ void announce_queries() const {
    constexpr int kLines = 2 * kHeadDim / kLineBytes;
    for (int line = 32 * warp_ + lane_; line < unit_.rows * unit_.heads * kLines; line += 32 * T::kLoaders) {
      int const column = line / kLines;
      auto const* q =
          column_pointer(op_, unit_, column / unit_.heads, column, static_cast<__nv_bfloat16 const*>(op_.q_global),
                         static_cast<__nv_bfloat16 const*>(op_.q_local));
      ptx::prefetch(q + line % kLines * (kLineBytes / 2));
    }
  }

  // Which rows from `begin` on form a group, and how many tiles they need.
  __device__ __forceinline__ void find(int begin) {
    int64_t const row = int64_t{unit_.row} + min(lane_, unit_.rows - 1);
    keys_.enter(begin, unit_.rows, narrow(__ldg(op_.positions + row)), narrow(__ldg(op_.visible + row)),
                segment_bound(op_, row, 0), segment_bound(op_, row, 1), lane_);
    if (lane_ == 0) shared_.tiles = keys_.tiles(kTileKeys);
  }

  __device__ __forceinline__ void fill() {
    window_tiles_ = shared_.tiles.windows;
    int const tiles = max(shared_.tiles.all, 1);  // rows without keys have a tile without keys
    int selected[kLaneKeys];
    announce(0, selected);
    Found found = look(0, selected);
    announce(1, selected);
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      await_room(0);
      copy<0>(tile, found);
      describe(tile, tiles, found);
      arrive(0);
      await_room(1);
      copy<1>(tile, found);
      arrive(1);
      cursor_.step();
      odd_ ^= 1;
      if (tile + 1 < tiles) {  // its loads are on their way until there is room
        found = look(tile + 1, selected);
        announce(tile + 2, selected);
      }
    }
  }

  // What the workers must know of a tile.
  __device__ __forceinline__ void describe(int tile, int tiles, Found const& found) const {
    Group const& group = shared_.table.group;
    Header<T>& header = shared_.headers[odd_];
    bool const whole = group.begin == 0 && group.end >= unit_.rows;
    // Whether every row sees every key that there is.
    bool const seen =
        whole && (tile < window_tiles_
                      ? unit_.rows == 1
                      : op_.selected != nullptr || (tile + 1 - window_tiles_) * kTileKeys <= group.least_visible);
    uint32_t most = 0;  // a pair
#pragma unroll
    for (int i = 0; i < kLaneKeys; ++i) {
      header.x[place(i)] = found.x[i];
      header.frame[place(i)] = found.frame[i];
      if constexpr (T::kPacked) {
        header.scales[place(i)] = found.scales[i];
        most = __vmaxu2(most, largest(found.scales[i]));
      }
    }
    if constexpr (T::kPacked) most = __reduce_max_sync(~0u, max(most & 0xffff, most >> 16));
    if (lane_ != 0) return;
    header.largest[warp_] = static_cast<int32_t>(most);
    header.flags[warp_] = static_cast<uint8_t>((found.absent || !seen ? kMasked : 0) | (found.framed ? kFramed : 0));
    if (warp_ != 0) return;
#pragma unroll
    for (int other = T::kLoaders; other < 4; ++other) {
      header.flags[other] = 0;
      header.largest[other] = 0;
    }
    header.source = tile < window_tiles_      ? Source::kWindow
                    : op_.selected != nullptr ? Source::kSelected
                                              : Source::kEntries;
    header.begin = group.begin;
    header.end = group.end;
    header.state =
        (tile == 0 && !whole ? kOtherRows : 0) | (tile == tiles - 1 && group.end >= unit_.rows ? kLastTile : 0);
  }

  __device__ __forceinline__ uint8_t const* pool_of(int tile) const {
    return static_cast<uint8_t const*>(tile < window_tiles_ ? op_.latents : op_.entries);
  }

  // The selected entries that `look` will need.
  __device__ __forceinline__ void announce(int tile, int (&selected)[kLaneKeys]) const {
#pragma unroll
    for (int i = 0; i < kLaneKeys; ++i) {
      selected[i] = keys_.announce(unit_.row, (tile - window_tiles_) * kTileKeys + place(i));
    }
  }

  __device__ __forceinline__ Found look(int tile, int const (&selected)[kLaneKeys]) const {
    Found found;
    bool const window = tile < window_tiles_, empty = shared_.tiles.all == 0;
#pragma unroll
    for (int i = 0; i < kLaneKeys; ++i) {
      Key const key = empty    ? keys_.none()
                      : window ? keys_.in_window(tile * kTileKeys + place(i))
                               : keys_.entry((tile - window_tiles_) * kTileKeys + place(i), selected[i]);
      found.row[i] = key.row;
      found.frame[i] = key.frame;
      found.x[i] = key.x;
      found.scales[i] = {};
      if (T::kPacked && key.row >= 0) {
        auto const* const latent = pool_of(tile) + int64_t{key.row} * T::kRowBytes;
        found.scales[i] = __ldg(reinterpret_cast<uint2 const*>(latent + kLatentScaleOffset));
      }
    }
    bool absent = false, framed = false;
#pragma unroll
    for (int i = 0; i < kLaneKeys; ++i) {
      absent |= found.row[i] < 0;
      framed |= found.frame[i] != 0;
    }
    found.absent = __any_sync(~0u, absent);
    found.framed = __any_sync(~0u, framed);
    return found;
  }

  // The largest of the first, third, ... and of the second, fourth, ... of a key's scales.
  static __device__ __forceinline__ uint32_t largest(uint2 scales) {
    constexpr uint32_t kPair = 0x00ff00ff;
    static_assert(kBlocks - 1 == 7);
    uint32_t const last = scales.y & 0x00ffffff;
    return __vmaxu2(__vmaxu2(scales.x & kPair, scales.x >> 8 & kPair), __vmaxu2(last & kPair, last >> 8 & kPair));
  }

  // Half `kWhich` of the channels of this warp's keys; zeros in place of a key that there is not.
  template <int kWhich>
  __device__ __forceinline__ void copy(int tile, Found const& found) const {
    if (found.absent) {
      copy<kWhich, false>(tile, found);
    } else {
      copy<kWhich, true>(tile, found);
    }
  }
  template <int kWhich, bool kAll>
  __device__ __forceinline__ void copy(int tile, Found const& found) const {
    int const lane = ptx::found_anew(lane_), own = lane % kLanes * 16, key = warp_ * kOwnKeys + lane / kLanes;
    auto const pool = ptx::found_anew(reinterpret_cast<uint64_t>(pool_of(tile)) + own);
    uint32_t const half = ptx::shared_address(shared_.halves[cursor_.stage][kWhich]) + key_place(key, own);
    uint32_t const tail = tails_ + wgmma::swizzled(key, tail_chunk<T>(team_, cursor_.stage) + lane % kLanes);
#pragma unroll
    for (int i = 0; i < kLaneKeys; ++i) {
#pragma unroll
      for (int round = 0; round < kRounds; ++round) {
        int const first = round * kAtOnce;
        int const row = __shfl_sync(~0u, found.row[i], first + lane / kLanes);
        int const bytes = kAll || row >= 0 ? 16 : 0;
        auto const* const latent =
            reinterpret_cast<uint8_t const*>(pool + static_cast<uint64_t>(kAll ? row : max(row, 0)) * T::kRowBytes);
        auto const place = [&](uint32_t of_first) {
          return (of_first ^ (first % 8 << 4)) + (32 * i + first) * kLineBytes;
        };
#pragma unroll
        for (int byte = 0; byte < kHalf; byte += kLineBytes) {
          uint32_t const to = place(half) + byte / kLineBytes * kLineStride;
          if constexpr (kAll) {
            ptx::copy_async_16(to, latent + kWhich * kHalf + byte);
          } else {
            ptx::copy_async_16(to, latent + kWhich * kHalf + byte, bytes);
          }
        }
        if (kWhich == 1 && own < kTail) ptx::copy_async_16(place(tail), latent + 2 * kHalf, bytes);
      }
    }
  }
};

}  // namespace redknot::attention
