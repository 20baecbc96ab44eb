#include "kernels/restore_replace/launch.h"
#include "kinds.h"
#include "refusal.h"
#include "rows.h"

namespace redknot::trt {
namespace {

enum Input : size_t { kGlobal, kLocal, kRestored, kIndex };

// global [R, width], local [L, width], restored [S, ...] (, index [R - L]) -> state [R, width].
class RestoreReplace final : public Operator {
 public:
  explicit RestoreReplace(Attributes const& attributes)
      : width_(attributes.integer("width")), packed_(attributes.flag("packed")), indexed_(attributes.flag("indexed")) {
    require_vectors("width", width_);
    contract_.inputs = {
        tensor("global", kBFloat16, {size_of('R'), fixed(width_)}),
        tensor("local", kBFloat16, {size_of('L'), fixed(width_)}),
        stored_rows("restored", packed_ ? RowFormat::kPackedRow : RowFormat::kBFloat16, size_of('S'), width_, 0)};
    if (packed_) {
      contract_.inputs[kRestored].types.push_back(kUnsignedBytes);
    }
    if (indexed_) {
      contract_.inputs.push_back(tensor("index", kInt64, {size_of('N')}));
    }
    contract_.outputs = {tensor("state", kBFloat16, {size_of('R'), fixed(width_)})};
  }

  Contract const& contract() const override { return contract_; }

  void check(Bindings const& sizes) const override {
    int64_t const others = sizes[indexed_ ? 'N' : 'S'];
    if (sizes['R'] != sizes['L'] + others) {
      throw Refusal("expected rows of 'global' = rows of 'local' + restored rows, found " + std::to_string(sizes['R']) +
                    ", " + std::to_string(sizes['L']) + " and " + std::to_string(others));
    }
  }

  Status launch(Call const& call) const override {
    RestoreReplaceParams params{};
    params.global = call.inputs[kGlobal];
    params.local = call.inputs[kLocal];
    params.restored = call.inputs[kRestored];
    params.restored_index = indexed_ ? call.input<int64_t>(kIndex) : nullptr;
    params.rows = call.sizes['R'];
    params.local_rows = call.sizes['L'];
    params.restored_rows = call.sizes['S'];
    params.width = static_cast<int32_t>(width_);
    params.packed = packed_;
    params.out = call.outputs[0];
    return restore_replace(params, call.stream);
  }

 private:
  int64_t width_;
  bool packed_;
  bool indexed_;
  Contract contract_;
};

}  // namespace

OperatorKind const& restore_replace_kind() {
  static FieldSpec const fields[] = {integer_field("width", 8, 1 << 20), integer_field("packed", 0, 1, 0),
                                     integer_field("indexed", 0, 1, 0)};
  static OperatorKind const kind{"RestoreReplace", fields, make_operator<RestoreReplace>};
  return kind;
}

}  // namespace redknot::trt
