#include "bindings.h"
#include "kernels/indexer/lightning_indexer.h"

namespace redknot::torch_ops {
namespace {

void index(Tensor selected, Tensor workspace, Tensor q, Tensor weights, Tensor keys, Tensor segments,
           Tensor row_segments, Tensor positions, Tensor visible, Tensor rope, bool fp8) {
  expect(q, "q", ScalarType::BFloat16, {kAny, kIndexHeads, kIndexDim});
  int64_t const rows = q.size(0);
  expect(weights, "weights", ScalarType::BFloat16, {rows, kIndexHeads});
  bool const packed = keys.scalar_type() == ScalarType::Byte;
  if (packed) {
    expect(keys, "keys", ScalarType::Byte, {kAny, kPackedIndexBytes});
  } else {
    expect(keys, "keys", ScalarType::BFloat16, {kAny, kIndexDim});
  }
  STD_TORCH_CHECK(fp8 || !packed, "keys: packed keys are scored in fp8 only");
  expect(segments, "segments", ScalarType::Long, {kAny, 5});
  expect(row_segments, "row_segments", ScalarType::Long, {rows, 2});
  expect(positions, "positions", ScalarType::Long, {rows});
  expect(visible, "visible", ScalarType::Long, {rows});
  expect(rope, "rope", ScalarType::Float, {kAny, kRopeDim / 2, 2});
  expect(selected, "selected", ScalarType::Long, {rows, kAny});
  expect(workspace, "workspace", ScalarType::Byte, {kAny});

  LightningIndexerParams params{};
  params.q = pointer<void>(q);
  params.weights = pointer<void>(weights);
  params.keys = pointer<void>(keys);
  params.segments = pointer<int64_t>(segments);
  params.row_segments = pointer<int64_t>(row_segments);
  params.positions = pointer<int64_t>(positions);
  params.visible = pointer<int64_t>(visible);
  params.rope = pointer<float>(rope);
  params.selected = pointer<int64_t>(selected);
  params.workspace = pointer<void>(workspace);
  params.workspace_bytes = workspace.numel();
  params.entries = keys.size(0);
  params.rope_positions = rope.size(0);
  params.rows = narrow(rows, "rows");
  params.segment_count = narrow(segments.size(0), "segments");
  params.top_k = narrow(selected.size(1), "selected entries");
  params.keys_dtype = packed ? Dtype::kPacked : Dtype::kBFloat16;
  params.fp8 = fp8;
  StreamGuard const guard(q);
  require(lightning_indexer(params, guard.stream()), "lightning_indexer");
}

int64_t workspace_bytes(int64_t entries, int64_t rows) { return lightning_indexer_workspace(entries, rows); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(redknot, m) {
  m.def(
      "lightning_indexer(Tensor(a!) selected, Tensor(b!) workspace, Tensor q, Tensor weights, Tensor keys, Tensor "
      "segments, "
      "Tensor row_segments, Tensor positions, Tensor visible, Tensor rope, bool fp8) -> ()");
  m.def("lightning_indexer_workspace(int entries, int rows) -> int");
}
STABLE_TORCH_LIBRARY_IMPL(redknot, CUDA, m) { m.impl("lightning_indexer", TORCH_BOX(&index)); }
STABLE_TORCH_LIBRARY_IMPL(redknot, CompositeExplicitAutograd, m) {
  m.impl("lightning_indexer_workspace", TORCH_BOX(&workspace_bytes));
}

}  // namespace redknot::torch_ops
