#pragma once

// What every torch adapter shares: reading tensors through torch's stable ABI and turning statuses into exceptions.
// An adapter checks shapes and dtypes, fills one params struct, calls one launcher. Outputs are allocated by the
// caller.

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include "common/dtype.h"
#include "common/status.h"

namespace redknot::torch_ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline constexpr int64_t kAny = -1;

inline std::string text(std::initializer_list<int64_t> shape) {
  std::string out = "[";
  for (int64_t size : shape)
    out += (out.size() > 1 ? ", " : "") + (size == kAny ? std::string("any") : std::to_string(size));
  return out + "]";
}

// Refuses a tensor that is not a contiguous CUDA tensor of this dtype and shape (kAny: any size).
inline void expect(Tensor const& tensor, char const* name, ScalarType dtype, std::initializer_list<int64_t> shape) {
  STD_TORCH_CHECK(tensor.is_cuda(), name, ": expected a CUDA tensor");
  STD_TORCH_CHECK(tensor.scalar_type() == dtype, name, ": expected dtype number ", static_cast<int>(dtype), ", found ",
                  static_cast<int>(tensor.scalar_type()));
  auto const sizes = tensor.sizes();
  bool fits = sizes.size() == shape.size();
  std::string found = "[";
  for (size_t i = 0; i < sizes.size(); ++i) {
    found += (i > 0 ? ", " : "") + std::to_string(sizes[i]);
    fits = fits && (shape.begin()[i] == kAny || shape.begin()[i] == sizes[i]);
  }
  STD_TORCH_CHECK(fits, name, ": expected shape ", text(shape), ", found ", found, "]");
  STD_TORCH_CHECK(tensor.is_contiguous(), name, ": expected a contiguous tensor");
}

inline int32_t narrow(int64_t value, char const* name) {
  STD_TORCH_CHECK(value >= 0 && value <= INT32_MAX, name, ": expected 0 to 2^31 - 1, found ", value);
  return static_cast<int32_t>(value);
}

inline void require(Status status, char const* op) {
  STD_TORCH_CHECK(status == Status::kSuccess, "redknot::", op, ": ", status_text(status));
}

// torch's own lookup of the current stream. It lives in a library that a CPU build of torch lacks, so it is looked up
// in the loaded libraries instead of linked: adapters load everywhere, and only calling an op needs a CUDA build.
inline decltype(&aoti_torch_get_current_cuda_stream) stream_lookup() {
  static auto const lookup = [] {
    void* const library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void* const symbol = library == nullptr ? nullptr : dlsym(library, "aoti_torch_get_current_cuda_stream");
    return reinterpret_cast<decltype(&aoti_torch_get_current_cuda_stream)>(symbol);
  }();
  return lookup;
}

// The stream torch would use for this tensor's device, which becomes the current device until the guard ends.
class StreamGuard {
 public:
  explicit StreamGuard(Tensor const& tensor) : device_(tensor.get_device_index()) {
    auto const lookup = stream_lookup();
    STD_TORCH_CHECK(lookup != nullptr, "this torch was built without CUDA");
    void* stream = nullptr;
    STD_TORCH_CHECK(lookup(tensor.get_device_index(), &stream) == 0, "torch has no current CUDA stream");
    stream_ = static_cast<cudaStream_t>(stream);
  }
  cudaStream_t stream() const { return stream_; }

 private:
  torch::stable::accelerator::DeviceGuard device_;
  cudaStream_t stream_ = nullptr;
};

template <typename T>
T* pointer(Tensor const& tensor) {
  return tensor.numel() == 0 ? nullptr : static_cast<T*>(tensor.data_ptr());
}
template <typename T>
T* pointer(std::optional<Tensor> const& tensor) {
  return tensor.has_value() ? pointer<T>(*tensor) : nullptr;
}

}  // namespace redknot::torch_ops
