#include "kernels/attention/seg_latent_attention.h"

#include "kinds.h"
#include "refusal.h"
#include "rows.h"
#include "table.h"

namespace redknot::trt {
namespace {

enum Input : size_t {
  kQGlobal,
  kQLocal,
  kTable,
  kSinksGlobal = kTable + 4,
  kSinksLocal,
  kRope,
  kLatents,
  kEntries,
  kSelected
};

// q_global [R, global_heads, D], q_local [F, local_heads, D], the attention table, sinks, rope, latents [L, ...]
// (, entries [E, ...]) (, selected [R, K]) -> out_global [R, global_heads, D], out_local [F, local_heads, D].
class SegLatentAttention final : public Operator {
 public:
  explicit SegLatentAttention(Attributes const& attributes)
      : global_heads_(attributes.integer("global_heads")),
        local_heads_(attributes.integer("local_heads")),
        window_(attributes.integer("window")),
        has_entries_(attributes.flag("entries")),
        has_selected_(attributes.flag("selected")),
        packed_(attributes.flag("packed")) {
    if (has_selected_ && !has_entries_) {
      throw Refusal("field 'selected': expected 0 where 'entries' is 0, found 1");
    }
    if (global_heads_ + local_heads_ == 0) {
      throw Refusal("fields 'global_heads' and 'local_heads': expected at least one head, found none");
    }
    RowFormat const format = packed_ ? RowFormat::kPackedLatent : RowFormat::kBFloat16;
    auto const pool = [&](char const* name, char rows) {
      TensorSpec spec = stored_rows(name, format, size_of(rows), kHeadDim, kRopeDim);
      if (packed_) {
        spec.types.push_back(kUnsignedBytes);
      }
      return spec;
    };
    std::vector<Dim> const global = {size_of('R'), fixed(global_heads_), fixed(kHeadDim)};
    std::vector<Dim> const local = {size_of('F'), fixed(local_heads_), fixed(kHeadDim)};
    contract_.inputs = {tensor("q_global", kBFloat16, global), tensor("q_local", kBFloat16, local)};
    auto const append = [&](std::vector<TensorSpec> const& specs) {
      contract_.inputs.insert(contract_.inputs.end(), specs.begin(), specs.end());
    };
    append(table_inputs());
    append({tensor("sinks_global", kFloat, {fixed(global_heads_)}),
            tensor("sinks_local", kFloat, {fixed(local_heads_)}), rope_table(kRopeDim), pool("latents", 'L')});
    if (has_entries_) {
      contract_.inputs.push_back(pool("entries", 'E'));
    }
    if (has_selected_) {
      contract_.inputs.push_back(tensor("selected", kInt64, {size_of('R'), size_of('K')}));
    }
    contract_.outputs = {tensor("out_global", kBFloat16, global), tensor("out_local", kBFloat16, local)};
  }

  Contract const& contract() const override { return contract_; }

  void check(Bindings const& sizes) const override {
    if (sizes['F'] > sizes['R']) {
      throw Refusal("expected at most as many rows in 'q_local' as in 'q_global', found " + std::to_string(sizes['F']) +
                    " and " + std::to_string(sizes['R']));
    }
    check_table(sizes);
    if (has_selected_ && sizes['K'] > kMaxSelected) {
      throw Refusal("expected at most " + std::to_string(kMaxSelected) + " entries of a row in 'selected', found " +
                    std::to_string(sizes['K']));
    }
  }

  size_t workspace(Bindings const& most) const override { return seg_latent_attention_workspace(sized(most)); }

  Status launch(Call const& call) const override {
    // Selecting from nothing is a sliding window, not a dense read.
    bool const reads_entries = has_entries_ && call.sizes['E'] > 0 && (!has_selected_ || call.sizes['K'] > 0);
    bool const selects = reads_entries && has_selected_;
    SegLatentAttentionParams params = sized(call.sizes);
    params.q_global = call.inputs[kQGlobal];
    params.q_local = call.inputs[kQLocal];
    params.out_global = call.outputs[0];
    params.out_local = call.outputs[1];
    params.sinks_global = call.input<float>(kSinksGlobal);
    params.sinks_local = call.input<float>(kSinksLocal);
    params.latents = call.inputs[kLatents];
    params.entries = reads_entries ? call.inputs[kEntries] : nullptr;
    read_table(params, call, kTable);
    params.selected = selects ? call.input<int64_t>(kSelected) : nullptr;
    params.rope = call.input<float>(kRope);
    params.entry_rows = reads_entries ? params.entry_rows : 0;
    params.top_k = selects ? static_cast<int32_t>(call.sizes['K']) : 0;
    params.workspace = call.workspace;
    params.workspace_bytes = workspace(call.sizes);
    return seg_latent_attention(params, call.stream);
  }

 private:
  // Sizes of a call, without its tensors.
  SegLatentAttentionParams sized(Bindings const& sizes) const {
    SegLatentAttentionParams params{};
    params.latent_rows = sizes['L'];
    params.entry_rows = has_entries_ ? sizes['E'] : 0;
    params.rope_positions = sizes['T'];
    params.rows = static_cast<int32_t>(sizes['R']);
    params.full_rows = static_cast<int32_t>(sizes['F']);
    params.global_heads = static_cast<int32_t>(global_heads_);
    params.local_heads = static_cast<int32_t>(local_heads_);
    params.segment_count = static_cast<int32_t>(sizes['S']);
    params.window = static_cast<int32_t>(window_);
    params.pool_dtype = packed_ ? Dtype::kPacked : Dtype::kBFloat16;
    return params;
  }

  int64_t global_heads_;
  int64_t local_heads_;
  int64_t window_;
  bool has_entries_;
  bool has_selected_;
  bool packed_;
  Contract contract_;
};

}  // namespace

OperatorKind const& seg_latent_attention_kind() {
  static FieldSpec const fields[] = {integer_field("global_heads", 0, 128), integer_field("local_heads", 0, 128),
                                     integer_field("window", 1, 1 << 20),   integer_field("entries", 0, 1, 0),
                                     integer_field("selected", 0, 1, 0),    integer_field("packed", 0, 1, 0)};
  static OperatorKind const kind{"SegLatentAttention", fields, make_operator<SegLatentAttention>};
  return kind;
}

}  // namespace redknot::trt
