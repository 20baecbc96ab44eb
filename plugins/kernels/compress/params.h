#pragma once

#include "kernels/norm_rope_pack/params.h"

namespace redknot {

// Gated pooling of raw rows into entries, then norm, rotation and storage. Pointers 16-byte aligned, width a multiple
// of 8.
struct CompressParams {
  void const* kv;    // bf16 [raw_rows, series * width]
  void const* gate;  // bf16 [raw_rows, series * width]
  int64_t raw_rows;
  int32_t series;  // 1, or 2 for windows that overlap by one
  int32_t width;
  void const* ape;  // [slots / series, series * width], fp32 or bf16
  bool ape_is_float;
  void const* norm;  // [width], fp32 or bf16
  bool norm_is_float;
  float const* rope;  // cos, sin: fp32 [rope_positions, rope_dim / 2, 2]
  int64_t rope_positions;
  int32_t rope_dim;
  int64_t const*
      slots;  // [entries, slots_an_entry], raw row; -1: none. Another row outside the raw ones turns the entry NaN
  int64_t entries;
  int32_t slots_an_entry;    // series * compression ratio
  int64_t const* positions;  // [entries]
  int64_t const* out_rows;   // [entries], row of `out` each entry is written to; null: its own. Others than [0,
                             // pool_rows) are dropped
  int64_t pool_rows;
  void* out;  // bf16 [pool_rows, width], or bytes [pool_rows, packed row]
  RowFormat format;
  float eps;
};

}  // namespace redknot
