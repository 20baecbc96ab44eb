#pragma once

// Eight bf16 channels at a time, and sums over teams of threads.

#include <cuda_bf16.h>

#include <cstdint>

#include "common/ptx.cuh"

namespace redknot {

inline constexpr int kVector = 8;  // channels of one 16-byte access
inline constexpr int kWarp = 32;
inline constexpr unsigned kAllLanes = 0xffffffffU;

// Loads bypass L1 where every byte is read once.
__device__ __forceinline__ uint4 load_once(void const* address) {
  uint4 raw;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w)
               : "l"(address));
  return raw;
}

// One store of 16 bytes. The compiler may make four of an assignment, which then write parts of sectors.
__device__ __forceinline__ void store_vector(void* address, uint4 raw) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(raw.x), "r"(raw.y), "r"(raw.z), "r"(raw.w)
               : "memory");
}

// Stores leave the L2 cache first: what is written past its size goes to memory in a steady stream.
__device__ __forceinline__ void store_once(void* address, uint4 raw) { __stcs(static_cast<uint4*>(address), raw); }

__device__ __forceinline__ void unpack_bf16(uint4 raw, float (&values)[kVector]) {
  uint32_t const words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    float2 const pair = ptx::unpack_bf16(words[word]);
    values[2 * word] = pair.x, values[2 * word + 1] = pair.y;
  }
}

__device__ __forceinline__ uint4 pack_bf16(float const (&values)[kVector]) {
  return {ptx::pack_bf16(values[0], values[1]), ptx::pack_bf16(values[2], values[3]),
          ptx::pack_bf16(values[4], values[5]), ptx::pack_bf16(values[6], values[7])};
}

__device__ __forceinline__ float round_bf16(float value) { return __bfloat162float(__float2bfloat16_rn(value)); }

// Eight channels as bf16 would hold them.
__device__ __forceinline__ void round_bf16(float (&values)[kVector]) { unpack_bf16(pack_bf16(values), values); }

__device__ __forceinline__ void load_floats(float const* address, float (&values)[kVector]) {
  float4 const low = __ldg(reinterpret_cast<float4 const*>(address));
  float4 const high = __ldg(reinterpret_cast<float4 const*>(address) + 1);
  values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
  values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
}

// Eight weights at `channel` of a vector that is fp32 or bf16.
__device__ __forceinline__ void load_weights(void const* weights, bool is_float, int64_t channel,
                                             float (&values)[kVector]) {
  if (is_float) {
    load_floats(static_cast<float const*>(weights) + channel, values);
  } else {
    unpack_bf16(__ldg(reinterpret_cast<uint4 const*>(static_cast<__nv_bfloat16 const*>(weights) + channel)), values);
  }
}

template <int kLanes>
__device__ __forceinline__ float lane_sum(float value) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
}

template <int kLanes>
__device__ __forceinline__ float lane_max(float value) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2)
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, offset));
  return value;
}

// Sum over the whole block of kThreads threads, the same bits in every thread. `scratch` holds kThreads / 32 floats.
template <int kThreads>
__device__ __forceinline__ float block_sum(float value, float* scratch) {
  value = lane_sum<kWarp>(value);
  if constexpr (kThreads == kWarp) return value;
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = value;
  __syncthreads();
  float total = 0.0F;
#pragma unroll
  for (int warp = 0; warp < kThreads / kWarp; ++warp) total += scratch[warp];
  return total;
}

}  // namespace redknot
