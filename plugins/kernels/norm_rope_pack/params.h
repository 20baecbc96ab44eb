#pragma once

#include <cstdint>

namespace redknot {

// How rows of a cache are stored.
enum class RowFormat : int32_t {
  kBFloat16 = 0,
  kPackedLatent = 1,  // e4m3 nope, bf16 rope, ue8m0 scales; rows of a pool are packed_latent_pitch bytes apart
  kPackedRow = 2,     // e4m3, fp32 scales
};

// RMS norm of vectors, rotation of their last channels, storage. All pointers 16-byte aligned, widths in multiples
// of 8.
struct NormRopePackParams {
  void const* x;  // bf16 [rows, heads, width]
  int64_t rows;
  int32_t heads;
  int32_t width;
  void const* norm;  // [width], fp32 or bf16; null: norm without weight
  bool norm_is_float;
  float const* rope;  // cos, sin: fp32 [rope_positions, rope_dim / 2, 2]; null: no rotation
  int64_t rope_positions;
  int32_t rope_dim;
  int64_t const* positions;  // [rows]; one outside [0, rope_positions) turns the row's rope channels to NaN
  int64_t const*
      out_rows;  // [rows], row of `out` each row is written to; null: its own. Others than [0, pool_rows) are dropped
  int64_t pool_rows;
  void* out;         // [pool_rows, heads, width] bf16, or bytes [pool_rows, packed row]
  RowFormat format;  // packed formats: heads == 1
  float eps;
};

}  // namespace redknot
