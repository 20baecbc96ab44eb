#pragma once

// Element types that params structs name, and the geometry of packed rows (trt_redknot/ops/reference/packing.py).

#include <cstdint>

#include "common/layout.h"

namespace redknot {

// kPacked: rows of codes, scales and padding in one byte string.
enum class Dtype : int32_t { kFloat32 = 0, kBFloat16 = 1, kPacked = 2 };

inline constexpr int kHeadDim = 512;
inline constexpr int kRopeDim = 64;
inline constexpr int kNopeDim = kHeadDim - kRopeDim;
inline constexpr int kLatentScales = kNopeDim / kLatentBlock;
inline constexpr int kLatentScaleOffset = kNopeDim + 2 * kRopeDim;
inline constexpr int kPackedLatentBytes = packed_latent_bytes(kHeadDim, kRopeDim);
inline constexpr int kPackedLatentPitch = packed_latent_pitch(kHeadDim, kRopeDim);  // in a pool
static_assert(kLatentScaleOffset + kLatentScales <= kPackedLatentBytes && kPackedLatentBytes % 8 == 0);

}  // namespace redknot
