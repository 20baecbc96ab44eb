// A cluster of sixteen blocks a row, each with a sixteenth of its channels: of few rows nothing is to be kept on its
// way but fn, whose loads spread over the GPU. Sums meet twice in the blocks' shared memory: the mixes, then the
// squares of what collapsed. A warp of its own makes weights of the mixes; the balanced matrix, a long chain that the
// rows do not wait for, comes last.

#include "common/check.h"
#include "common/cluster.cuh"
#include "common/cluster_launch.h"
#include "common/ptx.cuh"
#include "common/vector.cuh"
#include "kernels/hyper_connection/few_rows.h"
#include "kernels/hyper_connection/weights.cuh"

namespace redknot {
namespace {

// Of the mixes: one pass over many rows is as fast from three rows on. Of the head: clusters that are resident at once.
constexpr int kFewRows = 2;
constexpr int kFewHeadRows = 8;
constexpr int kBlocks = 16;
constexpr int kStreams = 4;
constexpr int kWorkers = 256;
constexpr int kThreads = kWorkers + kWarp;
constexpr int kWarps = kWorkers / kWarp;
constexpr int kQuad = 4;         // channels of one load
constexpr int kMostSlice = 512;  // channels of a block
constexpr int kSums = 32;        // mixes, then the sum of squares at kSquares
constexpr int kSquares = 24;
constexpr int kWorkersMeet = 1;
static_assert((2 + kStreams) * kStreams == kSquares && kBlocks <= kWarp);

struct Shared {
  float streams[kStreams][kMostSlice];
  float of_warps[kWarps][kSums];
  float sums[kSums];  // of the block, read by all
  float pre[kStreams];
  float squares[kWarps];
  float square;  // of the block, read by all
};

// Sums over the lanes of 32 values each: lane i ends with value i.
__device__ __forceinline__ float transposed_sum(float (&values)[kSums], int lane) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
#pragma unroll
    for (int index = 0; index < step; ++index) {
      bool const upper = lane & step;
      float const give = upper ? values[index] : values[index + step];
      values[index] = (upper ? values[index + step] : values[index]) + __shfl_xor_sync(kAllLanes, give, step);
    }
  }
  return values[0];
}

// Brings this block's part of fn into the L2 cache, whatever the kernel before this one still writes.
template <int kMixes>
__device__ __forceinline__ void prefetch_weights(HyperConnectionPreParams const& params, int slice, int first) {
  constexpr int kLine = 128 / static_cast<int>(sizeof(float));
  int const lines = (slice + kLine - 1) / kLine;
  for (int item = static_cast<int>(threadIdx.x); item < kMixes * kStreams * lines; item += kWorkers) {
    ptx::prefetch(params.fn + int64_t{item / lines} * params.hidden + first + item % lines * kLine);
  }
}

// This block's part of the mixes and of the sum of squares; its streams stay in shared memory.
template <int kMixes>
__device__ __forceinline__ void mix(HyperConnectionPreParams const& params, Shared& shared, int64_t row, int slice,
                                    int first) {
  int const thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
  int const quads = slice / kQuad;
  int64_t const depth = int64_t{kStreams} * params.hidden;
  float sums[kSums] = {};
  for (int item = thread; item < kStreams * quads; item += kWorkers) {
    int const stream = item / quads, channel = item % quads * kQuad;
    int64_t const at = int64_t{stream} * params.hidden + first + channel;
    uint2 const raw =
        __ldg(reinterpret_cast<uint2 const*>(static_cast<__nv_bfloat16 const*>(params.streams) + row * depth + at));
    float4 weights[kMixes];
#pragma unroll
    for (int index = 0; index < kMixes; ++index) {
      weights[index] = __ldg(reinterpret_cast<float4 const*>(params.fn + index * depth + at));
    }
    float2 const low = ptx::unpack_bf16(raw.x), high = ptx::unpack_bf16(raw.y);
    *reinterpret_cast<float4*>(&shared.streams[stream][channel]) = {low.x, low.y, high.x, high.y};
#pragma unroll
    for (int index = 0; index < kMixes; ++index) {
      float4 const w = weights[index];
      sums[index] += low.x * w.x + low.y * w.y + high.x * w.z + high.y * w.w;
    }
    sums[kSquares] += low.x * low.x + low.y * low.y + high.x * high.x + high.y * high.y;
  }
  shared.of_warps[warp][lane] = transposed_sum(sums, lane);
}

// Weights of the collapse, from the mixes of all blocks: every lane gets all mixes, and 1 / RMS of the row.
__device__ __forceinline__ float weigh(HyperConnectionPreParams const& params, Shared& shared, int lane,
                                       float (&mixes)[kSums]) {
  float sum = 0.0F;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) sum += cluster::load(&shared.sums[lane], block);
#pragma unroll
  for (int index = 0; index <= kSquares; ++index) mixes[index] = __shfl_sync(kAllLanes, sum, index);
  float const depth = static_cast<float>(kStreams) * static_cast<float>(params.hidden);
  float const inverse = rsqrtf(mixes[kSquares] / depth + params.norm_eps);
  if (lane < kStreams) {
    shared.pre[lane] = sigmoid(sum * inverse * params.scale[0] + params.base[lane]) + params.eps;
  }
  return inverse;
}

// The row's channels of this block, collapsed and normed.
__device__ __forceinline__ void collapse(HyperConnectionPreParams const& params, Shared& shared, int64_t row, int slice,
                                         int first) {
  constexpr int kOwn = kMostSlice / kWorkers;
  int const thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
  float norm[kOwn], values[kOwn], square = 0.0F;
#pragma unroll
  for (int own = 0; own < kOwn; ++own) {
    int const channel = own * kWorkers + thread;
    norm[own] = values[own] = 0.0F;
    if (channel >= slice) continue;
    norm[own] = params.norm_is_float
                    ? __ldg(static_cast<float const*>(params.norm) + first + channel)
                    : __bfloat162float(static_cast<__nv_bfloat16 const*>(params.norm)[first + channel]);
#pragma unroll
    for (int stream = 0; stream < kStreams; ++stream) {
      values[own] += shared.pre[stream] * shared.streams[stream][channel];
    }
    values[own] = round_bf16(values[own]);
    square += values[own] * values[own];
  }
  square = lane_sum<kWarp>(square);
  if (lane == 0) shared.squares[warp] = square;
  ptx::sync_threads(kWorkersMeet, kWorkers);
  if (thread == 0) {
    float total = 0.0F;
#pragma unroll
    for (float const part : shared.squares) total += part;
    shared.square = total;
  }
  cluster::synchronise();
  float const total = lane_sum<kWarp>(lane < kBlocks ? cluster::load(&shared.square, lane) : 0.0F);
  float const inverse = rsqrtf(total / static_cast<float>(params.hidden) + params.norm_eps);
  auto* const normed = static_cast<__nv_bfloat16*>(params.normed) + row * params.hidden + first;
#pragma unroll
  for (int own = 0; own < kOwn; ++own) {
    int const channel = own * kWorkers + thread;
    if (channel < slice) normed[channel] = __float2bfloat16_rn(norm[own] * (values[own] * inverse));
  }
}

template <int kMixes>
__global__ void __launch_bounds__(kThreads, 1)
    few_rows_kernel(__grid_constant__ HyperConnectionPreParams const params) {
  __shared__ Shared shared;
  int const thread = static_cast<int>(threadIdx.x), lane = thread % kWarp;
  int const block = static_cast<int>(cluster::rank()), slice = params.hidden / kBlocks, first = block * slice;
  int64_t const row = blockIdx.x / kBlocks;
  bool const works = thread < kWorkers;
  if (works) prefetch_weights<kMixes>(params, slice, first);
  cudaGridDependencySynchronize();
  if (works) mix<kMixes>(params, shared, row, slice, first);
  __syncthreads();
  if (!works) {
    float sum = 0.0F;
#pragma unroll
    for (auto const& sums : shared.of_warps) sum += sums[lane];
    shared.sums[lane] = sum;
  }
  cluster::synchronise();
  float mixes[kSums], inverse = 0.0F;
  if (!works) inverse = weigh(params, shared, lane, mixes);
  __syncthreads();
  if (works) {
    collapse(params, shared, row, slice, first);
  } else {
    cluster::arrive();
    if (block == 0 && !params.head) write_weights<kStreams>(params, row, lane, mixes, inverse);
    cluster::await();
  }
  cluster::synchronise();  // no block may go while another reads from it
}

}  // namespace

Status hyper_connection_few_rows(HyperConnectionPreParams const& params, cudaStream_t stream) {
  REDKNOT_SUPPORTED(params.rows <= (params.head ? kFewHeadRows : kFewRows) && params.stream_count == kStreams);
  REDKNOT_SUPPORTED(params.hidden % (kBlocks * kQuad) == 0 && params.hidden <= kBlocks * kMostSlice);
  auto* const kernel = params.head ? few_rows_kernel<kStreams> : few_rows_kernel<kSquares>;
  REDKNOT_TRY(allow_clusters(kernel));
  ClusterShape const shape{
      .cluster = kBlocks, .grid = static_cast<unsigned>(kBlocks * params.rows), .block = kThreads, .after = true};
  return launch_clusters(kernel, shape, stream, params);
}

}  // namespace redknot
