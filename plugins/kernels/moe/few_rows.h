#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/export.h"
#include "common/status.h"
#include "kernels/moe/params.h"

namespace redknot {

// Experts of few rows, as in decoding: no sorting, every chosen expert's weight is read for its row. The same roundings
// as moe_permute, grouped products (with e4m3 weights: of rows quantised in blocks of 128 channels), moe_activation and
// moe_combine.
struct MoeFewRowsParams {
  void const* x;               // bf16 [rows, hidden]
  int64_t const* ids;          // [rows, top_k]; others than first .. first + experts - 1 add nothing
  float const* weights;        // [rows, top_k]
  void const* gate_up;         // bf16 or e4m3 [experts, 2 * width, hidden], gate first
  void const* down;            // the same [experts, hidden, width]
  float const* gate_up_scale;  // e4m3: [experts, hidden / 128, 2 * width / 128], of blocks of 128 x 128; null: bf16
  float const* down_scale;     // e4m3: [experts, width / 128, hidden / 128]
  int64_t first;
  int32_t rows;
  int32_t top_k;
  int32_t experts;
  int32_t hidden;  // a multiple of 8, with e4m3 of 128; at most 8192
  int32_t width;   // the same
  float limit;
  void* inner;  // bf16 [rows, top_k, width], scratch
  void* out;    // bf16 [rows, hidden]
};

REDKNOT_API Status moe_few_rows(MoeFewRowsParams const& params, cudaStream_t stream);

}  // namespace redknot
