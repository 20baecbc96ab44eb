#pragma once

// What launchers ask of the current device.

#include "common/check.h"

namespace redknot {

inline constexpr int kHopperProcessors = 132;  // multiprocessors of the largest chip that kernels are tuned for

// For launchers of kernels that are made of Hopper's warpgroup products.
inline Status require_warpgroup_products() {
  int device = 0, major = 0;
  REDKNOT_CUDA(cudaGetDevice(&device));
  REDKNOT_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  REDKNOT_SUPPORTED(major == 9);
  return Status::kSuccess;
}

inline Status count_processors(int& processors) {
  int device = 0;
  REDKNOT_CUDA(cudaGetDevice(&device));
  REDKNOT_CUDA(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  return Status::kSuccess;
}

}  // namespace redknot
