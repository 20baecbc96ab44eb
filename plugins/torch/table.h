#pragma once

// The attention table of trt_redknot/ops/tables.py and the rope table that its positions look into.

#include "bindings.h"
#include "common/segments.h"

namespace redknot::torch_ops {

// Checks the table of `rows` rows and points `params` at it.
template <typename Params>
void read_table(Params& params, int64_t rows, Tensor const& segments, Tensor const& row_segments,
                Tensor const& positions, Tensor const& visible, Tensor const& rope) {
  expect(segments, "segments", ScalarType::Long, {kAny, segment::kColumnCount});
  expect(row_segments, "row_segments", ScalarType::Long, {rows, 2});
  expect(positions, "positions", ScalarType::Long, {rows});
  expect(visible, "visible", ScalarType::Long, {rows});
  expect(rope, "rope", ScalarType::Float, {kAny, kRopeDim / 2, 2});
  params.segments = pointer<int64_t>(segments);
  params.row_segments = pointer<int64_t>(row_segments);
  params.positions = pointer<int64_t>(positions);
  params.visible = pointer<int64_t>(visible);
  params.rope = pointer<float>(rope);
  params.rope_positions = rope.size(0);
  params.rows = narrow(rows, "rows");
  params.segment_count = narrow(segments.size(0), "segments");
}

}  // namespace redknot::torch_ops
