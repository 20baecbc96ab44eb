#pragma once

#include <cstdint>

#include "kernels/norm_rope_pack/params.h"

namespace redknot {

// Packed rows back to bf16: each channel is its code times its block's scale, rounded once.
struct UnpackParams {
  void const* packed;  // bytes [rows, packed row]; 8-byte aligned for latents, 4-byte aligned for plain rows
  int64_t rows;
  int32_t width;     // of the unpacked rows, a multiple of 8; latents: 512
  RowFormat format;  // kPackedLatent or kPackedRow
  void* out;         // bf16 [rows, width], 16-byte aligned
};

}  // namespace redknot
