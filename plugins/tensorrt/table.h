#pragma once

// The attention table of trt_redknot/ops/tables.py as inputs of plugins.

#include <vector>

#include "common/segments.h"
#include "operator.h"
#include "refusal.h"
#include "rows.h"

namespace redknot::trt {

// S segments and R rows.
inline std::vector<TensorSpec> table_inputs() {
  return {tensor("segments", kInt64, {size_of('S'), fixed(segment::kColumnCount)}),
          tensor("row_segments", kInt64, {size_of('R'), fixed(2)}), tensor("positions", kInt64, {size_of('R')}),
          tensor("visible", kInt64, {size_of('R')})};
}

inline void check_table(Bindings const& sizes) {
  if (sizes['R'] > INT32_MAX || sizes['S'] > INT32_MAX) {
    throw Refusal("expected rows and segments below 2^31");
  }
}

// Points `params` at the table, whose first tensor is input `first`.
template <typename Params>
void read_table(Params& params, Call const& call, size_t first) {
  params.segments = call.input<int64_t>(first);
  params.row_segments = call.input<int64_t>(first + 1);
  params.positions = call.input<int64_t>(first + 2);
  params.visible = call.input<int64_t>(first + 3);
}

}  // namespace redknot::trt
