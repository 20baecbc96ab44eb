#include "common/layout.h"
#include "elementwise.h"
#include "kernels/unpack/launch.h"

namespace redknot::torch_ops {
namespace {

void unpack_rows(Tensor out, Tensor packed, int64_t format) {
  expect(out, "out", ScalarType::BFloat16, {kAny, kAny});
  int64_t const rows = out.size(0), width = out.size(1);
  expect_stored(packed, format, width, kRopeDim);
  expect(packed, "packed", ScalarType::Byte, {rows, kAny});
  UnpackParams params{};
  params.packed = pointer<void>(packed);
  params.rows = rows;
  params.width = narrow(width, "channels");
  params.format = static_cast<RowFormat>(format);
  params.out = pointer<void>(out);
  if (out.numel() == 0) return;
  StreamGuard const guard(out);
  require(unpack(params, guard.stream()), "unpack");
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(redknot, m) { m.def("unpack(Tensor(a!) out, Tensor packed, int format) -> ()"); }
STABLE_TORCH_LIBRARY_IMPL(redknot, CUDA, m) { m.impl("unpack", TORCH_BOX(&unpack_rows)); }

}  // namespace redknot::torch_ops
