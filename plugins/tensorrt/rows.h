#pragma once

// What the plugins that end in a cache row share: its storage formats as tensors, and types of weights and tables.

#include <vector>

#include "contract.h"
#include "kernels/norm_rope_pack/params.h"

namespace redknot::trt {

inline constexpr auto kFloat = nvinfer1::DataType::kFLOAT;
inline constexpr auto kBFloat16 = nvinfer1::DataType::kBF16;
inline constexpr auto kInt32 = nvinfer1::DataType::kINT32;
inline constexpr auto kInt64 = nvinfer1::DataType::kINT64;
// Packed rows travel as int8, which every TensorRT release moves between plugins; uint8 is accepted as an input.
inline constexpr auto kBytes = nvinfer1::DataType::kINT8;
inline constexpr auto kUnsignedBytes = nvinfer1::DataType::kUINT8;

inline constexpr int64_t kMaxWidth = 8192;

inline TensorSpec tensor(char const* name, nvinfer1::DataType type, std::vector<Dim> dims) {
  return {name, {type}, std::move(dims)};
}

// A norm or position weight: fp32 or bf16.
inline TensorSpec weight(char const* name, std::vector<Dim> dims) {
  return {name, {kFloat, kBFloat16}, std::move(dims)};
}

// cos and sin: [T, rope_dim / 2, 2].
inline TensorSpec rope_table(int64_t rope_dim) {
  return tensor("rope", kFloat, {size_of('T'), fixed(rope_dim / 2), fixed(2)});
}

// Refuse fields of channels that do not come in vectors of eight.
void require_vectors(char const* field, int64_t channels);
void require_vectors(int64_t width, int64_t rope_dim);

// Bytes of one row of `width` channels.
int64_t stored_row_bytes(RowFormat format, int64_t width, int64_t rope_dim);

// `rows` stored rows of `width` channels.
TensorSpec stored_rows(char const* name, RowFormat format, Dim rows, int64_t width, int64_t rope_dim);

}  // namespace redknot::trt
