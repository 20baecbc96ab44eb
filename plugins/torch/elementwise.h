#pragma once

// What the adapters of byte-moving ops share.

#include <torch/csrc/stable/ops.h>

#include "bindings.h"
#include "kernels/norm_rope_pack/params.h"

namespace redknot::torch_ops {

// Refuses a tensor that is neither fp32 nor bf16, and tells which.
inline bool expect_float(Tensor const& tensor, char const* name, std::initializer_list<int64_t> shape) {
  bool const is_float = tensor.scalar_type() == ScalarType::Float;
  expect(tensor, name, is_float ? ScalarType::Float : ScalarType::BFloat16, shape);
  return is_float;
}

// Byte scratch of a launcher, on the device and stream of `like`.
inline Tensor scratch(Tensor const& like, size_t bytes) {
  int64_t const size[] = {static_cast<int64_t>(bytes)};
  return torch::stable::new_empty(like, torch::headeronly::IntHeaderOnlyArrayRef(size, 1), ScalarType::Byte);
}

// Checks `out` as stored rows of `width` channels and gives their format.
RowFormat expect_stored(Tensor const& out, int64_t format, int64_t width, int64_t rope_dim);

}  // namespace redknot::torch_ops
