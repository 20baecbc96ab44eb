#include "kernels/indexer/lightning_indexer.h"
#include "table.h"

namespace redknot::torch_ops {
namespace {

// Checks and points at what both ops read.
void score_inputs(IndexScoreParams& params, Tensor workspace, Tensor q, Tensor weights, Tensor keys, Tensor segments,
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
  read_table(params, rows, segments, row_segments, positions, visible, rope);
  expect(workspace, "workspace", ScalarType::Byte, {kAny});

  params.q = pointer<void>(q);
  params.weights = pointer<void>(weights);
  params.keys = pointer<void>(keys);
  params.workspace = pointer<void>(workspace);
  params.workspace_bytes = workspace.numel();
  params.entries = keys.size(0);
  params.keys_dtype = packed ? Dtype::kPacked : Dtype::kBFloat16;
  params.fp8 = fp8;
}

void index(Tensor selected, Tensor workspace, Tensor q, Tensor weights, Tensor keys, Tensor segments,
           Tensor row_segments, Tensor positions, Tensor visible, Tensor rope, bool fp8) {
  LightningIndexerParams params{};
  score_inputs(params, workspace, q, weights, keys, segments, row_segments, positions, visible, rope, fp8);
  expect(selected, "selected", ScalarType::Long, {q.size(0), kAny});
  params.selected = pointer<int64_t>(selected);
  params.top_k = narrow(selected.size(1), "selected entries");
  StreamGuard const guard(q);
  require(lightning_indexer(params, guard.stream()), "lightning_indexer");
}

void salience(Tensor total, Tensor seen, Tensor workspace, Tensor q, Tensor weights, Tensor keys, Tensor segments,
              Tensor row_segments, Tensor positions, Tensor visible, Tensor rope, bool fp8) {
  IndexSalienceParams params{};
  score_inputs(params, workspace, q, weights, keys, segments, row_segments, positions, visible, rope, fp8);
  expect(total, "total", ScalarType::Float, {kAny});
  expect(seen, "seen", ScalarType::Float, {total.size(0)});
  params.total = pointer<float>(total);
  params.seen = pointer<float>(seen);
  params.sequence_entries = total.size(0);
  StreamGuard const guard(q);
  require(index_salience(params, guard.stream()), "index_salience");
}

int64_t workspace_bytes(int64_t entries, int64_t rows) { return lightning_indexer_workspace(entries, rows); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(redknot, m) {
  m.def(
      "lightning_indexer(Tensor(a!) selected, Tensor(b!) workspace, Tensor q, Tensor weights, Tensor keys, Tensor "
      "segments, "
      "Tensor row_segments, Tensor positions, Tensor visible, Tensor rope, bool fp8) -> ()");
  m.def(
      "index_salience(Tensor(a!) total, Tensor(b!) seen, Tensor(c!) workspace, Tensor q, Tensor weights, Tensor keys, "
      "Tensor segments, Tensor row_segments, Tensor positions, Tensor visible, Tensor rope, bool fp8) -> ()");
  m.def("lightning_indexer_workspace(int entries, int rows) -> int");
}
STABLE_TORCH_LIBRARY_IMPL(redknot, CUDA, m) {
  m.impl("lightning_indexer", TORCH_BOX(&index));
  m.impl("index_salience", TORCH_BOX(&salience));
}
STABLE_TORCH_LIBRARY_IMPL(redknot, CompositeExplicitAutograd, m) {
  m.impl("lightning_indexer_workspace", TORCH_BOX(&workspace_bytes));
}

}  // namespace redknot::torch_ops
