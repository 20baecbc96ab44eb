#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <span>

#include "attributes.h"
#include "common/status.h"
#include "contract.h"

namespace redknot::trt {

// The tensors of one enqueue. Shapes, types and formats were checked against the contract, pointers against null.
struct Call {
  nvinfer1::PluginTensorDesc const* in;
  nvinfer1::PluginTensorDesc const* out;
  void const* const* inputs;
  void* const* outputs;
  void* workspace;
  cudaStream_t stream;
  Bindings const& sizes;

  template <typename T>
  T const* input(size_t index) const {
    return static_cast<T const*>(inputs[index]);
  }
  template <typename T>
  T* output(size_t index) const {
    return static_cast<T*>(outputs[index]);
  }
};

// One op as a plugin sees it: its contract and its launcher. Immutable, so that clones and contexts share it.
class Operator {
 public:
  virtual ~Operator() = default;
  virtual Contract const& contract() const = 0;
  // Relations between sizes that letters cannot express; throws Refusal.
  virtual void check(Bindings const& /*sizes*/) const {}
  // Bytes of workspace for sizes up to `most`: no smaller ones may need more.
  virtual size_t workspace(Bindings const& /*most*/) const { return 0; }
  virtual Status launch(Call const& call) const = 0;
};

// How plugins of one name are made.
struct OperatorKind {
  char const* name;
  std::span<FieldSpec const> fields;
  // Throws Refusal where the fields contradict each other.
  std::unique_ptr<Operator const> (*make)(Attributes const& attributes);
};

template <typename Concrete>
std::unique_ptr<Operator const> make_operator(Attributes const& attributes) {
  return std::make_unique<Concrete const>(attributes);
}

}  // namespace redknot::trt
