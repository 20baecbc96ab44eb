#include "bindings.h"
#include "kernels/moe/few_rows.h"

namespace redknot::torch_ops {
namespace {

void few_rows(Tensor out, Tensor inner, Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor down,
              std::optional<Tensor> gate_up_scale, std::optional<Tensor> down_scale, int64_t first, double limit) {
  expect(x, "x", ScalarType::BFloat16, {kAny, kAny});
  int64_t const rows = x.size(0), hidden = x.size(1);
  expect(ids, "ids", ScalarType::Long, {rows, kAny});
  int64_t const slots = ids.size(1);
  expect(weights, "weights", ScalarType::Float, {rows, slots});
  bool const fp8 = gate_up_scale.has_value();
  STD_TORCH_CHECK(fp8 == down_scale.has_value(), "gate_up_scale and down_scale: expected both or neither");
  ScalarType const stored = fp8 ? ScalarType::Float8_e4m3fn : ScalarType::BFloat16;
  expect(down, "down", stored, {kAny, hidden, kAny});
  int64_t const experts = down.size(0), width = down.size(2);
  expect(gate_up, "gate_up", stored, {experts, 2 * width, hidden});
  if (fp8) {
    // Scales of no block would be no scales, and codes then bf16 to the kernel.
    STD_TORCH_CHECK(hidden > 0 && width > 0 && hidden % kScaleBlock == 0 && width % kScaleBlock == 0,
                    "down: expected multiples of 128 channels with scales, found ", hidden, " and ", width);
    expect(*gate_up_scale, "gate_up_scale", ScalarType::Float,
           {experts, hidden / kScaleBlock, 2 * width / kScaleBlock});
    expect(*down_scale, "down_scale", ScalarType::Float, {experts, width / kScaleBlock, hidden / kScaleBlock});
  }
  expect(inner, "inner", ScalarType::BFloat16, {rows, slots, width});
  expect(out, "out", ScalarType::BFloat16, {rows, hidden});
  MoeFewRowsParams params{};
  params.x = pointer<void>(x);
  params.ids = pointer<int64_t>(ids);
  params.weights = pointer<float>(weights);
  params.gate_up = pointer<void>(gate_up);
  params.down = pointer<void>(down);
  params.gate_up_scale = pointer<float>(gate_up_scale);
  params.down_scale = pointer<float>(down_scale);
  params.first = first;
  params.rows = narrow(rows, "rows");
  params.top_k = narrow(slots, "slots");
  params.experts = narrow(experts, "experts");
  params.hidden = narrow(hidden, "channels");
  params.width = narrow(width, "channels of an expert");
  params.limit = static_cast<float>(limit);
  params.inner = pointer<void>(inner);
  params.out = pointer<void>(out);
  StreamGuard const guard(x);
  require(moe_few_rows(params, guard.stream()), "moe_few_rows");
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(redknot, m) {
  m.def(
      "moe_few_rows(Tensor(a!) out, Tensor(b!) inner, Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor "
      "down, Tensor? gate_up_scale, Tensor? down_scale, int first, float limit) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(redknot, CUDA, m) { m.impl("moe_few_rows", TORCH_BOX(&few_rows)); }

}  // namespace redknot::torch_ops
