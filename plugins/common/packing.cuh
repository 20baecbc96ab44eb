#pragma once

// Packed FP8 rows: the device side of trt_redknot/ops/reference/packing.py, equal to it bit for bit.

#include <cuda_fp8.h>

#include "common/layout.h"
#include "common/vector.cuh"

namespace redknot {

// Largest finite magnitude of eight channels.
__device__ __forceinline__ float finite_peak(float const (&values)[kVector]) {
  float peak = 0.0F;
#pragma unroll
  for (float const value : values) peak = isfinite(value) ? fmaxf(peak, fabsf(value)) : peak;
  return peak;
}

// Exponent of the least power of two that brings `peak` to at most 448 = 0.875 * 2^9; 0 for an all-zero block.
__device__ __forceinline__ int scale_exponent(float peak) {
  if (peak == 0.0F) return 0;
  uint32_t const bits = __float_as_uint(peak);
  int const exponent = static_cast<int>(bits >> 23) - 126 - 9 + ((bits & 0x7fffffU) > 0x600000U ? 1 : 0);
  return max(exponent, -126);
}

__device__ __forceinline__ float power_of_two(int exponent) {
  return __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23);
}

__device__ __forceinline__ uint32_t encode_e4m3(float value, float inverse_scale) {
  if (!isfinite(value)) return 0x7fU;
  return __nv_cvt_float_to_fp8(value * inverse_scale, __NV_SATFINITE, __NV_E4M3);
}

__device__ __forceinline__ uint2 encode_e4m3(float const (&values)[kVector], int exponent) {
  float const inverse = power_of_two(-exponent);
  uint32_t words[2] = {0, 0};
#pragma unroll
  for (int index = 0; index < kVector; ++index) {
    words[index / 4] |= encode_e4m3(values[index], inverse) << (8 * (index % 4));
  }
  return {words[0], words[1]};
}

__device__ __forceinline__ void decode_e4m3(uint2 codes, float scale, float (&values)[kVector]) {
  uint32_t const words[2] = {codes.x, codes.y};
#pragma unroll
  for (int pair = 0; pair < kVector / 2; ++pair) {
    auto const two = static_cast<__nv_fp8x2_storage_t>(words[pair / 2] >> (16 * (pair % 2)));
    __half2 const halves = __half2(__nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3));
    values[2 * pair] = __low2float(halves) * scale;
    values[2 * pair + 1] = __high2float(halves) * scale;
  }
}

}  // namespace redknot
