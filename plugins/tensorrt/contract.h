#pragma once

#include <NvInferRuntime.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace redknot::trt {

// One dimension: `factor` times the size bound to a letter, over `divisor`. A letter stands for one size in a contract.
struct Dim {
  int64_t factor = 1;
  char letter = 0;
  int64_t divisor = 1;
};

inline Dim fixed(int64_t size) { return {size, 0, 1}; }
inline Dim size_of(char letter, int64_t factor = 1) { return {factor, letter, 1}; }
inline Dim part_of(char letter, int64_t divisor) { return {1, letter, divisor}; }

// One tensor of a plugin, linear format: the types it may have, in order of preference, and its shape.
struct TensorSpec {
  std::string name;
  std::vector<nvinfer1::DataType> types;
  std::vector<Dim> dims;
  // Index of the input whose type this tensor shares; -1 where `types` decides alone.
  int32_t same_type_as = -1;
};

// Sizes bound to the letters 'A' .. 'Z'.
class Bindings {
 public:
  Bindings() { sizes_.fill(kUnbound); }
  int64_t operator[](char letter) const;
  bool bound(char letter) const { return sizes_[index(letter)] != kUnbound; }
  void bind(char letter, int64_t size) { sizes_[index(letter)] = size; }
  // Size of `dim`; throws Refusal where its letter is unbound, the product overflows or the division leaves a rest.
  int64_t size(Dim const& dim) const;

 private:
  static constexpr int64_t kUnbound = -1;
  static size_t index(char letter);

  std::array<int64_t, 26> sizes_{};
};

// What the tensors of a plugin must look like. Methods throw Refusal, saying what was expected and what was found.
struct Contract {
  std::vector<TensorSpec> inputs;
  std::vector<TensorSpec> outputs;

  int32_t tensors() const { return static_cast<int32_t>(inputs.size() + outputs.size()); }
  TensorSpec const& tensor(int32_t position) const;

  void check_counts(int32_t inputs_given, int32_t outputs_given) const;
  // Whether the tensor at `position` may have its type and format, given those before it.
  bool supports(int32_t position, nvinfer1::DynamicPluginTensorDesc const* tensors_given) const;
  nvinfer1::DataType output_type(int32_t output, nvinfer1::DataType const* input_types) const;
  void output_shapes(nvinfer1::DimsExprs const* input_shapes, nvinfer1::DimsExprs* output_shapes,
                     nvinfer1::IExprBuilder& builder) const;

  // Sizes of every letter, from concrete input shapes that agree with each other.
  Bindings bind(std::vector<nvinfer1::Dims> const& input_shapes) const;
  // Largest sizes of every letter over the shape ranges of a build; ranks, types and fixed sizes are checked.
  Bindings bounds(nvinfer1::DynamicPluginTensorDesc const* in) const;
  // Like bind, with types, formats and output shapes checked too.
  Bindings check(nvinfer1::PluginTensorDesc const* in, nvinfer1::PluginTensorDesc const* out) const;
};

int64_t volume(nvinfer1::Dims const& dims);
char const* type_name(nvinfer1::DataType type);

}  // namespace redknot::trt
