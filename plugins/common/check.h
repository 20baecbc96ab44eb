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
#define REDKNOT_CUDA(call) REDKNOT_REQUIRE((call) == cudaSuccess, ::redknot::Status::kCudaError)
// After a launch: reads and clears the error that this launch left.
#define REDKNOT_LAUNCHED() REDKNOT_CUDA(cudaGetLastError())

namespace redknot {

inline bool aligned(void const* pointer, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

// For launchers of kernels that are made of Hopper's warpgroup products.
inline Status require_warpgroup_products() {
  int device = 0, major = 0;
  REDKNOT_CUDA(cudaGetDevice(&device));
  REDKNOT_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  REDKNOT_SUPPORTED(major == 9);
  return Status::kSuccess;
}

}  // namespace redknot
