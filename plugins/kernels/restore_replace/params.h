#pragma once

#include <cstdint>

namespace redknot {

// Projected state = Global + online Local on the first `local_rows` rows, Global + restored Local on the others.
struct RestoreReplaceParams {
  void const* global;    // bf16 [rows, width]
  void const* local;     // bf16 [local_rows, width]
  void const* restored;  // bf16 [restored_rows, width] or packed rows, bytes [restored_rows, packed row]
  int64_t const*
      restored_index;  // [rows - local_rows], row of `restored`; null: in order. Out of range: the row turns NaN
  int64_t rows;
  int64_t local_rows;
  int64_t restored_rows;
  int32_t width;  // a multiple of 8
  bool packed;
  void* out;  // bf16 [rows, width]
};

}  // namespace redknot
