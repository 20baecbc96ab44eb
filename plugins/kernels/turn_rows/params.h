#pragma once

#include <cstdint>

namespace redknot {

// Turns the last 64 channels of rows by the angles of positions, in place: from a document's frame to the request's.
struct TurnRowsParams {
  void* rows;             // bf16 [count, width], 16-byte aligned
  int64_t const* frames;  // [count]; rows at 0 and outside of the table stay as they are
  float const* rope;      // [positions, 32, 2] cos, sin; a constant factor of the table does not count
  int64_t count;
  int64_t positions;
  int32_t width;  // a multiple of 8, at least 64
};

}  // namespace redknot
