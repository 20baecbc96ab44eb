#pragma once

// Kernels that start while the kernel before them on the stream still runs.

#include <cuda_runtime.h>

#include <cstddef>

namespace redknot {

// Launches `kernel` so that its blocks may start once every block of the kernel before it has called
// cudaTriggerProgrammaticLaunchCompletion(). It calls cudaGridDependencySynchronize() before it touches what that
// kernel reads or writes.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_after(void (*kernel)(Parameters...), unsigned grid, unsigned block, size_t shared,
                         cudaStream_t stream, Arguments const&... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid);
  config.blockDim = dim3(block);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

}  // namespace redknot
