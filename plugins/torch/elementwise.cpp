#include "elementwise.h"

#include "common/layout.h"
#include "kernels/compress/launch.h"
#include "kernels/hyper_connection/launch.h"
#include "kernels/norm_rope_pack/launch.h"
#include "kernels/restore_replace/launch.h"

namespace redknot::torch_ops {

RowFormat expect_stored(Tensor const& out, int64_t format, int64_t width, int64_t rope_dim) {
  STD_TORCH_CHECK(format >= 0 && format <= 2, "format: expected 0, 1 or 2, found ", format);
  auto const stored = static_cast<RowFormat>(format);
  if (stored == RowFormat::kBFloat16) {
    expect(out, "out", ScalarType::BFloat16, {kAny, width});
  } else {
    bool const latent = stored == RowFormat::kPackedLatent;
    expect(out, "out", ScalarType::Byte,
           {kAny, latent ? packed_latent_pitch(width, rope_dim) : packed_row_bytes(width)});
  }
  return stored;
}

namespace {

void pack(Tensor out, Tensor x, std::optional<Tensor> norm, std::optional<Tensor> rope, std::optional<Tensor> positions,
          std::optional<Tensor> out_rows, int64_t format, double eps) {
  bool const headed = x.dim() == 3;
  STD_TORCH_CHECK(headed || x.dim() == 2, "x: expected 2 or 3 dimensions, found ", x.dim());
  int64_t const width = x.size(headed ? 2 : 1);
  STD_TORCH_CHECK(rope.has_value() == positions.has_value(), "rope and positions: expected both or neither");
  NormRopePackParams params{};
  if (headed) {
    expect(x, "x", ScalarType::BFloat16, {kAny, kAny, kAny});
    expect(out, "out", ScalarType::BFloat16, {x.size(0), x.size(1), width});
    STD_TORCH_CHECK(!out_rows.has_value() && format == 0, "x: expected 2 dimensions where rows are packed or placed");
  } else {
    expect(x, "x", ScalarType::BFloat16, {kAny, kAny});
  }
  if (norm.has_value()) params.norm_is_float = expect_float(*norm, "norm", {width});
  if (rope.has_value()) {
    expect(*rope, "rope", ScalarType::Float, {kAny, kAny, 2});
    expect(*positions, "positions", ScalarType::Long, {x.size(0)});
    params.rope_dim = narrow(2 * rope->size(1), "rope channels");
    params.rope_positions = rope->size(0);
  }
  if (!headed) params.format = expect_stored(out, format, width, params.rope_dim);
  if (out_rows.has_value()) expect(*out_rows, "out_rows", ScalarType::Long, {x.size(0)});
  params.x = pointer<void>(x);
  params.rows = x.size(0);
  params.heads = headed ? narrow(x.size(1), "heads") : 1;
  params.width = narrow(width, "channels");
  params.norm = pointer<void>(norm);
  params.rope = pointer<float>(rope);
  params.positions = pointer<int64_t>(positions);
  params.out_rows = pointer<int64_t>(out_rows);
  params.pool_rows = out.size(0);
  params.out = pointer<void>(out);
  params.eps = static_cast<float>(eps);
  if (x.numel() == 0) return;
  StreamGuard const guard(x);
  require(norm_rope_pack(params, guard.stream()), "norm_rope_pack");
}

void pool(Tensor out, Tensor kv, Tensor gate, Tensor ape, Tensor norm, Tensor rope, Tensor slots, Tensor positions,
          std::optional<Tensor> out_rows, int64_t format, double eps) {
  CompressParams params{};
  params.norm_is_float = expect_float(norm, "norm", {kAny});
  int64_t const width = norm.size(0);
  expect(kv, "kv", ScalarType::BFloat16, {kAny, kAny});
  int64_t const raw_width = kv.size(1);
  STD_TORCH_CHECK(width > 0 && (raw_width == width || raw_width == 2 * width), "kv: expected ", width, " or ",
                  2 * width, " channels, found ", raw_width);
  int64_t const series = raw_width / width;
  expect(gate, "gate", ScalarType::BFloat16, {kv.size(0), raw_width});
  params.ape_is_float = expect_float(ape, "ape", {kAny, raw_width});
  expect(slots, "slots", ScalarType::Long, {kAny, series * ape.size(0)});
  int64_t const entries = slots.size(0);
  expect(positions, "positions", ScalarType::Long, {entries});
  expect(rope, "rope", ScalarType::Float, {kAny, kAny, 2});
  params.rope_dim = narrow(2 * rope.size(1), "rope channels");
  params.format = expect_stored(out, format, width, params.rope_dim);
  if (out_rows.has_value()) expect(*out_rows, "out_rows", ScalarType::Long, {entries});
  params.kv = pointer<void>(kv);
  params.gate = pointer<void>(gate);
  params.raw_rows = kv.size(0);
  params.series = narrow(series, "series");
  params.width = narrow(width, "channels");
  params.ape = pointer<void>(ape);
  params.norm = pointer<void>(norm);
  params.rope = pointer<float>(rope);
  params.rope_positions = rope.size(0);
  params.slots = pointer<int64_t>(slots);
  params.entries = entries;
  params.slots_an_entry = narrow(slots.size(1), "slots");
  params.positions = pointer<int64_t>(positions);
  params.out_rows = pointer<int64_t>(out_rows);
  params.pool_rows = out.size(0);
  params.out = pointer<void>(out);
  params.eps = static_cast<float>(eps);
  if (entries == 0) return;
  StreamGuard const guard(slots);
  require(compress(params, guard.stream()), "compress");
}

void restore(Tensor out, Tensor global, Tensor local, Tensor restored, std::optional<Tensor> index) {
  expect(global, "global", ScalarType::BFloat16, {kAny, kAny});
  int64_t const width = global.size(1);
  expect(local, "local", ScalarType::BFloat16, {kAny, width});
  expect(out, "out", ScalarType::BFloat16, {global.size(0), width});
  int64_t const others = global.size(0) - local.size(0);
  RestoreReplaceParams params{};
  params.packed = restored.scalar_type() == ScalarType::Byte;
  if (index.has_value()) expect(*index, "index", ScalarType::Long, {others});
  expect(restored, "restored", params.packed ? ScalarType::Byte : ScalarType::BFloat16,
         {index.has_value() ? kAny : others, params.packed ? packed_row_bytes(width) : width});
  params.global = pointer<void>(global);
  params.local = pointer<void>(local);
  params.restored = pointer<void>(restored);
  params.restored_index = pointer<int64_t>(index);
  params.rows = global.size(0);
  params.local_rows = local.size(0);
  // No index and no rows to restore are the same to the kernel.
  params.restored_rows = others == 0 ? 0 : restored.size(0);
  params.width = narrow(width, "channels");
  params.out = pointer<void>(out);
  if (global.numel() == 0) return;
  StreamGuard const guard(global);
  require(restore_replace(params, guard.stream()), "restore_replace");
}

// Fills what the block's and the head's mixes share.
HyperConnectionPreParams mixes(Tensor const& normed, Tensor const& streams, Tensor const& fn, Tensor const& base,
                               Tensor const& scale, Tensor const& norm, bool head, double eps, double norm_eps) {
  expect(streams, "streams", ScalarType::BFloat16, {kAny, kAny, kAny});
  int64_t const count = streams.size(1), hidden = streams.size(2);
  int64_t const mix_count = head ? count : (2 + count) * count;
  expect(fn, "fn", ScalarType::Float, {mix_count, count * hidden});
  expect(base, "base", ScalarType::Float, {mix_count});
  expect(scale, "scale", ScalarType::Float, {head ? 1 : 3});
  HyperConnectionPreParams params{};
  params.norm_is_float = expect_float(norm, "norm", {hidden});
  expect(normed, "normed", ScalarType::BFloat16, {streams.size(0), hidden});
  params.streams = pointer<void>(streams);
  params.rows = streams.size(0);
  params.stream_count = narrow(count, "streams");
  params.hidden = narrow(hidden, "channels");
  params.fn = pointer<float>(fn);
  params.base = pointer<float>(base);
  params.scale = pointer<float>(scale);
  params.norm = pointer<void>(norm);
  params.head = head;
  params.eps = static_cast<float>(eps);
  params.norm_eps = static_cast<float>(norm_eps);
  params.normed = pointer<void>(normed);
  return params;
}

void launch_mixes(HyperConnectionPreParams params, Tensor const& streams, char const* op) {
  if (params.rows == 0) return;
  StreamGuard const guard(streams);
  size_t const bytes = hyper_connection_pre_workspace(params.rows, params.stream_count, params.hidden);
  Tensor const workspace = scratch(streams, bytes);
  params.workspace = pointer<void>(workspace);
  params.workspace_bytes = bytes;
  require(hyper_connection_pre(params, guard.stream()), op);
}

void connect_pre(Tensor normed, Tensor post, Tensor comb, Tensor streams, Tensor fn, Tensor base, Tensor scale,
                 Tensor norm, int64_t iterations, double eps, double norm_eps) {
  HyperConnectionPreParams params = mixes(normed, streams, fn, base, scale, norm, false, eps, norm_eps);
  int64_t const rows = streams.size(0), count = streams.size(1);
  expect(post, "post", ScalarType::Float, {rows, count});
  expect(comb, "comb", ScalarType::Float, {rows, count, count});
  params.iterations = narrow(iterations, "iterations");
  params.post = pointer<float>(post);
  params.comb = pointer<float>(comb);
  launch_mixes(params, streams, "hyper_connection_pre");
}

void collapse_head(Tensor normed, Tensor streams, Tensor fn, Tensor base, Tensor scale, Tensor norm, double eps,
                   double norm_eps) {
  launch_mixes(mixes(normed, streams, fn, base, scale, norm, true, eps, norm_eps), streams, "hyper_head");
}

void connect_post(Tensor out, Tensor streams, Tensor output, Tensor post, Tensor comb) {
  expect(streams, "streams", ScalarType::BFloat16, {kAny, kAny, kAny});
  int64_t const rows = streams.size(0), count = streams.size(1), hidden = streams.size(2);
  expect(output, "output", ScalarType::BFloat16, {rows, hidden});
  expect(post, "post", ScalarType::Float, {rows, count});
  expect(comb, "comb", ScalarType::Float, {rows, count, count});
  expect(out, "out", ScalarType::BFloat16, {rows, count, hidden});
  HyperConnectionPostParams params{};
  params.streams = pointer<void>(streams);
  params.output = pointer<void>(output);
  params.post = pointer<float>(post);
  params.comb = pointer<float>(comb);
  params.rows = rows;
  params.stream_count = narrow(count, "streams");
  params.hidden = narrow(hidden, "channels");
  params.out = pointer<void>(out);
  if (rows == 0) return;
  StreamGuard const guard(streams);
  require(hyper_connection_post(params, guard.stream()), "hyper_connection_post");
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(redknot, m) {
  m.def(
      "norm_rope_pack(Tensor(a!) out, Tensor x, Tensor? norm, Tensor? rope, Tensor? positions, Tensor? out_rows, "
      "int format, float eps) -> ()");
  m.def(
      "compress(Tensor(a!) out, Tensor kv, Tensor gate, Tensor ape, Tensor norm, Tensor rope, Tensor slots, "
      "Tensor positions, Tensor? out_rows, int format, float eps) -> ()");
  m.def("restore_replace(Tensor(a!) out, Tensor global_state, Tensor local, Tensor restored, Tensor? index) -> ()");
  m.def(
      "hyper_connection_pre(Tensor(a!) normed, Tensor(b!) post, Tensor(c!) comb, Tensor streams, Tensor fn, Tensor "
      "base, "
      "Tensor scale, Tensor norm, int iterations, float eps, float norm_eps) -> ()");
  m.def(
      "hyper_head(Tensor(a!) normed, Tensor streams, Tensor fn, Tensor base, Tensor scale, Tensor norm, float eps, "
      "float norm_eps) -> ()");
  m.def("hyper_connection_post(Tensor(a!) out, Tensor streams, Tensor output, Tensor post, Tensor comb) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(redknot, CUDA, m) {
  m.impl("norm_rope_pack", TORCH_BOX(&pack));
  m.impl("compress", TORCH_BOX(&pool));
  m.impl("restore_replace", TORCH_BOX(&restore));
  m.impl("hyper_connection_pre", TORCH_BOX(&connect_pre));
  m.impl("hyper_head", TORCH_BOX(&collapse_head));
  m.impl("hyper_connection_post", TORCH_BOX(&connect_post));
}

}  // namespace redknot::torch_ops
