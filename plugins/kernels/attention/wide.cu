// Attention of rows with many heads: a block takes 64 heads of a row at a time. Heads are the M dimension of all
// products. Keys lie in shared memory once and serve as keys and as values.

#include "common/check.h"
#include "common/device.h"
#include "common/launch_after.h"
#include "kernels/attention/wide.h"
#include "kernels/attention/wide_consumer.cuh"
#include "kernels/attention/wide_producer.cuh"

namespace redknot::attention {

namespace wide {
namespace {

// Registers of a thread; at the start all have 128.
inline constexpr int kProducerRegisters = 64;
inline constexpr int kConsumerRegisters = 192;

__global__ void __launch_bounds__(kThreads, 1) attention_kernel(__grid_constant__ Launch const launch) {
  extern __shared__ __align__(1024) uint8_t raw[];
  Shared& shared = *reinterpret_cast<Shared*>(raw);
  if (threadIdx.x == 0) {
    ptx::barrier_init(ptx::shared_address(&shared.queried), kProducers);
    ptx::barrier_init(ptx::shared_address(&shared.turned), kGroupThreads);
    ptx::barrier_init(ptx::shared_address(&shared.answered), kGroupThreads);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // Copies arrive by themselves, besides the threads that began them.
      ptx::barrier_init(ptx::shared_address(&shared.full[i]), 2 * kProducers);
      ptx::barrier_init(ptx::shared_address(&shared.empty[i]), 2 * kGroupThreads);
      ptx::barrier_init(ptx::shared_address(&shared.scored[i]), kGroupThreads);
      ptx::barrier_init(ptx::shared_address(&shared.summed[i]), kGroupThreads);
    }
  }
  __syncthreads();
  cudaGridDependencySynchronize();
  int const units = launch.full.units + launch.tail.units, stride = static_cast<int>(gridDim.x);
  auto const work = [&](auto&& worker) {
#pragma unroll 1
    for (int index = static_cast<int>(blockIdx.x); index < units; index += stride) {
      Unit const unit = unit_of(launch, index);
      worker.open(unit);
      if (index + stride < units) worker.announce(unit_of(launch, index + stride));
      worker.work(unit);
    }
  };
  // The same in all lanes of a warp, which the compiler is to know.
  int const group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kGroupThreads, 0);
  if (group >= 2) {
    ptx::release_registers<kProducerRegisters>();
    work(Producer(launch, shared));
  } else if (group == 0) {
    ptx::claim_registers<kConsumerRegisters>();
    work(Scorer(launch.op, shared));
  } else {
    ptx::claim_registers<kConsumerRegisters>();
    work(Summer(launch.op, shared));
  }
}

}  // namespace
}  // namespace wide

Status launch_wide(Launch const& launch, cudaStream_t stream) {
  constexpr int kBytes = static_cast<int>(sizeof(wide::Shared));
  static_assert(kBytes <= 227 * 1024);
  int processors = 0;
  REDKNOT_TRY(count_processors(processors));
  int const units = launch.full.units + launch.tail.units;
  auto* const kernel = wide::attention_kernel;
  REDKNOT_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  auto const blocks = static_cast<unsigned>(units < processors ? units : processors);
  REDKNOT_CUDA(launch_after(kernel, blocks, wide::kThreads, kBytes, stream, launch));
  return Status::kSuccess;
}

}  // namespace redknot::attention
