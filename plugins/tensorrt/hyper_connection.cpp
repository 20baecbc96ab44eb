#include "kernels/hyper_connection/launch.h"
#include "kinds.h"
#include "refusal.h"
#include "rows.h"

namespace redknot::trt {
namespace {

enum Input : size_t { kStreams, kFn, kBase, kScale, kNorm };
enum PostInput : size_t { kPostStreams, kOutput, kPost, kComb };

struct Sizes {
  int64_t streams;
  int64_t hidden;
};

Sizes read_sizes(Attributes const& attributes) {
  Sizes const sizes{attributes.integer("streams"), attributes.integer("hidden")};
  if ((sizes.streams != 2 && sizes.streams != 4) || sizes.hidden % 8 != 0 || sizes.streams * sizes.hidden % 32 != 0) {
    throw Refusal(
        "fields 'streams' and 'hidden': expected 2 or 4 streams, hidden a multiple of 8 and their product of 32" +
        std::string(", found ") + std::to_string(sizes.streams) + " and " + std::to_string(sizes.hidden));
  }
  return sizes;
}

// streams [R, S, hidden], fn [mixes, S * hidden], base [mixes], scale, norm [hidden]
// -> normed [R, hidden] and, before a block, post [R, S], comb [R, S, S].
class Pre : public Operator {
 public:
  Pre(Attributes const& attributes, bool head)
      : sizes_(read_sizes(attributes)),
        head_(head),
        iterations_(head ? 0 : attributes.integer("iterations")),
        eps_(attributes.real("eps")),
        norm_eps_(attributes.real("norm_eps")) {
    Dim const streams = fixed(sizes_.streams);
    int64_t const mixes = head ? sizes_.streams : (2 + sizes_.streams) * sizes_.streams;
    contract_.inputs = {tensor("streams", kBFloat16, {size_of('R'), streams, fixed(sizes_.hidden)}),
                        tensor("fn", kFloat, {fixed(mixes), fixed(sizes_.streams * sizes_.hidden)}),
                        tensor("base", kFloat, {fixed(mixes)}), tensor("scale", kFloat, {fixed(head ? 1 : 3)}),
                        weight("norm", {fixed(sizes_.hidden)})};
    contract_.outputs = {tensor("normed", kBFloat16, {size_of('R'), fixed(sizes_.hidden)})};
    if (!head) {
      contract_.outputs.push_back(tensor("post", kFloat, {size_of('R'), streams}));
      contract_.outputs.push_back(tensor("comb", kFloat, {size_of('R'), streams, streams}));
    }
  }

  Contract const& contract() const override { return contract_; }

  size_t workspace(Bindings const& most) const override {
    return hyper_connection_pre_workspace(most['R'], static_cast<int32_t>(sizes_.streams),
                                          static_cast<int32_t>(sizes_.hidden));
  }

  Status launch(Call const& call) const override {
    HyperConnectionPreParams params{};
    params.streams = call.inputs[kStreams];
    params.rows = call.sizes['R'];
    params.stream_count = static_cast<int32_t>(sizes_.streams);
    params.hidden = static_cast<int32_t>(sizes_.hidden);
    params.fn = call.input<float>(kFn);
    params.base = call.input<float>(kBase);
    params.scale = call.input<float>(kScale);
    params.norm = call.inputs[kNorm];
    params.norm_is_float = call.in[kNorm].type == kFloat;
    params.head = head_;
    params.iterations = static_cast<int32_t>(iterations_);
    params.eps = eps_;
    params.norm_eps = norm_eps_;
    params.normed = call.outputs[0];
    params.post = head_ ? nullptr : call.output<float>(1);
    params.comb = head_ ? nullptr : call.output<float>(2);
    params.workspace = call.workspace;
    params.workspace_bytes = workspace(call.sizes);
    return hyper_connection_pre(params, call.stream);
  }

 private:
  Sizes sizes_;
  bool head_;
  int64_t iterations_;
  float eps_;
  float norm_eps_;
  Contract contract_;
};

class BlockPre final : public Pre {
 public:
  explicit BlockPre(Attributes const& attributes) : Pre(attributes, false) {}
};

class HeadPre final : public Pre {
 public:
  explicit HeadPre(Attributes const& attributes) : Pre(attributes, true) {}
};

// streams [R, S, hidden], output [R, hidden], post [R, S], comb [R, S, S] -> streams [R, S, hidden].
class Post final : public Operator {
 public:
  explicit Post(Attributes const& attributes) : sizes_(read_sizes(attributes)) {
    Dim const streams = fixed(sizes_.streams);
    std::vector<Dim> const shape = {size_of('R'), streams, fixed(sizes_.hidden)};
    contract_.inputs = {
        tensor("streams", kBFloat16, shape), tensor("output", kBFloat16, {size_of('R'), fixed(sizes_.hidden)}),
        tensor("post", kFloat, {size_of('R'), streams}), tensor("comb", kFloat, {size_of('R'), streams, streams})};
    contract_.outputs = {tensor("mixed", kBFloat16, shape)};
  }

  Contract const& contract() const override { return contract_; }

  Status launch(Call const& call) const override {
    HyperConnectionPostParams params{};
    params.streams = call.inputs[kPostStreams];
    params.output = call.inputs[kOutput];
    params.post = call.input<float>(kPost);
    params.comb = call.input<float>(kComb);
    params.rows = call.sizes['R'];
    params.stream_count = static_cast<int32_t>(sizes_.streams);
    params.hidden = static_cast<int32_t>(sizes_.hidden);
    params.out = call.outputs[0];
    return hyper_connection_post(params, call.stream);
  }

 private:
  Sizes sizes_;
  Contract contract_;
};

}  // namespace

OperatorKind const& hyper_connection_pre_kind() {
  static FieldSpec const fields[] = {integer_field("streams", 2, 4), integer_field("hidden", 8, kMaxWidth),
                                     integer_field("iterations", 1, 1000), real_field("eps", 0, 1),
                                     real_field("norm_eps", 0, 1)};
  static OperatorKind const kind{"HyperConnectionPre", fields, make_operator<BlockPre>};
  return kind;
}

OperatorKind const& hyper_head_kind() {
  static FieldSpec const fields[] = {integer_field("streams", 2, 4), integer_field("hidden", 8, kMaxWidth),
                                     real_field("eps", 0, 1), real_field("norm_eps", 0, 1)};
  static OperatorKind const kind{"HyperHead", fields, make_operator<HeadPre>};
  return kind;
}

OperatorKind const& hyper_connection_post_kind() {
  static FieldSpec const fields[] = {integer_field("streams", 2, 4), integer_field("hidden", 8, kMaxWidth)};
  static OperatorKind const kind{"HyperConnectionPost", fields, make_operator<Post>};
  return kind;
}

}  // namespace redknot::trt
