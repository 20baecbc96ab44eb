#pragma once

// What the threads of a block share.

#include <cuda_bf16.h>

#include "common/wgmma.cuh"
#include "kernels/attention/keys.cuh"

namespace redknot::attention {

inline constexpr float kNone = -INFINITY;
inline constexpr int kBlockChannels = 64;
inline constexpr int kBlocks = kHeadDim / kBlockChannels;
inline constexpr int kTileKeys = 64;
// Latents lie in shared memory as lines of 128 bytes: the first lines of all keys of the tile, then the second ones.
inline constexpr int kLineBytes = 128;
inline constexpr int kLineStride = kTileKeys * kLineBytes;
// The largest scale becomes 2^kScaleHeadroom in fp16: 448 * 2^(4 + 3) < 65504.
inline constexpr int kScaleHeadroom = 4;
// Scales this much above the reference are still taken as they are.
inline constexpr int kScaleSlack = 3;
// Scores (log2) this much above the base of the probabilities do not change it: 2^(4 + 3 + 8) < 65504.
inline constexpr int kPeakSlack = 8;

// Barriers of the block besides that of all threads.
enum Barrier : int { kWorkersMeet = 1, kLoadersMeet, kGroupKnown };

template <int kColumns_, bool kPacked_>
struct Traits {
  static constexpr int kColumns = kColumns_;
  static constexpr bool kPacked = kPacked_;
  static constexpr int kGroups = kColumns > 16 ? 2 : 1;  // warpgroups
  static constexpr int kWorkers = 128 * kGroups;         // threads
  static constexpr int kLoaders = 4;                     // warps that fill the stages
  static constexpr int kThreads = kWorkers + 32 * kLoaders;
  static constexpr int kBlocksPerSm = kColumns > 16 ? 1 : kColumns == 8 && kPacked ? 3 : 2;
  // Registers of a thread at the start; loaders give up what workers take.
  static constexpr int kRegisters = 65536 / (kThreads * kBlocksPerSm) / 8 * 8;
  static constexpr int kLoaderRegisters = kBlocksPerSm == 1 ? 72 : kBlocksPerSm == 2 ? 96 : 56;
  static constexpr int kWorkerRegisters =
      kRegisters + (kRegisters - kLoaderRegisters) * 32 * kLoaders / kWorkers / 8 * 8;
  static constexpr int kStages = kColumns > 16 ? 2 : 1;
  static constexpr int kTiles = kColumns / 8;         // of columns
  static constexpr int kOwnTiles = kTiles / kGroups;  // whose scores a warpgroup computes
  static constexpr int kOwn = kBlocks / kGroups;      // channel blocks whose output a warpgroup computes
  static constexpr int kRowBytes = kPacked ? kPackedLatentBytes : 2 * kHeadDim;
  static constexpr int kLines = kPacked ? 5 : 8;
  // Lines of q a column: codes as two terms of four lines each, then the rope channels; or all channels.
  static constexpr int kQueryLines = kPacked ? 9 : 8;
  static constexpr int kCopies = kPacked ? kBlocks : 1;  // of the probabilities: fp16 times the scales; bf16 last
  static constexpr int kUnitRows = kColumns < kMaxUnitRows ? kColumns : kMaxUnitRows;
  static constexpr int kSegments = 32;
};

template <typename T>
struct Stage {
  alignas(1024) uint8_t rows[T::kLines * kLineStride];
  uint2 scales[kTileKeys];  // of packed keys: biased exponents of the blocks
  int32_t frame[kTileKeys];
  int32_t x[kTileKeys];
  Source source;
  int32_t largest[T::kLoaders];  // biased exponent among the block scales of each loader's keys
  bool masked[T::kLoaders];      // whether some row may not see some key
};

// Where a byte of a key's latent lies in `rows`.
__device__ __forceinline__ uint32_t key_place(int key, int byte) {
  return byte / kLineBytes * kLineStride + wgmma::swizzled(key, byte % kLineBytes / 16) + byte % 16;
}

template <typename T>
struct Shared {
  alignas(1024) uint8_t query[T::kQueryLines * T::kColumns * kLineBytes];
  alignas(1024) uint8_t probabilities[T::kCopies][T::kColumns * 128];  // [column][64 keys]
  Stage<T> stages[T::kStages];
  alignas(8) uint64_t full[T::kStages][2];  // of the halves of the channels
  uint64_t empty[T::kStages][2];
  uint64_t drained;            // the probabilities have been multiplied
  float peak[4][T::kColumns];  // of each warp's keys
  float factor[T::kColumns];
  float sink[T::kColumns];                              // log2 units
  float query_scale[T::kColumns];                       // what the codes of q are multiplied by
  int32_t column_row[T::kColumns];                      // row of the unit, -1: none
  int32_t position[T::kColumns], visible[T::kColumns];  // of the columns of the current group; least: none
  int32_t row_position[T::kUnitRows], row_visible[T::kUnitRows], row_first[T::kUnitRows], row_last[T::kUnitRows];
  Tiles tiles;
  KeyTable<T::kUnitRows, T::kSegments> table;
};

// Where a walk over the stages is.
template <int kStages>
struct Cursor {
  int stage = 0;
  int parity = 0;
  __device__ __forceinline__ void step() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

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
