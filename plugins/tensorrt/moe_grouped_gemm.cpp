#include "kernels/moe/launch.h"
#include "kinds.h"
#include "refusal.h"
#include "rows.h"

namespace redknot::trt {
namespace {

// x [P, depth], ends [experts], weight [experts, width, depth], weight_scale [experts, depth / 128, width / 128]
// -> out [P, width].
class GroupedGemm final : public Operator {
 public:
  explicit GroupedGemm(Attributes const& attributes)
      : experts_(attributes.integer("experts")),
        depth_(attributes.integer("depth")),
        width_(attributes.integer("width")) {
    if (depth_ % kScaleBlock != 0 || width_ % kScaleBlock != 0) {
      throw Refusal("fields 'depth' and 'width': expected multiples of 128, found " + std::to_string(depth_) + " and " +
                    std::to_string(width_));
    }
    contract_.inputs = {
        tensor("x", kBFloat16, {size_of('P'), fixed(depth_)}),
        tensor("ends", kInt32, {fixed(experts_)}),
        {"weight", {nvinfer1::DataType::kFP8, kBytes, kUnsignedBytes}, {fixed(experts_), fixed(width_), fixed(depth_)}},
        tensor("weight_scale", kFloat, {fixed(experts_), fixed(depth_ / kScaleBlock), fixed(width_ / kScaleBlock)})};
    contract_.outputs = {tensor("out", kBFloat16, {size_of('P'), fixed(width_)})};
  }

  Contract const& contract() const override { return contract_; }

  size_t workspace(Bindings const& most) const override {
    return moe_grouped_gemm_workspace(most['P'], static_cast<int32_t>(experts_), static_cast<int32_t>(depth_),
                                      static_cast<int32_t>(width_));
  }

  Status launch(Call const& call) const override {
    MoeGroupedGemmParams params{};
    params.x = call.inputs[0];
    params.ends = call.input<int32_t>(1);
    params.weight = call.inputs[2];
    params.weight_scale = call.input<float>(3);
    params.capacity = call.sizes['P'];
    params.experts = static_cast<int32_t>(experts_);
    params.depth = static_cast<int32_t>(depth_);
    params.width = static_cast<int32_t>(width_);
    params.out = call.outputs[0];
    params.workspace = call.workspace;
    params.workspace_bytes = workspace(call.sizes);
    return moe_grouped_gemm(params, call.stream);
  }

 private:
  int64_t experts_;
  int64_t depth_;
  int64_t width_;
  Contract contract_;
};

}  // namespace

OperatorKind const& moe_grouped_gemm_kind() {
  static FieldSpec const fields[] = {integer_field("experts", 1, kMaxExperts), integer_field("depth", 128, 1 << 20),
                                     integer_field("width", 128, 1 << 20)};
  static OperatorKind const kind{"MoeGroupedGemm", fields, make_operator<GroupedGemm>};
  return kind;
}

}  // namespace redknot::trt
