#include "elementwise.h"
#include "kernels/moe/launch.h"

namespace redknot::torch_ops {
namespace {

Scoring expect_scoring(int64_t scoring) {
  STD_TORCH_CHECK(scoring >= 0 && scoring <= 2, "scoring: expected 0, 1 or 2, found ", scoring);
  return static_cast<Scoring>(scoring);
}

// Fills what both routers share from their logits and outputs.
template <typename Params>
Params router(Tensor const& ids, Tensor const& weights, Tensor const& logits, int64_t top_k, double scale,
              int64_t scoring) {
  Params params{};
  params.logits_are_float = expect_float(logits, "logits", {kAny, kAny});
  params.logits = pointer<void>(logits);
  params.rows = logits.size(0);
  params.experts = narrow(logits.size(1), "experts");
  expect(ids, "ids", ScalarType::Long, {params.rows, top_k});
  expect(weights, "weights", ScalarType::Float, {params.rows, top_k});
  params.top_k = narrow(top_k, "top_k");
  params.scale = static_cast<float>(scale);
  params.scoring = expect_scoring(scoring);
  params.ids = pointer<int64_t>(ids);
  params.weights = pointer<float>(weights);
  return params;
}

void route_learned(Tensor ids, Tensor weights, Tensor logits, Tensor bias, double scale, double tau, int64_t scoring) {
  auto params = router<RouteLearnedParams>(ids, weights, logits, ids.size(1), scale, scoring);
  expect(bias, "bias", ScalarType::Float, {logits.size(1)});
  params.bias = pointer<float>(bias);
  params.tau = static_cast<float>(tau);
  if (params.rows == 0) return;
  StreamGuard const guard(logits);
  require(moe_route_learned(params, guard.stream()), "moe_route_learned");
}

void route_hash(Tensor ids, Tensor weights, Tensor faults, Tensor logits, Tensor table, Tensor tokens, double scale,
                int64_t scoring) {
  expect(table, "table", ScalarType::Long, {kAny, kAny});
  auto params = router<RouteHashParams>(ids, weights, logits, table.size(1), scale, scoring);
  expect(tokens, "tokens", ScalarType::Long, {params.rows});
  expect(faults, "faults", ScalarType::Int, {1});
  params.table = pointer<int64_t>(table);
  params.vocab = table.size(0);
  params.tokens = pointer<int64_t>(tokens);
  params.faults = pointer<int32_t>(faults);
  StreamGuard const guard(logits);
  require(moe_route_hash(params, guard.stream()), "moe_route_hash");
}

void permute(Tensor permuted, Tensor inverse, Tensor ends, Tensor x, Tensor ids, int64_t first) {
  expect(x, "x", ScalarType::BFloat16, {kAny, kAny});
  expect(ids, "ids", ScalarType::Long, {x.size(0), kAny});
  expect(permuted, "permuted", ScalarType::BFloat16, {x.size(0) * ids.size(1), x.size(1)});
  expect(inverse, "inverse", ScalarType::Int, {x.size(0), ids.size(1)});
  expect(ends, "ends", ScalarType::Int, {kAny});
  MoePermuteParams params{};
  params.x = pointer<void>(x);
  params.ids = pointer<int64_t>(ids);
  params.rows = x.size(0);
  params.hidden = narrow(x.size(1), "channels");
  params.top_k = narrow(ids.size(1), "slots");
  params.first = narrow(first, "first expert");
  params.experts = narrow(ends.size(0), "experts");
  params.permuted = pointer<void>(permuted);
  params.inverse = pointer<int32_t>(inverse);
  params.ends = pointer<int32_t>(ends);
  StreamGuard const guard(x);
  size_t const bytes = moe_permute_workspace(params.rows, params.top_k, params.experts);
  Tensor const workspace = scratch(x, bytes);
  params.workspace = pointer<void>(workspace);
  params.workspace_bytes = bytes;
  require(moe_permute(params, guard.stream()), "moe_permute");
}

void activate(Tensor out, Tensor gate_up, Tensor ends, double limit) {
  expect(gate_up, "gate_up", ScalarType::BFloat16, {kAny, kAny});
  STD_TORCH_CHECK(gate_up.size(1) % 2 == 0, "gate_up: expected an even number of channels, found ", gate_up.size(1));
  expect(out, "out", ScalarType::BFloat16, {gate_up.size(0), gate_up.size(1) / 2});
  expect(ends, "ends", ScalarType::Int, {kAny});
  MoeActivationParams params{};
  params.gate_up = pointer<void>(gate_up);
  params.ends = pointer<int32_t>(ends);
  params.capacity = gate_up.size(0);
  params.experts = narrow(ends.size(0), "experts");
  params.width = narrow(gate_up.size(1) / 2, "channels");
  params.limit = static_cast<float>(limit);
  params.out = pointer<void>(out);
  StreamGuard const guard(gate_up);
  require(moe_activation(params, guard.stream()), "moe_activation");
}

void grouped_gemm(Tensor out, Tensor x, Tensor ends, Tensor weight, Tensor weight_scale) {
  expect(x, "x", ScalarType::BFloat16, {kAny, kAny});
  expect(ends, "ends", ScalarType::Int, {kAny});
  int64_t const experts = ends.size(0), depth = x.size(1);
  expect(weight, "weight", ScalarType::Float8_e4m3fn, {experts, kAny, depth});
  int64_t const width = weight.size(1);
  expect(weight_scale, "weight_scale", ScalarType::Float, {experts, depth / kScaleBlock, width / kScaleBlock});
  expect(out, "out", ScalarType::BFloat16, {x.size(0), width});
  MoeGroupedGemmParams params{};
  params.x = pointer<void>(x);
  params.ends = pointer<int32_t>(ends);
  params.weight = pointer<void>(weight);
  params.weight_scale = pointer<float>(weight_scale);
  params.capacity = x.size(0);
  params.experts = narrow(experts, "experts");
  params.depth = narrow(depth, "channels of x");
  params.width = narrow(width, "channels of out");
  params.out = pointer<void>(out);
  if (params.capacity == 0) return;
  StreamGuard const guard(x);
  size_t const bytes = moe_grouped_gemm_workspace(params.capacity, params.experts, params.depth, params.width);
  Tensor const workspace = scratch(x, bytes);
  params.workspace = pointer<void>(workspace);
  params.workspace_bytes = bytes;
  require(moe_grouped_gemm(params, guard.stream()), "moe_grouped_gemm");
}

void combine(Tensor out, Tensor y, Tensor inverse, Tensor weights) {
  expect(y, "y", ScalarType::BFloat16, {kAny, kAny});
  expect(inverse, "inverse", ScalarType::Int, {kAny, kAny});
  expect(weights, "weights", ScalarType::Float, {inverse.size(0), inverse.size(1)});
  expect(out, "out", ScalarType::BFloat16, {inverse.size(0), y.size(1)});
  MoeCombineParams params{};
  params.y = pointer<void>(y);
  params.inverse = pointer<int32_t>(inverse);
  params.weights = pointer<float>(weights);
  params.capacity = y.size(0);
  params.rows = inverse.size(0);
  params.hidden = narrow(y.size(1), "channels");
  params.top_k = narrow(inverse.size(1), "slots");
  params.out = pointer<void>(out);
  StreamGuard const guard(y);
  require(moe_combine(params, guard.stream()), "moe_combine");
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(redknot, m) {
  m.def(
      "moe_route_learned(Tensor(a!) ids, Tensor(b!) weights, Tensor logits, Tensor bias, float scale, float tau, "
      "int scoring) -> ()");
  m.def(
      "moe_route_hash(Tensor(a!) ids, Tensor(b!) weights, Tensor(c!) faults, Tensor logits, Tensor table, Tensor "
      "tokens, "
      "float scale, int scoring) -> ()");
  m.def("moe_permute(Tensor(a!) permuted, Tensor(b!) inverse, Tensor(c!) ends, Tensor x, Tensor ids, int first) -> ()");
  m.def("moe_activation(Tensor(a!) out, Tensor gate_up, Tensor ends, float limit) -> ()");
  m.def("moe_grouped_gemm(Tensor(a!) out, Tensor x, Tensor ends, Tensor weight, Tensor weight_scale) -> ()");
  m.def("moe_combine(Tensor(a!) out, Tensor y, Tensor inverse, Tensor weights) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(redknot, CUDA, m) {
  m.impl("moe_route_learned", TORCH_BOX(&route_learned));
  m.impl("moe_route_hash", TORCH_BOX(&route_hash));
  m.impl("moe_permute", TORCH_BOX(&permute));
  m.impl("moe_activation", TORCH_BOX(&activate));
  m.impl("moe_grouped_gemm", TORCH_BOX(&grouped_gemm));
  m.impl("moe_combine", TORCH_BOX(&combine));
}

}  // namespace redknot::torch_ops
