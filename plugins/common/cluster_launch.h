#pragma once

// Launches of kernels whose blocks work in clusters, also of more blocks than every chip offers.

#include <cuda_runtime.h>

#include <cstddef>

#include "common/check.h"

namespace redknot {

// The shape of a launch: `grid` blocks, a multiple of those of a `cluster`, and dynamic shared memory of each in bytes.
// `after`: blocks may start while the kernel before them ends, as with launch_after().
struct ClusterShape {
  unsigned cluster;
  unsigned grid;
  unsigned block;
  size_t shared = 0;
  bool after = false;
};

// What cudaLaunchKernelEx takes. It refers to itself: it stays where it is made.
class ClusterConfig {
 public:
  ClusterConfig(ClusterShape const& shape, cudaStream_t stream) {
    attributes_[0].id = cudaLaunchAttributeClusterDimension;
    attributes_[0].val.clusterDim.x = shape.cluster;
    attributes_[0].val.clusterDim.y = 1;
    attributes_[0].val.clusterDim.z = 1;
    attributes_[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes_[1].val.programmaticStreamSerializationAllowed = 1;
    config_.gridDim = dim3(shape.grid);
    config_.blockDim = dim3(shape.block);
    config_.dynamicSmemBytes = shape.shared;
    config_.stream = stream;
    config_.attrs = attributes_;
    config_.numAttrs = shape.after ? 2 : 1;
  }
  ClusterConfig(ClusterConfig const&) = delete;
  ClusterConfig& operator=(ClusterConfig const&) = delete;

  cudaLaunchConfig_t const* get() const { return &config_; }

 private:
  cudaLaunchAttribute attributes_[2]{};
  cudaLaunchConfig_t config_{};
};

// Lets a kernel use clusters of any size and that much dynamic shared memory. kUnsupported: a chip that has less.
template <typename... Parameters>
Status allow_clusters(void (*kernel)(Parameters...), size_t shared = 0) {
  auto const bytes = static_cast<int>(shared);
  REDKNOT_SUPPORTED(succeeded(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)));
  REDKNOT_SUPPORTED(succeeded(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1)));
  return Status::kSuccess;
}

// Clusters of this shape that run at once; 0 where there are none.
template <typename... Parameters>
int resident_clusters(void (*kernel)(Parameters...), ClusterShape const& shape) {
  ClusterConfig const config(shape, nullptr);
  int clusters = 0;
  return succeeded(cudaOccupancyMaxActiveClusters(&clusters, kernel, config.get())) ? clusters : 0;
}

// Launches a kernel that allow_clusters() has let. kUnsupported: nothing was launched, because a slice of a GPU may
// have too few multiprocessors side by side.
template <typename... Parameters, typename... Arguments>
Status launch_clusters(void (*kernel)(Parameters...), ClusterShape const& shape, cudaStream_t stream,
                       Arguments const&... arguments) {
  ClusterConfig const config(shape, stream);
  REDKNOT_SUPPORTED(succeeded(cudaLaunchKernelEx(config.get(), kernel, static_cast<Parameters>(arguments)...)));
  return Status::kSuccess;
}

}  // namespace redknot
