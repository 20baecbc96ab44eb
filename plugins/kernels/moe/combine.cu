#include "common/check.h"
#include "common/device.h"
#include "common/ptx.cuh"
#include "common/vector.cuh"
#include "kernels/moe/activation.cuh"
#include "kernels/moe/launch.h"

namespace redknot {
namespace {

constexpr int kThreads = 256;
constexpr unsigned kActivationBlocks = 5 * kHopperProcessors;  // at once; the next row of each is on its way

__device__ __forceinline__ void activate(MoeActivationParams const& params, int64_t row, int channel) {
  auto const* source = static_cast<__nv_bfloat16 const*>(params.gate_up) + row * 2 * params.width + channel;
  uint4 const gate_raw = load_once(source);
  uint4 const up_raw = load_once(source + params.width);
  float gate[kVector];
  float up[kVector];
  unpack_bf16(gate_raw, gate);
  unpack_bf16(up_raw, up);
#pragma unroll
  for (int index = 0; index < kVector; ++index) {
    gate[index] = clamped_swiglu(gate[index], up[index], params.limit);
  }
  auto* target = static_cast<__nv_bfloat16*>(params.out) + row * params.width + channel;
  store_vector(target, pack_bf16(gate));
}

// Brings 64 channels of both halves of a row into the L2 cache; one thread in eight does.
__device__ __forceinline__ void prefetch(MoeActivationParams const& params, int64_t row, int channel) {
  constexpr int kLine = 128 / static_cast<int>(sizeof(__nv_bfloat16));
  if (channel % kLine != 0) return;
  auto const* const source = static_cast<__nv_bfloat16 const*>(params.gate_up) + row * 2 * params.width + channel;
  ptx::prefetch(source);
  ptx::prefetch(source + params.width);
}

__global__ void __launch_bounds__(kThreads) activation_kernel(MoeActivationParams const params) {
  int const vectors_a_row = params.width / kVector;
  int const lanes = min(vectors_a_row, kThreads);  // threads of one row; rows are narrower or wider than a block
  int const rows_a_block = kThreads / lanes;
  int const lane = static_cast<int>(threadIdx.x) % lanes;
  int const own_row = static_cast<int>(threadIdx.x) / lanes;
  if (own_row >= rows_a_block) return;
  int64_t row = static_cast<int64_t>(blockIdx.x) * rows_a_block + own_row;
  if (row < params.capacity) prefetch(params, row, lane * kVector);  // beside the number of rows
  int64_t const rows = min(static_cast<int64_t>(params.ends[params.experts - 1]), params.capacity);
  int64_t const step = static_cast<int64_t>(gridDim.x) * rows_a_block;
  for (; row < rows; row += step) {
    for (int vector = lane; vector < vectors_a_row; vector += lanes) {
      if (row + step < rows) prefetch(params, row + step, vector * kVector);
      activate(params, row, vector * kVector);
    }
  }
}

__global__ void __launch_bounds__(kThreads) combine_kernel(MoeCombineParams const params) {
  __shared__ int32_t places[kMaxTopK];
  __shared__ float weights[kMaxTopK];
  int64_t const row = blockIdx.x;
  if (static_cast<int>(threadIdx.x) < params.top_k) {
    places[threadIdx.x] = params.inverse[row * params.top_k + threadIdx.x];
    weights[threadIdx.x] = params.weights[row * params.top_k + threadIdx.x];
  }
  __syncthreads();
  for (int channel = static_cast<int>(threadIdx.x) * kVector; channel < params.hidden; channel += kThreads * kVector) {
    float sum[kVector] = {};
#pragma unroll 6
    for (int slot = 0; slot < params.top_k; ++slot) {
      int64_t const place = places[slot];
      if (place < 0) continue;
      uint4 raw{~0U, ~0U, ~0U, ~0U};
      if (place < params.capacity) {
        raw = load_once(static_cast<__nv_bfloat16 const*>(params.y) + place * params.hidden + channel);
      }
      float values[kVector];
      unpack_bf16(raw, values);
#pragma unroll
      for (int index = 0; index < kVector; ++index) sum[index] += weights[slot] * values[index];
    }
    auto* target = static_cast<__nv_bfloat16*>(params.out) + row * params.hidden + channel;
    store_vector(target, pack_bf16(sum));
  }
}

}  // namespace

Status moe_activation(MoeActivationParams const& params, cudaStream_t stream) {
  REDKNOT_VALID(params.capacity >= 0 && params.width > 0 && params.experts > 0 && params.limit > 0);
  REDKNOT_SUPPORTED(params.width % kVector == 0);
  if (params.capacity == 0) return Status::kSuccess;
  REDKNOT_VALID(params.gate_up != nullptr && params.ends != nullptr && params.out != nullptr);
  REDKNOT_REQUIRE(aligned(params.gate_up, 16) && aligned(params.out, 16), Status::kMisaligned);
  activation_kernel<<<kActivationBlocks, kThreads, 0, stream>>>(params);
  REDKNOT_LAUNCHED();
  return Status::kSuccess;
}

Status moe_combine(MoeCombineParams const& params, cudaStream_t stream) {
  REDKNOT_VALID(params.rows >= 0 && params.hidden > 0 && params.top_k > 0 && params.capacity >= 0);
  REDKNOT_SUPPORTED(params.hidden % kVector == 0 && params.top_k <= kMaxTopK && params.rows <= INT32_MAX);
  if (params.rows == 0) return Status::kSuccess;
  REDKNOT_VALID(params.inverse != nullptr && params.weights != nullptr && params.out != nullptr);
  REDKNOT_VALID(params.capacity == 0 || params.y != nullptr);
  REDKNOT_REQUIRE(aligned(params.y, 16) && aligned(params.out, 16), Status::kMisaligned);
  combine_kernel<<<static_cast<unsigned>(params.rows), kThreads, 0, stream>>>(params);
  REDKNOT_LAUNCHED();
  return Status::kSuccess;
}

}  // namespace redknot
