#pragma once

// Channels of a packed latent as bf16, each its code times its block's scale, rounded once.

#include "common/dtype.h"
#include "common/packing.cuh"

namespace redknot {

// Eight channels of a latent, `chunk` counting them.
__device__ __forceinline__ uint4 latent_chunk(uint8_t const* row, int chunk) {
  constexpr int kRopeChunk = kNopeDim / kVector;
  if (chunk >= kRopeChunk) {
    auto const* const rope = reinterpret_cast<uint2 const*>(row + kNopeDim + 16 * (chunk - kRopeChunk));
    uint2 const low = __ldg(rope), high = __ldg(rope + 1);
    return {low.x, low.y, high.x, high.y};
  }
  uint2 const codes = __ldg(reinterpret_cast<uint2 const*>(row) + chunk);
  uint32_t const exponent = __ldg(row + kLatentScaleOffset + chunk / (kLatentBlock / kVector));
  float values[kVector];
  // ue8m0 has no infinity: its last code is no number.
  decode_e4m3(codes, exponent == 0xffU ? __uint_as_float(0x7fc00000U) : __uint_as_float(exponent << 23), values);
  return pack_bf16(values);
}

}  // namespace redknot
