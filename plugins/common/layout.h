#pragma once

// Sizes of packed rows (trt_redknot/ops/reference/packing.py), for hosts and devices.

#include <cstdint>

#ifdef __CUDACC__
#define REDKNOT_HOST_DEVICE __host__ __device__
#else
#define REDKNOT_HOST_DEVICE
#endif

namespace redknot {

REDKNOT_HOST_DEVICE constexpr int64_t ceil_to(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

inline constexpr int kLatentBlock = 64;  // nope channels of a latent that share a ue8m0 scale
inline constexpr int kRowBlock = 128;    // channels of a plain row that share an fp32 scale

// Bytes of a latent row: nope codes, rope as bf16, the scales, padding to 8 bytes.
REDKNOT_HOST_DEVICE constexpr int64_t packed_latent_bytes(int64_t width, int64_t rope_dim) {
  return ceil_to(width + rope_dim + (width - rope_dim + kLatentBlock - 1) / kLatentBlock, 8);
}

// Bytes from one latent row of a pool to the next: rows begin where pairs of memory sectors do, and are copied 16 bytes
// at a time.
REDKNOT_HOST_DEVICE constexpr int64_t packed_latent_pitch(int64_t width, int64_t rope_dim) {
  return ceil_to(packed_latent_bytes(width, rope_dim), 64);
}

// Bytes of a plain row: codes, padding to 4 bytes, the scales.
REDKNOT_HOST_DEVICE constexpr int64_t packed_row_bytes(int64_t width) {
  return ceil_to(width, 4) + 4 * ((width + kRowBlock - 1) / kRowBlock);
}

}  // namespace redknot
