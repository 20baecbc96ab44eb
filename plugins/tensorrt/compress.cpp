#include "kernels/compress/launch.h"
#include "kinds.h"
#include "rows.h"

namespace redknot::trt {
namespace {

enum Input : size_t { kKv, kGate, kApe, kNorm, kRope, kSlots, kPositions };

// kv, gate [N, series * width], ape [ratio, series * width], norm [width], rope, slots [E, series * ratio], positions
// [E]
// -> entries [E, width] or stored.
class Compress final : public Operator {
 public:
  explicit Compress(Attributes const& attributes)
      : width_(attributes.integer("width")),
        series_(attributes.integer("series")),
        ratio_(attributes.integer("ratio")),
        rope_dim_(attributes.integer("rope_dim")),
        format_(static_cast<RowFormat>(attributes.integer("format"))),
        eps_(attributes.real("eps")) {
    require_vectors(width_, rope_dim_);
    contract_.inputs = {tensor("kv", kBFloat16, {size_of('N'), fixed(series_ * width_)}),
                        tensor("gate", kBFloat16, {size_of('N'), fixed(series_ * width_)}),
                        weight("ape", {fixed(ratio_), fixed(series_ * width_)}),
                        weight("norm", {fixed(width_)}),
                        rope_table(rope_dim_),
                        tensor("slots", kInt64, {size_of('E'), fixed(series_ * ratio_)}),
                        tensor("positions", kInt64, {size_of('E')})};
    contract_.outputs = {stored_rows("entries", format_, size_of('E'), width_, rope_dim_)};
  }

  Contract const& contract() const override { return contract_; }

  Status launch(Call const& call) const override {
    CompressParams params{};
    params.kv = call.inputs[kKv];
    params.gate = call.inputs[kGate];
    params.raw_rows = call.sizes['N'];
    params.series = static_cast<int32_t>(series_);
    params.width = static_cast<int32_t>(width_);
    params.ape = call.inputs[kApe];
    params.ape_is_float = call.in[kApe].type == kFloat;
    params.norm = call.inputs[kNorm];
    params.norm_is_float = call.in[kNorm].type == kFloat;
    params.rope = call.input<float>(kRope);
    params.rope_positions = call.sizes['T'];
    params.rope_dim = static_cast<int32_t>(rope_dim_);
    params.slots = call.input<int64_t>(kSlots);
    params.entries = call.sizes['E'];
    params.slots_an_entry = static_cast<int32_t>(series_ * ratio_);
    params.positions = call.input<int64_t>(kPositions);
    params.pool_rows = params.entries;
    params.out = call.outputs[0];
    params.format = format_;
    params.eps = eps_;
    return compress(params, call.stream);
  }

 private:
  int64_t width_;
  int64_t series_;
  int64_t ratio_;
  int64_t rope_dim_;
  RowFormat format_;
  float eps_;
  Contract contract_;
};

}  // namespace

OperatorKind const& compress_kind() {
  static FieldSpec const fields[] = {integer_field("width", 8, 1024),    integer_field("series", 1, 2),
                                     integer_field("ratio", 1, 1 << 16), integer_field("rope_dim", 8, 1024),
                                     integer_field("format", 0, 2, 0),   real_field("eps", 0, 1)};
  static OperatorKind const kind{"Compress", fields, make_operator<Compress>};
  return kind;
}

}  // namespace redknot::trt
