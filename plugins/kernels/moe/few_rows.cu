#include "common/check.h"
#include "common/packing.cuh"
#include "kernels/moe/activation.cuh"
#include "kernels/moe/few_rows.h"

namespace redknot {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kOwn = 2;     // outputs of a warp, which share the loads of their input
constexpr int kUnroll = 4;  // vectors of each that are on their way together
constexpr int kMostDepth = 8192;
constexpr int64_t kMostBlocks = 65535;

// The expert of a row's slot among those held here, or -1.
__device__ __forceinline__ int64_t held(MoeFewRowsParams const& params, int64_t pair) {
  int64_t const expert = __ldg(params.ids + pair) - params.first;
  return expert >= 0 && expert < params.experts ? expert : -1;
}

// A row as it is multiplied: with kFp8 its quantised channels, which are exact in bf16, in shared memory; else where it
// lies. All threads of the block.
template <bool kFp8>
__device__ __forceinline__ uint4 const* operand(__nv_bfloat16 const* row, int depth, uint4* staged) {
  if constexpr (!kFp8) {
    return reinterpret_cast<uint4 const*>(row);
  } else {
    for (int begin = 0; begin < depth; begin += kThreads * kVector) {
      int const channel = begin + static_cast<int>(threadIdx.x) * kVector;
      bool const inside = channel < depth;
      float values[kVector];
      unpack_bf16(inside ? *reinterpret_cast<uint4 const*>(row + channel) : uint4{0, 0, 0, 0}, values);
      bool finite;
      int const exponent = scale_exponent(lane_max<kScaleBlock / kVector>(finite_peak(values, finite)));
      decode_e4m3(encode_e4m3(values, exponent, finite), power_of_two(exponent), values);
      if (inside) staged[channel / kVector] = pack_bf16(values);
    }
    __syncthreads();
    return staged;
  }
}

// Eight channels of a weight's row, times the scale of their block.
template <bool kFp8>
__device__ __forceinline__ float product(float const (&x)[kVector], void const* weight, int64_t at, float scale) {
  float weights[kVector];
  if constexpr (kFp8) {
    decode_e4m3(__ldcs(reinterpret_cast<uint2 const*>(static_cast<uint8_t const*>(weight) + at)), 1.0F, weights);
  } else {
    unpack_bf16(load_once(static_cast<__nv_bfloat16 const*>(weight) + at), weights);
  }
  float sum = 0.0F;
#pragma unroll
  for (int slot = 0; slot < kVector; ++slot) sum += x[slot] * weights[slot];
  return kFp8 ? sum * scale : sum;
}

// Dot products of a row with rows `first`, `first` + 1 of each of kCount parts of an expert's weight, which lie
// `apart` rows from each other; in every lane. `scales`: of the expert, [depth / 128, outputs / 128].
template <bool kFp8, int kCount>
__device__ __forceinline__ void dots(uint4 const* input, void const* weight, float const* scales, int64_t base,
                                     int first, int apart, int outputs, int depth, int lane,
                                     float (&sums)[kCount][kOwn]) {
#pragma unroll
  for (auto& part : sums) {
#pragma unroll
    for (float& sum : part) sum = 0.0F;
  }
#pragma unroll kUnroll
  for (int channel = lane * kVector; channel < depth; channel += kWarp * kVector) {
    float x[kVector];
    unpack_bf16(input[channel / kVector], x);
#pragma unroll
    for (int part = 0; part < kCount; ++part) {
      int const row = first + part * apart;
      // An even first row: both rows are of one block.
      float const scale = kFp8 ? __ldg(scales + static_cast<int64_t>(channel / kScaleBlock) * (outputs / kScaleBlock) +
                                       row / kScaleBlock)
                               : 1.0F;
#pragma unroll
      for (int own = 0; own < kOwn; ++own) {
        sums[part][own] += product<kFp8>(x, weight, base + static_cast<int64_t>(row + own) * depth + channel, scale);
      }
    }
  }
#pragma unroll
  for (auto& part : sums) {
#pragma unroll
    for (float& sum : part) sum = lane_sum<kWarp>(sum);
  }
}

// Channels of the activation of one (row, slot).
template <bool kFp8>
__global__ void __launch_bounds__(kThreads) inner_kernel(MoeFewRowsParams const params) {
  __shared__ uint4 staged[kFp8 ? kMostDepth / kVector : 1];
  int64_t const pair = blockIdx.y, expert = held(params, pair);
  if (expert < 0) return;
  int const lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  int const first = (static_cast<int>(blockIdx.x) * kWarps + warp) * kOwn, outputs = 2 * params.width;
  uint4 const* const x = operand<kFp8>(
      static_cast<__nv_bfloat16 const*>(params.x) + pair / params.top_k * params.hidden, params.hidden, staged);
  if (first >= params.width) return;
  float const* scales = nullptr;
  if (kFp8) scales = params.gate_up_scale + expert * (params.hidden / kScaleBlock) * (outputs / kScaleBlock);
  float sums[2][kOwn];  // gate, up
  dots<kFp8>(x, params.gate_up, scales, expert * outputs * params.hidden, first, params.width, outputs, params.hidden,
             lane, sums);
  if (lane != 0) return;
  auto* const inner = static_cast<__nv_bfloat16*>(params.inner) + pair * params.width + first;
#pragma unroll
  for (int own = 0; own < kOwn; ++own) {
    float const gate = round_bf16(sums[0][own]), up = round_bf16(sums[1][own]);
    inner[own] = __float2bfloat16_rn(clamped_swiglu(gate, up, params.limit));
  }
}

// Channels of a row's output: its slots in their order.
template <bool kFp8>
__global__ void __launch_bounds__(kThreads) outer_kernel(MoeFewRowsParams const params) {
  __shared__ uint4 staged[kFp8 ? kMostDepth / kVector : 1];
  int64_t const row = blockIdx.y;
  int const lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  int const first = (static_cast<int>(blockIdx.x) * kWarps + warp) * kOwn;
  bool const inside = first < params.hidden;
  float totals[kOwn] = {};
  for (int slot = 0; slot < params.top_k; ++slot) {
    int64_t const pair = row * params.top_k + slot, expert = held(params, pair);
    if (expert < 0) continue;  // alike in the whole block
    uint4 const* const x =
        operand<kFp8>(static_cast<__nv_bfloat16 const*>(params.inner) + pair * params.width, params.width, staged);
    if (inside) {
      float const* scales = nullptr;
      if (kFp8) scales = params.down_scale + expert * (params.width / kScaleBlock) * (params.hidden / kScaleBlock);
      float sums[1][kOwn];
      dots<kFp8>(x, params.down, scales, expert * params.hidden * params.width, first, 0, params.hidden, params.width,
                 lane, sums);
      float const weight = __ldg(params.weights + pair);
#pragma unroll
      for (int own = 0; own < kOwn; ++own) totals[own] += weight * round_bf16(sums[0][own]);
    }
    if (kFp8) __syncthreads();
  }
  if (!inside || lane != 0) return;
  auto* const out = static_cast<__nv_bfloat16*>(params.out) + row * params.hidden + first;
#pragma unroll
  for (int own = 0; own < kOwn; ++own) out[own] = __float2bfloat16_rn(totals[own]);
}

unsigned blocks_for(int channels) { return static_cast<unsigned>((channels + kWarps * kOwn - 1) / (kWarps * kOwn)); }

template <bool kFp8>
Status launch(MoeFewRowsParams const& params, int64_t pairs, cudaStream_t stream) {
  inner_kernel<kFp8><<<dim3(blocks_for(params.width), static_cast<unsigned>(pairs)), kThreads, 0, stream>>>(params);
  REDKNOT_LAUNCHED();
  dim3 const outer(blocks_for(params.hidden), static_cast<unsigned>(params.rows));
  outer_kernel<kFp8><<<outer, kThreads, 0, stream>>>(params);
  REDKNOT_LAUNCHED();
  return Status::kSuccess;
}

}  // namespace

Status moe_few_rows(MoeFewRowsParams const& params, cudaStream_t stream) {
  REDKNOT_VALID(params.rows >= 0 && params.top_k > 0 && params.experts > 0 && params.hidden > 0 && params.width > 0);
  bool const fp8 = params.gate_up_scale != nullptr;
  int const unit = fp8 ? kScaleBlock : kVector;
  REDKNOT_SUPPORTED(params.hidden % unit == 0 && params.width % unit == 0);
  REDKNOT_SUPPORTED(params.hidden <= kMostDepth && params.width <= kMostDepth);
  int64_t const pairs = int64_t{params.rows} * params.top_k;
  REDKNOT_SUPPORTED(pairs <= kMostBlocks);
  if (params.rows == 0) return Status::kSuccess;
  REDKNOT_VALID(params.x != nullptr && params.ids != nullptr && params.weights != nullptr && params.out != nullptr);
  REDKNOT_VALID(params.gate_up != nullptr && params.down != nullptr && params.inner != nullptr);
  REDKNOT_VALID(fp8 == (params.down_scale != nullptr));
  for (void const* pointer : {params.x, params.gate_up, params.down, static_cast<void const*>(params.inner),
                              static_cast<void const*>(params.out)}) {
    REDKNOT_REQUIRE(aligned(pointer, 16), Status::kMisaligned);
  }
  return fp8 ? launch<true>(params, pairs, stream) : launch<false>(params, pairs, stream);
}

}  // namespace redknot
