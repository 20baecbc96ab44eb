#pragma once

// Index keys as the matrix units read them: 128 aligned codes a key and a scale beside them.

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "common/vector.cuh"
#include "kernels/indexer/lightning_indexer.h"

namespace redknot::indexer {

// The smallest power of two that brings `peak` to at most 448, and 1 for zero (packing.py).
__device__ __forceinline__ float block_scale(float peak) {
  if (!(peak > 0)) return 1;
  int const bits = __float_as_int(peak);
  int const exponent = max((bits >> 23 & 0xff) - 127 - 8 + ((bits & 0x7fffff) > 0x600000), -126);
  return __int_as_float((exponent + 127) << 23);
}

__device__ __forceinline__ uint32_t to_e4m3(float4 x) {
  __nv_fp8x4_e4m3 const codes(x);
  return codes.__x;
}

// One warp a key.
__global__ void __launch_bounds__(256)
    quantise_keys(__nv_bfloat16 const* keys, uint32_t* codes, float* scales, int64_t entries) {
  int64_t const key = int64_t{blockIdx.x} * 8 + threadIdx.x / 32;
  int const lane = threadIdx.x % 32;
  if (key >= entries) return;
  uint2 const four = reinterpret_cast<uint2 const*>(keys + key * kIndexDim)[lane];
  float2 const low = ptx::unpack_bf16(four.x), high = ptx::unpack_bf16(four.y);
  float const x[4] = {low.x, low.y, high.x, high.y};
  float peak = 0;
#pragma unroll
  for (float value : x) peak = fmaxf(peak, isfinite(value) ? fabsf(value) : 0.0f);
  peak = lane_max<kWarp>(peak);
  float const scale = block_scale(peak), inverse = 1 / scale;
  codes[key * 32 + lane] = to_e4m3({x[0] * inverse, x[1] * inverse, x[2] * inverse, x[3] * inverse});
  if (lane == 0) scales[key] = scale;
}

// Packed rows are not aligned for the copy into shared memory: codes and scales part here.
__global__ void __launch_bounds__(256)
    align_keys(uint32_t const* packed, uint32_t* codes, float* scales, int64_t entries) {
  constexpr int kWords = kPackedIndexBytes / 4;
  int64_t const key = int64_t{blockIdx.x} * 8 + threadIdx.x / 32;
  int const lane = threadIdx.x % 32;
  if (key >= entries) return;
  codes[key * 32 + lane] = packed[key * kWords + lane];
  if (lane == 0) scales[key] = __uint_as_float(packed[key * kWords + 32]);
}

}  // namespace redknot::indexer
