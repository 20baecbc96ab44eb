#include "kernels/moe/launch.h"
#include "kinds.h"
#include "refusal.h"
#include "rows.h"

namespace redknot::trt {
namespace {

// What both routers share: logits [R, experts] first, expert ids [R, top_k] and weights [R, top_k] in the end.
template <typename Params>
class Router : public Operator {
 public:
  explicit Router(Attributes const& attributes)
      : experts_(attributes.integer("experts")),
        top_k_(attributes.integer("top_k")),
        scale_(attributes.real("scale")),
        scoring_(static_cast<Scoring>(attributes.integer("scoring"))) {
    contract_.inputs = {weight("logits", {size_of('R'), fixed(experts_)})};
    contract_.outputs = {tensor("ids", kInt64, {size_of('R'), fixed(top_k_)}),
                         tensor("weights", kFloat, {size_of('R'), fixed(top_k_)})};
  }

  Contract const& contract() const override { return contract_; }

 protected:
  Params params_of(Call const& call) const {
    Params params{};
    params.logits = call.inputs[0];
    params.logits_are_float = call.in[0].type == kFloat;
    params.rows = call.sizes['R'];
    params.experts = static_cast<int32_t>(experts_);
    params.top_k = static_cast<int32_t>(top_k_);
    params.scale = scale_;
    params.scoring = scoring_;
    params.ids = call.output<int64_t>(0);
    params.weights = call.output<float>(1);
    return params;
  }

  int64_t experts_;
  int64_t top_k_;
  float scale_;
  Scoring scoring_;
  Contract contract_;
};

std::span<FieldSpec const> router_fields() {
  static FieldSpec const fields[] = {integer_field("experts", 1, kMaxRoutedExperts),
                                     integer_field("top_k", 1, kMaxTopK), real_field("scale", 0, 1e6),
                                     integer_field("scoring", 0, 2, 0)};
  return fields;
}

// logits [R, experts], bias [experts], tau [1] -> expert ids [R, top_k], weights [R, top_k].
class RouteLearned final : public Router<RouteLearnedParams> {
 public:
  explicit RouteLearned(Attributes const& attributes) : Router(attributes) {
    if (top_k_ > experts_) {
      throw Refusal("field 'top_k': expected at most 'experts' " + std::to_string(experts_) + ", found " +
                    std::to_string(top_k_));
    }
    contract_.inputs.push_back(tensor("bias", kFloat, {fixed(experts_)}));
    contract_.inputs.push_back(tensor("tau", kFloat, {fixed(1)}));
  }

  Status launch(Call const& call) const override {
    RouteLearnedParams params = params_of(call);
    params.bias = call.input<float>(1);
    params.tau_cell = call.input<float>(2);
    return moe_route_learned(params, call.stream);
  }
};

// logits [R, experts], table [V, top_k], tokens [R] -> expert ids [R, top_k], weights [R, top_k], fault bits [1].
class RouteHash final : public Router<RouteHashParams> {
 public:
  explicit RouteHash(Attributes const& attributes) : Router(attributes) {
    contract_.inputs.push_back(tensor("table", kInt64, {size_of('V'), fixed(top_k_)}));
    contract_.inputs.push_back(tensor("tokens", kInt64, {size_of('R')}));
    contract_.outputs.push_back(tensor("faults", kInt32, {fixed(1)}));
  }

  Status launch(Call const& call) const override {
    RouteHashParams params = params_of(call);
    params.table = call.input<int64_t>(1);
    params.vocab = call.sizes['V'];
    params.tokens = call.input<int64_t>(2);
    params.faults = call.output<int32_t>(2);
    return moe_route_hash(params, call.stream);
  }
};

// x [R, hidden], ids [R, top_k] -> permuted [R * top_k, hidden], inverse, ends [experts].
class Permute final : public Operator {
 public:
  explicit Permute(Attributes const& attributes)
      : hidden_(attributes.integer("hidden")),
        top_k_(attributes.integer("top_k")),
        first_(attributes.integer("first")),
        experts_(attributes.integer("experts")) {
    require_vectors("hidden", hidden_);
    contract_.inputs = {tensor("x", kBFloat16, {size_of('R'), fixed(hidden_)}),
                        tensor("ids", kInt64, {size_of('R'), fixed(top_k_)})};
    contract_.outputs = {tensor("permuted", kBFloat16, {size_of('R', top_k_), fixed(hidden_)}),
                         tensor("inverse", kInt32, {size_of('R'), fixed(top_k_)}),
                         tensor("ends", kInt32, {fixed(experts_)})};
  }

  Contract const& contract() const override { return contract_; }

  size_t workspace(Bindings const& most) const override {
    return moe_permute_workspace(most['R'], static_cast<int32_t>(top_k_), static_cast<int32_t>(experts_));
  }

  Status launch(Call const& call) const override {
    MoePermuteParams params{};
    params.x = call.inputs[0];
    params.ids = call.input<int64_t>(1);
    params.rows = call.sizes['R'];
    params.hidden = static_cast<int32_t>(hidden_);
    params.top_k = static_cast<int32_t>(top_k_);
    params.first = static_cast<int32_t>(first_);
    params.experts = static_cast<int32_t>(experts_);
    params.permuted = call.outputs[0];
    params.inverse = call.output<int32_t>(1);
    params.ends = call.output<int32_t>(2);
    params.workspace = call.workspace;
    params.workspace_bytes = workspace(call.sizes);
    return moe_permute(params, call.stream);
  }

 private:
  int64_t hidden_;
  int64_t top_k_;
  int64_t first_;
  int64_t experts_;
  Contract contract_;
};

// gate_up [P, 2 * width], ends [experts] -> activated [P, width].
class Activation final : public Operator {
 public:
  explicit Activation(Attributes const& attributes)
      : width_(attributes.integer("width")), experts_(attributes.integer("experts")), limit_(attributes.real("limit")) {
    require_vectors("width", width_);
    contract_.inputs = {tensor("gate_up", kBFloat16, {size_of('P'), fixed(2 * width_)}),
                        tensor("ends", kInt32, {fixed(experts_)})};
    contract_.outputs = {tensor("activated", kBFloat16, {size_of('P'), fixed(width_)})};
  }

  Contract const& contract() const override { return contract_; }

  Status launch(Call const& call) const override {
    MoeActivationParams params{};
    params.gate_up = call.inputs[0];
    params.ends = call.input<int32_t>(1);
    params.capacity = call.sizes['P'];
    params.experts = static_cast<int32_t>(experts_);
    params.width = static_cast<int32_t>(width_);
    params.limit = limit_;
    params.out = call.outputs[0];
    return moe_activation(params, call.stream);
  }

 private:
  int64_t width_;
  int64_t experts_;
  float limit_;
  Contract contract_;
};

// y [P, hidden], inverse [R, top_k], weights [R, top_k] -> sum [R, hidden].
class Combine final : public Operator {
 public:
  explicit Combine(Attributes const& attributes)
      : hidden_(attributes.integer("hidden")), top_k_(attributes.integer("top_k")) {
    require_vectors("hidden", hidden_);
    contract_.inputs = {tensor("y", kBFloat16, {size_of('P'), fixed(hidden_)}),
                        tensor("inverse", kInt32, {size_of('R'), fixed(top_k_)}),
                        tensor("weights", kFloat, {size_of('R'), fixed(top_k_)})};
    contract_.outputs = {tensor("sum", kBFloat16, {size_of('R'), fixed(hidden_)})};
  }

  Contract const& contract() const override { return contract_; }

  Status launch(Call const& call) const override {
    MoeCombineParams params{};
    params.y = call.inputs[0];
    params.inverse = call.input<int32_t>(1);
    params.weights = call.input<float>(2);
    params.capacity = call.sizes['P'];
    params.rows = call.sizes['R'];
    params.hidden = static_cast<int32_t>(hidden_);
    params.top_k = static_cast<int32_t>(top_k_);
    params.out = call.outputs[0];
    return moe_combine(params, call.stream);
  }

 private:
  int64_t hidden_;
  int64_t top_k_;
  Contract contract_;
};

}  // namespace

OperatorKind const& moe_route_learned_kind() {
  static OperatorKind const kind{"MoeRouteLearned", router_fields(), make_operator<RouteLearned>};
  return kind;
}

OperatorKind const& moe_route_hash_kind() {
  static OperatorKind const kind{"MoeRouteHash", router_fields(), make_operator<RouteHash>};
  return kind;
}

OperatorKind const& moe_permute_kind() {
  static FieldSpec const fields[] = {integer_field("hidden", 8, 1 << 20), integer_field("top_k", 1, kMaxTopK),
                                     integer_field("first", 0, 1 << 20), integer_field("experts", 1, kMaxExperts)};
  static OperatorKind const kind{"MoePermute", fields, make_operator<Permute>};
  return kind;
}

OperatorKind const& moe_activation_kind() {
  static FieldSpec const fields[] = {integer_field("width", 8, 1 << 20), integer_field("experts", 1, kMaxExperts),
                                     real_field("limit", 1e-30, 1e30)};
  static OperatorKind const kind{"MoeActivation", fields, make_operator<Activation>};
  return kind;
}

OperatorKind const& moe_combine_kind() {
  static FieldSpec const fields[] = {integer_field("hidden", 8, 1 << 20), integer_field("top_k", 1, kMaxTopK)};
  static OperatorKind const kind{"MoeCombine", fields, make_operator<Combine>};
  return kind;
}

}  // namespace redknot::trt
