#pragma once

// What the threads of a block share that works on 64 heads of a row.

#include <cuda_bf16.h>

#include "common/ptx.cuh"
#include "common/wgmma.cuh"
#include "kernels/attention/keys.cuh"
#include "kernels/attention/shared.cuh"

namespace redknot::attention::wide {

inline constexpr int kHeads = 64;  // of a block: the M dimension of all products
inline constexpr int kKeys = 64;   // of a tile
inline constexpr int kGroupThreads = 128;
// q, keys and outputs lie as bf16 in parts of 64 channels, each 64 swizzled rows of 128 bytes.
inline constexpr int kPartChannels = 64;
inline constexpr int kPartBytes = 64 * 128;
inline constexpr int kParts = kHeadDim / kPartChannels;
inline constexpr int kHalfParts = kParts / 2;  // whose output a warpgroup sums
inline constexpr int kHalfChannels = kHeadDim / 2;
inline constexpr int kStages = 2;
inline constexpr int kProducerWarps = 8;
inline constexpr int kProducers = 32 * kProducerWarps;  // threads
inline constexpr int kWarpKeys = kKeys / kProducerWarps;
inline constexpr int kWarpHeads = kHeads / 4;  // of a warp of either group
inline constexpr int kThreads = 2 * kGroupThreads + kProducers;

enum Meeting : int { kProducersMeet = 1 };

struct Shared {
  alignas(1024) uint8_t query[kParts * kPartBytes];
  alignas(1024) uint8_t keys[kStages][kParts * kPartBytes];
  alignas(1024) uint8_t probabilities[2][kPartBytes];  // [head][key]
  alignas(1024) uint8_t output[8][kWarpHeads * 128];   // of a warp: its heads, 64 channels at a time
  alignas(8) uint64_t full[kStages];                   // keys are there
  uint64_t empty[kStages];                             // and are needed no more
  uint64_t queried;                                    // q is there, not turned yet
  uint64_t turned;                                     // and is turned
  uint64_t answered;                                   // and is needed no more
  uint64_t scored[2];                                  // probabilities and factors are there
  uint64_t summed[2];                                  // and are needed no more
  float factor[2][kHeads];                             // what the sums so far are multiplied by
  int32_t shrinks[2][4];                               // whether a factor of a warp's heads is not 1
  alignas(8) uint8_t absent[kStages][kProducerWarps];  // bit i: key i of a producer's 8 does not exist
  int32_t last[kStages];                               // the unit's last tile
  Tiles tiles;                                         // of the producers' unit
  KeyTable<1, 32> table;
};

// The heads of a unit in q or in the output.
template <typename P>
struct Rows {
  P* global;
  P* local;
  int globals;  // heads before the first Local one

  __device__ __forceinline__ Rows(SegLatentAttentionParams const& op, Unit const& unit, P* all_global, P* all_local)
      : global(all_global + (int64_t{unit.row} * op.global_heads + unit.head) * kHeadDim),
        local(all_local + (int64_t{unit.row} * op.local_heads + unit.head - op.global_heads) * kHeadDim),
        globals(op.global_heads - unit.head) {}
  __device__ __forceinline__ P* at(int head) const { return (head < globals ? global : local) + head * kHeadDim; }
};

// A walk over two buffers.
struct Turn {
  int index = 0;
  int parity = 0;
  __device__ __forceinline__ void step() {
    parity ^= index;
    index ^= 1;
  }
};

__device__ __forceinline__ void wait(uint64_t const& barrier, int parity) {
  ptx::barrier_wait(ptx::shared_address(&barrier), parity);
}
__device__ __forceinline__ void arrive(uint64_t const& barrier) { ptx::barrier_arrive(ptx::shared_address(&barrier)); }

}  // namespace redknot::attention::wide
