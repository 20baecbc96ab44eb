#pragma once

// A unit is up to N columns (a column is a head of a row) that read the same keys. Keys are the M dimension of the
// score products and channels that of the output products, columns the N dimension of both: 8 columns waste nothing.
//
// A block is several teams, each of which takes a unit at a time: one warpgroup that multiplies (two from 32 columns
// on) and one warp or four that find keys, 64 a tile, and copy them as they lie in the pool into shared memory, half of
// the channels at a time. Rope channels are turned there by the segment's frame, so that scores and sums of all
// segments are in one frame. The matrix units read keys, q and the probabilities from shared memory, except that the
// codes of a packed pool become fp16 register operands, transposed, for the output. With two warpgroups each computes
// the scores of half of the columns and the output of half of the channels.
//
// As many blocks as the GPU holds take all units in turn: keys of the next unit are on their way while outputs of this
// one leave.

#include "common/check.h"
#include "common/device.h"
#include "common/ptx.cuh"
#include "kernels/attention/loader.cuh"
#include "kernels/attention/worker_output.cuh"
#include "kernels/attention/worker_query.cuh"
#include "kernels/attention/worker_scores.cuh"

namespace redknot::attention {

// All units of a team: teams of one number in all blocks take neighbouring units.
template <typename T, typename Work>
__device__ __forceinline__ void for_units(Launch const& launch, int team, Work&& work) {
  int const units = launch.full.units + launch.tail.units, blocks = static_cast<int>(gridDim.x);
#pragma unroll 1
  for (int unit = static_cast<int>(blockIdx.x) + blocks * team; unit < units; unit += blocks * T::kTeams) {
    work(unit_of(launch, unit));
  }
}

template <typename T, int kGroup>
__device__ __forceinline__ void multiply(Launch const& launch, Shared<T>& shared, int team) {
  ptx::claim_registers<T::kWorkerRegisters>();
  Worker<T, kGroup> worker(launch.op, shared, team);
  for_units<T>(launch, team, [&](Unit const& unit) { worker.serve(unit); });
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads, 1) attention_kernel(__grid_constant__ Launch const launch) {
  extern __shared__ __align__(1024) uint8_t raw[];
  Shared<T>& shared = *reinterpret_cast<Shared<T>*>(raw);
  if (threadIdx.x < T::kTeams) {
    Team<T>& team = shared.teams[threadIdx.x];
    ptx::barrier_init(ptx::shared_address(&team.drained), T::kWorkers);
#pragma unroll
    for (int stage = 0; stage < T::kStages; ++stage) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        ptx::barrier_init(ptx::shared_address(&team.full[stage][half]), 64 * T::kLoaders);
        ptx::barrier_init(ptx::shared_address(&team.empty[stage][half]), T::kWorkers);
      }
    }
  }
  __syncthreads();
  // The same in all lanes of a warp, which the compiler is to know.
  int const warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0), group = warp / 4;
  if (group >= T::kTeams * T::kGroups) {
    ptx::release_registers<T::kLoaderRegisters>();
    int const loader = warp - 4 * T::kTeams * T::kGroups, team = loader / T::kLoaders;
    Loader<T> own(launch.op, shared, team, loader % T::kLoaders);
    for_units<T>(launch, team, [&](Unit const& unit) { own.serve(unit); });
  } else if (T::kGroups == 1 || group == 0) {
    multiply<T, 0>(launch, shared, group / T::kGroups);
  } else {
    multiply<T, T::kGroups - 1>(launch, shared, 0);
  }
}

template <int kColumns, bool kPacked>
Status launch_attention(Launch const& launch, cudaStream_t stream) {
  using T = Traits<kColumns, kPacked>;
  constexpr int kBytes = static_cast<int>(sizeof(Shared<T>));
  static_assert(kBytes <= 227 * 1024);
  int const units = launch.full.units + launch.tail.units;
  int processors = 0;
  REDKNOT_TRY(count_processors(processors));
  REDKNOT_CUDA(cudaFuncSetAttribute(attention_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  auto const blocks = static_cast<unsigned>(units < processors ? units : processors);
  attention_kernel<T><<<blocks, T::kThreads, kBytes, stream>>>(launch);
  REDKNOT_LAUNCHED();
  return Status::kSuccess;
}

}  // namespace redknot::attention
