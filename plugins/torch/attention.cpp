#include "elementwise.h"
#include "kernels/attention/seg_latent_attention.h"
#include "table.h"

namespace redknot::torch_ops {
namespace {

// Rows of a pool, and how they are stored: bf16 channels, or packed bytes.
Dtype expect_pool(Tensor const& pool, char const* name) {
  bool const packed = pool.scalar_type() == ScalarType::Byte;
  if (packed) {
    expect(pool, name, ScalarType::Byte, {kAny, kPackedLatentPitch});
  } else {
    expect(pool, name, ScalarType::BFloat16, {kAny, kHeadDim});
  }
  return packed ? Dtype::kPacked : Dtype::kBFloat16;
}

void attend(Tensor out_global, Tensor out_local, Tensor q_global, Tensor q_local, Tensor segments, Tensor row_segments,
            Tensor positions, Tensor visible, Tensor latents, std::optional<Tensor> entries,
            std::optional<Tensor> selected, Tensor sinks_global, Tensor sinks_local, Tensor rope, int64_t window) {
  expect(sinks_global, "sinks_global", ScalarType::Float, {kAny});
  expect(sinks_local, "sinks_local", ScalarType::Float, {kAny});
  int64_t const global_heads = sinks_global.size(0), local_heads = sinks_local.size(0);
  expect(q_global, "q_global", ScalarType::BFloat16, {kAny, global_heads, kHeadDim});
  expect(q_local, "q_local", ScalarType::BFloat16, {kAny, local_heads, kHeadDim});
  int64_t const rows = q_global.size(0), full_rows = q_local.size(0);
  expect(out_global, "out_global", ScalarType::BFloat16, {rows, global_heads, kHeadDim});
  expect(out_local, "out_local", ScalarType::BFloat16, {full_rows, local_heads, kHeadDim});
  SegLatentAttentionParams params{};
  read_table(params, rows, segments, row_segments, positions, visible, rope);
  Dtype const dtype = expect_pool(latents, "latents");
  if (entries.has_value()) {
    STD_TORCH_CHECK(expect_pool(*entries, "entries") == dtype, "entries: expected the dtype of latents");
  }
  // A pool without rows and no pool are the same to the kernel: no entry can be visible.
  bool const has_entries = entries.has_value() && entries->numel() > 0;
  if (selected.has_value()) expect(*selected, "selected", ScalarType::Long, {rows, kAny});
  bool const has_selection = has_entries && selected.has_value() && selected->size(1) > 0;
  STD_TORCH_CHECK(!selected.has_value() || entries.has_value(), "selected: expected entries beside it");
  // Selecting from nothing is a sliding window, not a dense read.
  bool const reads_entries = has_entries && (!selected.has_value() || has_selection);

  params.q_global = pointer<void>(q_global);
  params.q_local = pointer<void>(q_local);
  params.out_global = pointer<void>(out_global);
  params.out_local = pointer<void>(out_local);
  params.sinks_global = pointer<float>(sinks_global);
  params.sinks_local = pointer<float>(sinks_local);
  params.latents = pointer<void>(latents);
  params.entries = reads_entries ? pointer<void>(entries) : nullptr;
  params.selected = reads_entries && has_selection ? pointer<int64_t>(selected) : nullptr;
  params.latent_rows = latents.size(0);
  params.entry_rows = reads_entries ? entries->size(0) : 0;
  params.full_rows = narrow(full_rows, "rows of q_local");
  params.global_heads = narrow(global_heads, "Global heads");
  params.local_heads = narrow(local_heads, "Local heads");
  params.top_k = selected.has_value() ? narrow(selected->size(1), "selected entries") : 0;
  params.window = narrow(window, "window");
  params.pool_dtype = dtype;
  StreamGuard const guard(q_global);
  params.workspace_bytes = seg_latent_attention_workspace(params);
  std::optional<Tensor> workspace;
  if (params.workspace_bytes > 0) workspace = scratch(q_global, params.workspace_bytes);
  params.workspace = pointer<void>(workspace);
  require(seg_latent_attention(params, guard.stream()), "seg_latent_attention");
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(redknot, m) {
  m.def(
      "seg_latent_attention(Tensor(a!) out_global, Tensor(b!) out_local, Tensor q_global, Tensor q_local, Tensor "
      "segments, "
      "Tensor row_segments, Tensor positions, Tensor visible, Tensor latents, Tensor? entries, Tensor? selected, "
      "Tensor sinks_global, Tensor sinks_local, Tensor rope, int window) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(redknot, CUDA, m) { m.impl("seg_latent_attention", TORCH_BOX(&attend)); }

}  // namespace redknot::torch_ops
