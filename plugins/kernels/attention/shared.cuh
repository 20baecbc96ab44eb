#pragma once

// What the threads of a block share.

#include <cuda_bf16.h>

#include "common/ptx.cuh"
#include "common/wgmma.cuh"
#include "kernels/attention/keys.cuh"

namespace redknot::attention {

inline constexpr float kNone = -INFINITY;
// log2(e) / sqrt(512): probabilities are powers of two of scores times this.
inline constexpr float kScoreScale = ptx::kLog2E * 0.04419417382415922f;
inline constexpr int kBlockChannels = 64;
inline constexpr int kBlocks = kHeadDim / kBlockChannels;
inline constexpr int kTileKeys = 64;
// Latents lie in shared memory as lines of 128 bytes, swizzled.
inline constexpr int kLineBytes = 128;
inline constexpr int kLineStride = kTileKeys * kLineBytes;
// The largest scale becomes 2^kScaleHeadroom in fp16: 448 * 2^(4 + 3) < 65504.
inline constexpr int kScaleHeadroom = 4;
// Scales this much above the reference are still taken as they are.
inline constexpr int kScaleSlack = 3;
// Scores (log2) this much above the base of the probabilities do not change it; packed pools: 2^(4 + 3 + 8) < 65504.
inline constexpr int kPeakSlack = 8;

// Barriers of the block besides that of all threads: those of the first team, the next teams' follow.
enum Barrier : int { kLoadersMeet = 1, kWorkersMeet = 3 };

template <int kColumns_, bool kPacked_>
struct Traits {
  static constexpr int kColumns = kColumns_;
  static constexpr bool kPacked = kPacked_;
  static constexpr int kGroups = kColumns > 16 ? 2 : 1;  // warpgroups of a team
  static constexpr int kWorkers = 128 * kGroups;         // threads of a team that multiply
  // Teams of a block, by what shared memory and registers hold, and whole tiles that a team has room for. Few teams
  // hide little of what each waits for: they bring a tile while they multiply another, by more warps.
  static constexpr int kTeams = kColumns > 16 ? 1 : kColumns == 8 && kPacked ? 4 : 2;
  static constexpr int kStages = kTeams == 1 || (kTeams == 2 && kPacked) ? 2 : 1;
  static constexpr int kLoaders = kTeams == 4 ? 1 : 4;  // warps of a team that bring keys
  static constexpr int kLoaderThreads = 32 * kTeams * kLoaders;
  static_assert(kLoaderThreads % 128 == 0, "warpgroups, which give up registers together");
  static constexpr int kThreads = kTeams * kWorkers + kLoaderThreads;
  // Registers of a thread at the start; loaders give up what workers take.
  static constexpr int kRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kLoaderRegisters = kTeams == 4 ? 64 : 72;
  static constexpr int kWorkerRegisters =
      kRegisters + (kRegisters - kLoaderRegisters) * kLoaderThreads / (kTeams * kWorkers) / 8 * 8;
  static constexpr int kTiles = kColumns / 8;         // of columns
  static constexpr int kOwnTiles = kTiles / kGroups;  // whose scores a warpgroup computes
  static constexpr int kOwn = kBlocks / kGroups;      // channel blocks whose output a warpgroup computes
  static constexpr int kRowBytes = kPacked ? kPackedLatentPitch : 2 * kHeadDim;
  static constexpr int kHalfLines = kPacked ? 2 : 4;     // of a key in half a stage; packed keys have half a line more
  static constexpr int kQueryLines = 8;                  // of a column
  static constexpr int kCopies = kPacked ? kBlocks : 1;  // of the probabilities: fp16 times the scales; bf16 last
  static constexpr int kUnitRows = kColumns < kMaxUnitRows ? kColumns : kMaxUnitRows;
  static constexpr int kSegments = 32;
};

// Of a tile: the first one of rows that are not the whole unit; the last one of the unit.
enum TileState : uint32_t { kOtherRows = 1, kLastTile = 2 };
// Of the keys that a loader brought: some row may not see some of them; some have another frame than the request's.
enum KeyFlag : uint32_t { kMasked = 1, kFramed = 2 };
// Whether one of the four loaders' flags, a byte each, is set.
__device__ __forceinline__ bool any_of(uint32_t flags, KeyFlag flag) { return (flags & flag * 0x01010101u) != 0; }

// What the loaders say of a tile.
template <typename T>
struct Header {
  alignas(16) int32_t largest[4];  // biased exponent among the block scales of each loader's keys
  alignas(16) uint8_t flags[4];    // of KeyFlag, of each loader's keys
  uint32_t state;                  // of TileState
  Source source;
  int32_t begin;  // rows of the unit that read these keys
  int32_t end;
  int32_t x[kTileKeys];
  int32_t frame[kTileKeys];
  uint2 scales[T::kPacked ? kTileKeys : 1];  // biased exponents of the blocks
  static_assert(T::kLoaders <= 4);
};

// Where a byte of a key lies in half a stage.
__device__ __forceinline__ uint32_t key_place(int key, int byte) {
  return byte / kLineBytes * kLineStride + wgmma::swizzled(key, byte % kLineBytes / 16) + byte % 16;
}

// What the threads of a team share: workers, which take one unit after the other, and their loaders.
template <typename T>
struct Team {
  // q of the unit's columns; then their outputs, [column][channel], which leave in whole lines.
  alignas(1024) uint8_t query[T::kQueryLines * T::kColumns * kLineBytes];
  alignas(1024) uint8_t probabilities[T::kCopies][T::kColumns * 128];  // [column][64 keys]
  // Half of the channels of a tile's keys each: the first lines of all keys, then the second ones.
  alignas(1024) uint8_t halves[T::kStages][2][T::kHalfLines * kLineStride];
  Header<T> headers[2];  // of even and odd tiles
  alignas(8) uint64_t full[T::kStages][2];
  uint64_t empty[T::kStages][2];
  uint64_t drained;            // the probabilities have been multiplied
  float peak[4][T::kColumns];  // of each warp's keys
  float factor[T::kColumns];
  float sink[T::kColumns];                              // log2 units
  float query_scale[T::kColumns];                       // what the codes of q are multiplied by
  int32_t column_row[T::kColumns];                      // row of the unit, -1: none
  int32_t position[T::kColumns], visible[T::kColumns];  // of the columns of the current rows; least: none
  int32_t row_position[T::kUnitRows], row_visible[T::kUnitRows];
  // Of the loaders.
  Tiles tiles;
  KeyTable<T::kUnitRows, T::kSegments> table;
};

template <typename T>
struct Shared {
  Team<T> teams[T::kTeams];
  // The last 64 bytes of packed keys: half a line a key. Two stages share the lines, or two teams.
  alignas(1024) uint8_t tails[T::kPacked ? (T::kTeams * T::kStages + 1) / 2 : 1][T::kPacked ? kLineStride : 16];

  __device__ __forceinline__ uint32_t tails_of(int team) const {
    return ptx::shared_address(tails[team * T::kStages / 2]);
  }
};
// The first chunk of 16 bytes of the tails of a team and stage in their lines.
template <typename T>
__device__ __forceinline__ int tail_chunk(int team, int stage) {
  return 4 * ((team * T::kStages + stage) % 2);
}

// Where a walk over the stages is.
template <int kStages>
struct Cursor {
  int stage = 0;
  int parity = 0;
  __device__ __forceinline__ void step() {
    if (kStages == 1 || ++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Of a head, Global ones first; in log2 units.
__device__ __forceinline__ float sink_of(SegLatentAttentionParams const& op, int head) {
  return ptx::kLog2E * __ldg(head < op.global_heads ? op.sinks_global + head : op.sinks_local + head - op.global_heads);
}

// Channels of a column, which belongs to a row of the unit, in q or in the output.
template <typename P>
__device__ __forceinline__ P* column_pointer(SegLatentAttentionParams const& op, Unit const& unit, int row, int column,
                                             P* global, P* local) {
  int const head = unit.head + column - row * unit.heads;
  int64_t const at = int64_t{unit.row} + row;
  return head < op.global_heads ? global + (at * op.global_heads + head) * kHeadDim
                                : local + (at * op.local_heads + head - op.global_heads) * kHeadDim;
}

__device__ __forceinline__ float2 const* rope_at(SegLatentAttentionParams const& op, int position) {
  return reinterpret_cast<float2 const*>(op.rope) +
         max(int64_t{0}, min(int64_t{position}, op.rope_positions - 1)) * (kRopeDim / 2);
}

}  // namespace redknot::attention
