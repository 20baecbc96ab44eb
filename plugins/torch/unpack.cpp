#include "common/layout.h"
#include "elementwise.h"
#include "kernels/unpack/launch.h"

namespace redknot::torch_ops {
namespace {

void unpack_rows(Tensor out, Tensor packed, int64_t format) {
  expect(out, "out", ScalarType::BFloat16, {kAny, kAny});
  int64_t const rows = out.size(0), width = out.size(1);
  STD_TORCH_CHECK(format == 1 || format == 2, "format: expected 1 or 2, found ", format);
  bool const latent = static_cast<RowFormat>(format) == RowFormat::kPackedLatent;
  expect(packed, "packed", ScalarType::Byte,
         {rows, latent ? packed_latent_bytes(width, kRopeDim) : packed_row_bytes(width)});
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
