#include "kernels/collectives/nccl.h"

#include <dlfcn.h>

#include <optional>

namespace redknot::nccl {
namespace {

constexpr char const* kLibraryName = "libnccl.so.2";

template <typename Function>
bool bind(void* handle, char const* name, Function& target) {
  target = reinterpret_cast<Function>(dlsym(handle, name));
  return target != nullptr;
}

std::optional<Library> load() {
  void* handle = dlopen(kLibraryName, RTLD_NOW | RTLD_NOLOAD);
  if (handle == nullptr) handle = dlopen(kLibraryName, RTLD_NOW);
  if (handle == nullptr) return std::nullopt;
  Library library{};
  bool const complete = bind(handle, "ncclCommCount", library.comm_count) &&
                        bind(handle, "ncclCommGetAsyncError", library.comm_async_error) &&
                        bind(handle, "ncclAllGather", library.all_gather) &&
                        bind(handle, "ncclReduceScatter", library.reduce_scatter) &&
                        bind(handle, "ncclAllReduce", library.all_reduce);
  return complete ? std::optional<Library>(library) : std::nullopt;
}

}  // namespace

Library const* library() {
  static std::optional<Library> const loaded = load();
  return loaded.has_value() ? &*loaded : nullptr;
}

}  // namespace redknot::nccl
