#pragma once

// Rotation of bf16 channels by the angles of a rope table.

#include "common/ptx.cuh"

namespace redknot {

// A pair of channels.
__device__ __forceinline__ uint32_t turned(float2 pair, float cosine, float sine) {
  return ptx::pack_bf16(pair.x * cosine - pair.y * sine, pair.y * cosine + pair.x * sine);
}

// Eight channels by the cosines and sines of their pairs, which `factor` multiplies.
__device__ __forceinline__ uint4 turned(uint4 chunk, float4 const (&angles)[2], float factor) {
  uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 const pair = ptx::unpack_bf16(words[i]);
    float4 const two = angles[i / 2];
    float const cosine = (i % 2 ? two.z : two.x) * factor, sine = (i % 2 ? two.w : two.y) * factor;
    words[i] = turned(pair, cosine, sine);
  }
  return {words[0], words[1], words[2], words[3]};
}

}  // namespace redknot
