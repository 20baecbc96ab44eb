#pragma once

// Packed latents of the released heads (448 coded channels, 64 rotated ones): a warp takes row after row, so that norm
// weights are unpacked once and the next row is on its way while this one is finished. Bit for bit what finish_row
// stores.

#include "common/device.h"
#include "common/dtype.h"
#include "kernels/norm_rope_pack/row.cuh"

namespace redknot {

inline constexpr int kLatentWarps = 8;
inline constexpr int kLatentBlocks = 4 * kHopperProcessors;        // what the chip holds at once
inline constexpr int kHalfRow = kWarp * kVector;                   // channels of one access of a warp
inline constexpr int kRopeLane = (kNopeDim - kHalfRow) / kVector;  // first lane whose second vector is rotated
static_assert(kHeadDim == 2 * kHalfRow && kNopeDim > kHalfRow);

// What is read of a row before its turn.
struct LatentRow {
  uint4 raw[2];
  int64_t position;
  int64_t target;

  __device__ __forceinline__ void load(NormRopePackParams const& params, int64_t row, int lane) {
    if (row >= params.rows) return;
    auto const* source = static_cast<__nv_bfloat16 const*>(params.x) + row * kHeadDim + lane * kVector;
    raw[0] = load_once(source);
    raw[1] = load_once(source + kHalfRow);
    position = __ldg(params.positions + row);
    target = params.out_rows == nullptr ? row : __ldg(params.out_rows + row);
  }
};

// Largest magnitude of eight bf16 channels, as bf16 bits: at least 0x7f80 where one of them is not finite.
__device__ __forceinline__ uint32_t magnitude(uint4 raw) {
  constexpr uint32_t kMagnitude = 0x7fff7fffU;
  uint32_t const most =
      __vmaxu2(__vmaxu2(raw.x & kMagnitude, raw.y & kMagnitude), __vmaxu2(raw.z & kMagnitude, raw.w & kMagnitude));
  return max(most & 0xffffU, most >> 16);
}

__device__ __forceinline__ uint4 normed(uint4 raw, float const (&weights)[kVector], float inverse) {
  float values[kVector];
  unpack_bf16(raw, values);
#pragma unroll
  for (int slot = 0; slot < kVector; ++slot) values[slot] = weights[slot] * (values[slot] * inverse);
  return pack_bf16(values);
}

// Stores the finished row; `peaks`: magnitudes of both vectors, the second in the upper half and 0 in rotated lanes.
__device__ __forceinline__ void store_latent(uint8_t* out, int lane, uint4 (&raw)[2], uint32_t peaks) {
#pragma unroll
  for (int offset = 4; offset > 0; offset /= 2) {
    peaks = __vmaxu2(peaks, __shfl_xor_sync(kAllLanes, peaks, offset));
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    bool const coded = half == 0 || lane < kRopeLane;
    int const exponent = scale_exponent(__uint_as_float(half == 0 ? peaks << 16 : peaks & 0xffff0000U));
    if (coded) {
      float values[kVector];
      unpack_bf16(raw[half], values);
      *reinterpret_cast<uint2*>(out + half * kHalfRow + lane * kVector) = encode_e4m3(values, exponent, true);
    } else {
      auto* const target = reinterpret_cast<uint2*>(out + kNopeDim + (lane - kRopeLane) * kVector * 2);
      target[0] = {raw[half].x, raw[half].y};
      target[1] = {raw[half].z, raw[half].w};
    }
    // The first rotated lane stores the padding between the last scale and a multiple of eight bytes.
    int const scale = half * (kHalfRow / kLatentBlock) + lane / 8;
    if (lane % 8 == 0) out[kLatentScaleOffset + scale] = coded ? static_cast<uint8_t>(exponent + 127) : 0;
  }
  constexpr int kRest = (kPackedLatentPitch - kPackedLatentBytes) / sizeof(uint2);
  if (lane < kRest) reinterpret_cast<uint2*>(out + kPackedLatentBytes)[lane] = {};
}
static_assert(kPackedLatentBytes == kLatentScaleOffset + kLatentScales + 1);
static_assert(kPackedLatentPitch - kPackedLatentBytes <= kWarp * 8 && kPackedLatentPitch % 8 == 0);

__global__ void __launch_bounds__(kLatentWarps* kWarp, 4)
    latents_kernel(NormRopePackParams const params, RowFinish const finish) {
  int const lane = static_cast<int>(threadIdx.x) % kWarp;
  int64_t row = static_cast<int64_t>(blockIdx.x) * kLatentWarps + threadIdx.x / kWarp;
  int64_t const step = static_cast<int64_t>(gridDim.x) * kLatentWarps;
  float weights[2][kVector];
  load_weights(params.norm, params.norm_is_float, lane * kVector, weights[0]);
  load_weights(params.norm, params.norm_is_float, kHalfRow + lane * kVector, weights[1]);
  LatentRow next;
  next.load(params, row, lane);
  for (; row < params.rows; row += step) {
    LatentRow now = next;
    next.load(params, row + step, lane);
    float squares = 0.0F;
#pragma unroll
    for (uint4 const raw : now.raw) {
      float values[kVector];
      unpack_bf16(raw, values);
#pragma unroll
      for (float const value : values) squares += value * value;
    }
    float const inverse = rsqrtf(lane_sum<kWarp>(squares) * finish.inverse_width + finish.eps);
#pragma unroll
    for (int half = 0; half < 2; ++half) now.raw[half] = normed(now.raw[half], weights[half], inverse);
    bool const rotated = lane >= kRopeLane;
    if (rotated) {
      float values[kVector];
      unpack_bf16(now.raw[1], values);
      rotate_vector(params.rope, params.rope_positions, kRopeDim, now.position, (lane - kRopeLane) * kVector, values);
      now.raw[1] = pack_bf16(values);
    }
    if (now.target < 0 || now.target >= params.pool_rows) continue;
    uint8_t* const out = static_cast<uint8_t*>(params.out) + now.target * kPackedLatentPitch;
    uint32_t const first = magnitude(now.raw[0]);
    uint32_t const second = rotated ? 0 : magnitude(now.raw[1]);
    if (__all_sync(kAllLanes, first < 0x7f80U && second < 0x7f80U)) {
      store_latent(out, lane, now.raw, first | second << 16);
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float values[kVector];
        unpack_bf16(now.raw[half], values);
        store_packed(finish, out, half * kHalfRow + lane * kVector, true, values);
      }
    }
  }
}

}  // namespace redknot
