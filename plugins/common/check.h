#pragma once

// Checks of launchers: each returns a status from the calling function.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/status.h"

#define REDKNOT_REQUIRE(condition, status) \
  do {                                     \
    if (!(condition)) return (status);     \
  } while (false)

#define REDKNOT_VALID(condition) REDKNOT_REQUIRE(condition, ::redknot::Status::kInvalidArgument)
#define REDKNOT_SUPPORTED(condition) REDKNOT_REQUIRE(condition, ::redknot::Status::kUnsupported)
#define REDKNOT_CUDA(call) REDKNOT_REQUIRE(::redknot::succeeded(call), ::redknot::Status::kCudaError)
#define REDKNOT_TRY(call)                                                     \
  do {                                                                        \
    ::redknot::Status const redknot_status = (call);                          \
    if (redknot_status != ::redknot::Status::kSuccess) return redknot_status; \
  } while (false)
// After a launch: reads and clears the error that this launch left.
#define REDKNOT_LAUNCHED() REDKNOT_CUDA(cudaGetLastError())

namespace redknot {

// What the runtime refuses it also keeps as the thread's last error: it is taken away, or the next launch would find
// it.
inline bool succeeded(cudaError_t error) {
  if (error == cudaSuccess) return true;
  static_cast<void>(cudaGetLastError());
  return false;
}

inline bool aligned(void const* pointer, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

}  // namespace redknot
