#pragma once

// The end of every cache row: norm, rotation and storage of one vector held by a team of threads.

#include "common/packing.cuh"
#include "kernels/norm_rope_pack/params.h"

namespace redknot {

// What a row is finished with. Vector v of team member t holds channels (v * team + t) * 8 ...
struct RowFinish {
  void const* norm;
  bool norm_is_float;
  float const* rope;
  int64_t rope_positions;
  int32_t rope_dim;
  int32_t width;
  RowFormat format;
  float eps;
};

// Rotates the pairs of eight channels that start at rope channel `channel`.
__device__ __forceinline__ void rotate_vector(float const* rope, int64_t rope_positions, int32_t rope_dim,
                                              int64_t position, int channel, float (&values)[kVector]) {
  float turn[kVector];
  if (position >= 0 && position < rope_positions) {
    load_floats(rope + position * rope_dim + channel, turn);
  } else {
#pragma unroll
    for (float& value : turn) value = __int_as_float(0x7fffffff);
  }
#pragma unroll
  for (int pair = 0; pair < kVector / 2; ++pair) {
    float const even = values[2 * pair];
    float const odd = values[2 * pair + 1];
    float const cosine = turn[2 * pair];
    float const sine = turn[2 * pair + 1];
    values[2 * pair] = even * cosine - odd * sine;
    values[2 * pair + 1] = odd * cosine + even * sine;
  }
}

// Stores eight channels of a packed row. Every lane of the warp takes part, `inside` or not: scales are shared by lanes.
__device__ __forceinline__ void store_packed(RowFinish const& finish, uint8_t* row, int channel, bool inside,
                                             float const (&values)[kVector]) {
  int const nope = finish.format == RowFormat::kPackedLatent ? finish.width - finish.rope_dim : finish.width;
  bool const coded = inside && channel < nope;
  bool finite = true;
  float const peak = coded ? finite_peak(values, finite) : 0.0F;
  if (finish.format == RowFormat::kPackedLatent) {
    int const exponent = scale_exponent(lane_max<8>(peak));
    uint8_t* const scales = row + nope + 2 * finish.rope_dim;
    if (coded) {
      *reinterpret_cast<uint2*>(row + channel) = encode_e4m3(values, exponent, finite);
      if (channel % 64 == 0) scales[channel / 64] = static_cast<uint8_t>(exponent + 127);
    } else if (inside) {
      uint4 const raw = pack_bf16(values);  // rows are 8-byte aligned, not 16
      uint2* const target = reinterpret_cast<uint2*>(row + nope + 2 * (channel - nope));
      target[0] = {raw.x, raw.y};
      target[1] = {raw.z, raw.w};
    }
    int const used = nope + 2 * finish.rope_dim + (nope + 63) / 64;
    int const padding = static_cast<int>(packed_latent_bytes(finish.width, finish.rope_dim)) - used;
    if (channel / kVector < padding) row[used + channel / kVector] = 0;
  } else {
    int const exponent = scale_exponent(lane_max<16>(peak));
    if (!coded) return;
    uint2 const codes = encode_e4m3(values, exponent, finite);
    uint32_t* const target = reinterpret_cast<uint32_t*>(row + channel);  // rows are 4-byte aligned
    target[0] = codes.x;
    target[1] = codes.y;
    if (channel % 128 == 0) reinterpret_cast<float*>(row + finish.width)[channel / 128] = power_of_two(exponent);
  }
}

// Finishes the vector in `values`; `out` null drops it. `scratch`: kTeam / 32 floats of shared memory.
template <int kTeam, int kVectors>
__device__ __forceinline__ void finish_row(RowFinish const& finish, int member, int64_t position, void* out,
                                           float (&values)[kVectors][kVector], float* scratch) {
  float squares = 0.0F;
#pragma unroll
  for (auto const& vector : values) {
#pragma unroll
    for (float const value : vector) squares += value * value;
  }
  float const mean = block_sum<kTeam>(squares, scratch) / static_cast<float>(finish.width);
  float const inverse = rsqrtf(mean + finish.eps);
#pragma unroll
  for (int index = 0; index < kVectors; ++index) {
    int const channel = (index * kTeam + member) * kVector;
    bool const inside = channel < finish.width;
    if (inside) {
      float weights[kVector] = {1, 1, 1, 1, 1, 1, 1, 1};
      if (finish.norm != nullptr) load_weights(finish.norm, finish.norm_is_float, channel, weights);
#pragma unroll
      for (int slot = 0; slot < kVector; ++slot) {
        values[index][slot] = weights[slot] * (values[index][slot] * inverse);
      }
      round_bf16(values[index]);
      int const first = finish.width - finish.rope_dim;
      if (finish.rope != nullptr && channel >= first) {
        rotate_vector(finish.rope, finish.rope_positions, finish.rope_dim, position, channel - first, values[index]);
        round_bf16(values[index]);
      }
    }
    if (out == nullptr) continue;
    if (finish.format == RowFormat::kBFloat16) {
      if (inside) *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(out) + channel) = pack_bf16(values[index]);
    } else {
      store_packed(finish, static_cast<uint8_t*>(out), channel, inside, values[index]);
    }
  }
}

__host__ __device__ inline int64_t row_bytes(RowFormat format, int64_t width, int64_t rope_dim) {
  switch (format) {
    case RowFormat::kBFloat16:
      return 2 * width;
    case RowFormat::kPackedLatent:
      return packed_latent_bytes(width, rope_dim);
    case RowFormat::kPackedRow:
      return packed_row_bytes(width);
  }
  return 0;
}

}  // namespace redknot
