#pragma once

// The end of every cache row: norm, rotation and storage of one vector held by a team of threads.

#include "common/packing.cuh"
#include "kernels/norm_rope_pack/params.h"

namespace redknot {

// What rows are finished with; sizes are worked out once, by the host. Vector v of team member t holds channels
// (v * team + t) * 8 ...
struct RowFinish {
  void const* norm;
  bool norm_is_float;
  float const* rope;
  int64_t rope_positions;
  int32_t rope_dim;
  int32_t width;
  RowFormat format;
  float eps;
  float inverse_width;
  int32_t coded;    // channels stored as codes
  int32_t scales;   // byte of a packed latent row where its scales begin
  int32_t padding;  // bytes from the scales to the next row
  int64_t bytes;    // of one stored row
};

// `Params` names a cache row's width, norm, rotation and format.
template <typename Params>
RowFinish make_finish(Params const& params) {
  int32_t const width = params.width, rope_dim = params.rope_dim;
  RowFinish finish{.norm = params.norm,
                   .norm_is_float = params.norm_is_float,
                   .rope = params.rope,
                   .rope_positions = params.rope_positions,
                   .rope_dim = rope_dim,
                   .width = width,
                   .format = params.format,
                   .eps = params.eps,
                   .inverse_width = 1.0F / static_cast<float>(width),
                   .coded = width,
                   .scales = 0,
                   .padding = 0,
                   .bytes = 2L * width};
  if (params.format == RowFormat::kPackedLatent) {
    finish.coded = width - rope_dim;
    finish.scales = width + rope_dim;
    finish.bytes = packed_latent_pitch(width, rope_dim);
    finish.padding =
        static_cast<int32_t>(finish.bytes) - finish.scales - (finish.coded + kLatentBlock - 1) / kLatentBlock;
  } else if (params.format == RowFormat::kPackedRow) {
    finish.bytes = packed_row_bytes(width);
  }
  return finish;
}

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

// Stores eight channels of a packed row. Every lane of the warp takes part, `inside` or not: scales are shared by
// lanes.
__device__ __forceinline__ void store_packed(RowFinish const& finish, uint8_t* row, int channel, bool inside,
                                             float const (&values)[kVector]) {
  bool const coded = inside && channel < finish.coded;
  bool finite = true;
  float const peak = coded ? finite_peak(values, finite) : 0.0F;
  auto const block = static_cast<uint32_t>(channel);
  if (finish.format == RowFormat::kPackedLatent) {
    int const exponent = scale_exponent(lane_max<kLatentBlock / kVector>(peak));
    uint8_t* const scales = row + finish.scales;
    if (coded) {
      *reinterpret_cast<uint2*>(row + channel) = encode_e4m3(values, exponent, finite);
      if (block % kLatentBlock == 0) scales[block / kLatentBlock] = static_cast<uint8_t>(exponent + 127);
    } else if (inside) {
      uint4 const raw = pack_bf16(values);  // rows are 8-byte aligned, not 16
      uint2* const target = reinterpret_cast<uint2*>(row + 2 * channel - finish.coded);
      target[0] = {raw.x, raw.y};
      target[1] = {raw.z, raw.w};
    }
    for (int at = channel / kVector; inside && at < finish.padding; at += finish.width / kVector) {
      row[finish.bytes - 1 - at] = 0;
    }
  } else {
    int const exponent = scale_exponent(lane_max<kRowBlock / kVector>(peak));
    if (!coded) return;
    uint2 const codes = encode_e4m3(values, exponent, finite);
    uint32_t* const target = reinterpret_cast<uint32_t*>(row + channel);  // rows are 4-byte aligned
    target[0] = codes.x;
    target[1] = codes.y;
    if (block % kRowBlock == 0)
      reinterpret_cast<float*>(row + finish.width)[block / kRowBlock] = power_of_two(exponent);
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
  float const inverse = rsqrtf(block_sum<kTeam>(squares, scratch) * finish.inverse_width + finish.eps);
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
      if (inside) store_vector(static_cast<__nv_bfloat16*>(out) + channel, pack_bf16(values[index]));
    } else {
      store_packed(finish, static_cast<uint8_t*>(out), channel, inside, values[index]);
    }
  }
}

}  // namespace redknot
