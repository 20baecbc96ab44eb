#pragma once

// One block works on one unit of up to N columns (a column is a head of a row). Keys are the M dimension of the score
// products and channels that of the output products, columns the N dimension of both: 8 columns waste nothing.
//
// A tile is 64 keys. Four warps find them and copy them as they lie in the pool into shared memory, half of the
// channels at a time, and turn their rope channels by the segment's frame, so that scores and sums of all segments are
// in one frame. One warpgroup (two from 32 columns on) multiplies. The matrix units read keys, q and the probabilities
// from shared memory, except that the codes of a packed pool become fp16 register operands, transposed, for the output.
// With two warpgroups each computes the scores of half of the columns and the output of half of the channels.

#include "common/check.h"
#include "common/ptx.cuh"
#include "kernels/attention/loader.cuh"
#include "kernels/attention/worker.cuh"

namespace redknot::attention {

template <typename T, int kGroup>
__device__ __forceinline__ void work(SegLatentAttentionParams const& op, Shared<T>& shared, Unit const& unit) {
  ptx::claim_registers<T::kWorkerRegisters>();
  Worker<T, kGroup> worker(op, shared, unit);
  worker.load_queries();
  for (int begin = 0; begin < unit.rows; begin = shared.table.group.end) {
    if (begin > 0) __syncthreads();
    ptx::sync_threads(kGroupKnown, T::kThreads);
    worker.walk();
  }
  worker.finish();
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads, T::kBlocksPerSm)
    attention_kernel(__grid_constant__ Launch const launch) {
  extern __shared__ __align__(1024) uint8_t raw[];
  Shared<T>& shared = *reinterpret_cast<Shared<T>*>(raw);
  SegLatentAttentionParams const& op = launch.op;
  Unit const unit = unit_of(launch, blockIdx.x);
  if (int const i = threadIdx.x; i < unit.rows) {
    int64_t const row = int64_t{unit.row} + i;
    int64_t const segments = op.segment_count;
    shared.row_position[i] = narrow(__ldg(op.positions + row));
    shared.row_visible[i] = narrow(__ldg(op.visible + row));
    shared.row_first[i] = static_cast<int>(max(int64_t{0}, min(segments, __ldg(op.row_segments + 2 * row))));
    shared.row_last[i] = static_cast<int>(max(int64_t{0}, min(segments, __ldg(op.row_segments + 2 * row + 1))));
  }
  if (int const column = threadIdx.x; column < T::kColumns) {
    int const row = column / unit.heads;
    shared.column_row[column] = row < unit.rows ? row : -1;
    int const head = unit.head + column - row * unit.heads;
    shared.sink[column] =
        row < unit.rows ? 1.4426950408889634f * __ldg(head < op.global_heads ? op.sinks_global + head
                                                                             : op.sinks_local + head - op.global_heads)
                        : 0.0f;
  }
  if (threadIdx.x == 0) {
    ptx::barrier_init(ptx::shared_address(&shared.drained), T::kWorkers);
#pragma unroll
    for (int stage = 0; stage < T::kStages; ++stage) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        ptx::barrier_init(ptx::shared_address(&shared.full[stage][half]), 64 * T::kLoaders);
        ptx::barrier_init(ptx::shared_address(&shared.empty[stage][half]), T::kWorkers);
      }
    }
  }
  __syncthreads();
  if (threadIdx.x >= T::kWorkers) {
    ptx::release_registers<T::kLoaderRegisters>();
    Loader<T> loader(op, shared, unit);
    for (int begin = 0; begin < unit.rows; begin = shared.table.group.end) {
      if (begin > 0) __syncthreads();  // the group before has been worked on
      loader.enter(begin);
      loader.fill();
    }
  } else if (T::kGroups == 1 || threadIdx.x < 128) {
    work<T, 0>(op, shared, unit);
  } else {
    work<T, T::kGroups - 1>(op, shared, unit);
  }
}

template <int kColumns, bool kPacked>
Status launch_attention(Launch const& launch, cudaStream_t stream) {
  using T = Traits<kColumns, kPacked>;
  constexpr int kBytes = static_cast<int>(sizeof(Shared<T>));
  static_assert((kBytes + 1024) * T::kBlocksPerSm <= 228 * 1024);
  int64_t const units = int64_t{launch.full.units} + launch.tail.units;
  REDKNOT_CUDA(cudaFuncSetAttribute(attention_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  attention_kernel<T><<<static_cast<unsigned>(units), T::kThreads, kBytes, stream>>>(launch);
  REDKNOT_LAUNCHED();
  return Status::kSuccess;
}

}  // namespace redknot::attention
