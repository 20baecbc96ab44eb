#include "common/dtype.h"
#include "elementwise.h"
#include "kernels/turn_rows/launch.h"

namespace redknot::torch_ops {
namespace {

void turn(Tensor rows, Tensor frames, Tensor rope) {
  expect(rows, "rows", ScalarType::BFloat16, {kAny, kAny});
  expect(frames, "frames", ScalarType::Long, {rows.size(0)});
  expect(rope, "rope", ScalarType::Float, {kAny, kRopeDim / 2, 2});
  TurnRowsParams params{};
  params.rows = pointer<void>(rows);
  params.frames = pointer<int64_t>(frames);
  params.rope = pointer<float>(rope);
  params.count = rows.size(0);
  params.positions = rope.size(0);
  params.width = narrow(rows.size(1), "channels");
  if (rows.numel() == 0) return;
  StreamGuard const guard(rows);
  require(turn_rows(params, guard.stream()), "turn_rows");
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(redknot, m) { m.def("turn_rows(Tensor(a!) rows, Tensor frames, Tensor rope) -> ()"); }
STABLE_TORCH_LIBRARY_IMPL(redknot, CUDA, m) { m.impl("turn_rows", TORCH_BOX(&turn)); }

}  // namespace redknot::torch_ops
