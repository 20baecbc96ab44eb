#include "kernels/indexer/lightning_indexer.h"

#include <algorithm>

#include "kinds.h"
#include "refusal.h"
#include "rows.h"
#include "table.h"

namespace redknot::trt {
namespace {

enum Input : size_t { kQuery, kWeights, kKeys, kTable, kRope = kTable + 4 };

// q [R, heads, dim], weights [R, heads], keys [E, dim] or stored, the attention table, rope -> selected [R, top_k].
class LightningIndexer final : public Operator {
 public:
  explicit LightningIndexer(Attributes const& attributes)
      : top_k_(attributes.integer("top_k")),
        rows_at_a_time_(attributes.integer("rows_at_a_time")),
        packed_(attributes.flag("packed")),
        fp8_(attributes.flag("fp8")) {
    if (packed_ && !fp8_) {
      throw Refusal("field 'fp8': expected 1 where 'packed' is 1, found 0");
    }
    RowFormat const format = packed_ ? RowFormat::kPackedRow : RowFormat::kBFloat16;
    contract_.inputs = {tensor("q", kBFloat16, {size_of('R'), fixed(kIndexHeads), fixed(kIndexDim)}),
                        tensor("weights", kBFloat16, {size_of('R'), fixed(kIndexHeads)}),
                        stored_rows("keys", format, size_of('E'), kIndexDim, 0)};
    std::vector<TensorSpec> const table = table_inputs();
    contract_.inputs.insert(contract_.inputs.end(), table.begin(), table.end());
    contract_.inputs.push_back(rope_table(kRopeDim));
    if (packed_) {
      contract_.inputs[kKeys].types.push_back(kUnsignedBytes);
    }
    contract_.outputs = {tensor("selected", kInt64, {size_of('R'), fixed(top_k_)})};
  }

  Contract const& contract() const override { return contract_; }

  void check(Bindings const& sizes) const override { check_table(sizes); }

  size_t workspace(Bindings const& most) const override {
    return static_cast<size_t>(lightning_indexer_workspace(most['E'], std::min(most['R'], rows_at_a_time_)));
  }

  Status launch(Call const& call) const override {
    LightningIndexerParams params{};
    params.q = call.inputs[kQuery];
    params.weights = call.inputs[kWeights];
    params.keys = call.inputs[kKeys];
    read_table(params, call, kTable);
    params.rope = call.input<float>(kRope);
    params.selected = call.output<int64_t>(0);
    params.workspace = call.workspace;
    params.workspace_bytes = static_cast<int64_t>(workspace(call.sizes));
    params.entries = call.sizes['E'];
    params.rope_positions = call.sizes['T'];
    params.rows = static_cast<int32_t>(call.sizes['R']);
    params.segment_count = static_cast<int32_t>(call.sizes['S']);
    params.top_k = static_cast<int32_t>(top_k_);
    params.keys_dtype = packed_ ? Dtype::kPacked : Dtype::kBFloat16;
    params.fp8 = fp8_;
    return lightning_indexer(params, call.stream);
  }

 private:
  int64_t top_k_;
  int64_t rows_at_a_time_;
  bool packed_;
  bool fp8_;
  Contract contract_;
};

}  // namespace

OperatorKind const& lightning_indexer_kind() {
  static FieldSpec const fields[] = {integer_field("top_k", 1, kMostSelected),
                                     integer_field("rows_at_a_time", 4, 1 << 20, 1024),
                                     integer_field("packed", 0, 1, 0), integer_field("fp8", 0, 1, 1)};
  static OperatorKind const kind{"LightningIndexer", fields, make_operator<LightningIndexer>};
  return kind;
}

}  // namespace redknot::trt
