#pragma once

// Packed FP8 rows: the device side of trt_redknot/ops/reference/packing.py, equal to it bit for bit.

#include <cuda_fp8.h>

#include "common/layout.h"
#include "common/vector.cuh"

namespace redknot {

// Largest finite magnitude of eight channels, and whether all of them are finite.
__device__ __forceinline__ float finite_peak(float const (&values)[kVector], bool& finite) {
  float peak = 0.0F;
  float probe = 0.0F;  // NaN once a channel is NaN or infinite
#pragma unroll
  for (float const value : values) {
    peak = fmaxf(peak, fabsf(value));
    probe = fmaf(value, 0.0F, probe);
  }
  finite = probe == 0.0F;
  if (finite) return peak;
  peak = 0.0F;
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

// Eight codes; channels that are not finite become the positive NaN.
__device__ __forceinline__ uint2 encode_e4m3(float const (&values)[kVector], int exponent, bool finite) {
  constexpr uint32_t kNan = 0x7fU;
  float const inverse = power_of_two(-exponent);
  uint32_t words[2] = {0, 0};
#pragma unroll
  for (int index = 0; index < kVector; index += 2) {
    float2 const pair{values[index] * inverse, values[index + 1] * inverse};
    words[index / 4] |= static_cast<uint32_t>(__nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3))
                        << (8 * (index % 4));
  }
  if (!finite) {
#pragma unroll
    for (int index = 0; index < kVector; ++index) {
      uint32_t const shift = 8 * (index % 4);
      if (!isfinite(values[index])) words[index / 4] = (words[index / 4] & ~(0xffU << shift)) | kNan << shift;
    }
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
