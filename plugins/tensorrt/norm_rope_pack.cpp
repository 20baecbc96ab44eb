#include "kernels/norm_rope_pack/launch.h"
#include "kinds.h"
#include "refusal.h"
#include "rows.h"

namespace redknot::trt {
namespace {

// x [R, width] or [R, heads, width] (, norm [width]) (, rope [T, rope_dim / 2, 2], positions [R]) -> rows like x, or
// stored.
class NormRopePack final : public Operator {
 public:
  explicit NormRopePack(Attributes const& attributes)
      : width_(attributes.integer("width")),
        heads_(attributes.integer("heads")),
        rope_dim_(attributes.integer("rope_dim")),
        weighted_(attributes.flag("weighted")),
        format_(static_cast<RowFormat>(attributes.integer("format"))),
        eps_(attributes.real("eps")) {
    require_vectors(width_, rope_dim_);
    if (heads_ > 0 && format_ != RowFormat::kBFloat16) {
      throw Refusal("field 'format': expected 0 where 'heads' is given, found " +
                    std::to_string(static_cast<int32_t>(format_)));
    }
    Contract& contract = contract_;
    std::vector<Dim> dims = {size_of('R'), fixed(width_)};
    if (heads_ > 0) {
      dims.insert(dims.begin() + 1, fixed(heads_));
    }
    contract.inputs = {tensor("x", kBFloat16, dims)};
    if (weighted_) {
      contract.inputs.push_back(weight("norm", {fixed(width_)}));
    }
    if (rope_dim_ > 0) {
      contract.inputs.push_back(rope_table(rope_dim_));
      contract.inputs.push_back(tensor("positions", kInt64, {size_of('R')}));
    }
    contract.outputs = {heads_ > 0 ? tensor("rows", kBFloat16, dims)
                                   : stored_rows("rows", format_, size_of('R'), width_, rope_dim_)};
  }

  Contract const& contract() const override { return contract_; }

  Status launch(Call const& call) const override {
    size_t const after_norm = weighted_ ? 2 : 1;
    NormRopePackParams params{};
    params.x = call.inputs[0];
    params.rows = call.sizes['R'];
    params.heads = static_cast<int32_t>(heads_ > 0 ? heads_ : 1);
    params.width = static_cast<int32_t>(width_);
    params.norm = weighted_ ? call.inputs[1] : nullptr;
    params.norm_is_float = weighted_ && call.in[1].type == kFloat;
    if (rope_dim_ > 0) {
      params.rope = call.input<float>(after_norm);
      params.rope_positions = call.sizes['T'];
      params.rope_dim = static_cast<int32_t>(rope_dim_);
      params.positions = call.input<int64_t>(after_norm + 1);
    }
    params.pool_rows = params.rows;
    params.out = call.outputs[0];
    params.format = format_;
    params.eps = eps_;
    return norm_rope_pack(params, call.stream);
  }

 private:
  int64_t width_;
  int64_t heads_;
  int64_t rope_dim_;
  bool weighted_;
  RowFormat format_;
  float eps_;
  Contract contract_;
};

}  // namespace

OperatorKind const& norm_rope_pack_kind() {
  static FieldSpec const fields[] = {integer_field("width", 8, kMaxWidth),       integer_field("heads", 0, 1024, 0),
                                     integer_field("rope_dim", 0, kMaxWidth, 0), integer_field("weighted", 0, 1, 1),
                                     integer_field("format", 0, 2, 0),           real_field("eps", 0, 1)};
  static OperatorKind const kind{"NormRopePack", fields, make_operator<NormRopePack>};
  return kind;
}

}  // namespace redknot::trt
