#include "kernels/collectives/launch.h"
#include "kinds.h"
#include "refusal.h"
#include "rows.h"

namespace redknot::trt {
namespace {

CollectiveType element_type(nvinfer1::DataType type) {
  switch (type) {
    case kFloat: return CollectiveType::kFloat32;
    case kBFloat16: return CollectiveType::kBFloat16;
    case kInt32: return CollectiveType::kInt32;
    case kInt64: return CollectiveType::kInt64;
    case kBytes:
    case kUnsignedBytes: return CollectiveType::kBytes;
    default: throw Refusal(std::string("a collective does not move ") + type_name(type));
  }
}

// source [R, W] -> all-gather [world * R, W], reduce-scatter [R / world, W] or all-reduce [R, W].
class Collective final : public Operator {
 public:
  explicit Collective(Attributes const& attributes)
      : kind_(static_cast<CollectiveKind>(attributes.integer("kind"))),
        group_(attributes.integer("group")),
        world_(attributes.integer("world")) {
    bool const gathers = kind_ == CollectiveKind::kAllGather;
    TensorSpec source{"source", {kBFloat16, kFloat, kInt32, kInt64}, {size_of('R'), size_of('W')}};
    if (gathers) {
      source.types.insert(source.types.end(), {kBytes, kUnsignedBytes});
    }
    Dim rows = size_of('R');
    if (gathers) {
      rows = size_of('R', world_);
    } else if (kind_ == CollectiveKind::kReduceScatter) {
      rows = part_of('R', world_);
    }
    contract_.inputs = {source};
    contract_.outputs = {{"result", {}, {rows, size_of('W')}, 0}};
  }

  Contract const& contract() const override { return contract_; }

  Status launch(Call const& call) const override {
    CollectiveParams params{};
    params.kind = kind_;
    params.type = element_type(call.in[0].type);
    params.group = static_cast<int32_t>(group_);
    params.world = static_cast<int32_t>(world_);
    params.send = call.inputs[0];
    params.receive = call.outputs[0];
    bool const scatters = kind_ == CollectiveKind::kReduceScatter;
    params.count = call.sizes['R'] * call.sizes['W'] / (scatters ? world_ : 1);
    return collective(params, call.stream);
  }

 private:
  CollectiveKind kind_;
  int64_t group_;
  int64_t world_;
  Contract contract_;
};

}  // namespace

OperatorKind const& collective_kind() {
  static FieldSpec const fields[] = {integer_field("kind", 0, 2), integer_field("group", 0, INT32_MAX, 0),
                                     integer_field("world", 1, 1 << 16)};
  static OperatorKind const kind{"Collective", fields, make_operator<Collective>};
  return kind;
}

}  // namespace redknot::trt
