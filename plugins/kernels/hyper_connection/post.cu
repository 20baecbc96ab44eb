#include "common/check.h"
#include "common/vector.cuh"
#include "kernels/hyper_connection/launch.h"

namespace redknot {
namespace {

constexpr int kThreads = 256;

// `count` weights of a row, four at a time where there are four.
__device__ __forceinline__ void load_quads(float const* source, float* target, int count) {
  if (count % 4 != 0) {
#pragma unroll
    for (int index = 0; index < count; ++index) target[index] = __ldg(source + index);
    return;
  }
#pragma unroll
  for (int first = 0; first < count; first += 4) {
    float4 const four = __ldg(reinterpret_cast<float4 const*>(source + first));
    target[first] = four.x, target[first + 1] = four.y, target[first + 2] = four.z, target[first + 3] = four.w;
  }
}

template <int kStreams>
__global__ void __launch_bounds__(kThreads) post_kernel(HyperConnectionPostParams const params) {
  cudaTriggerProgrammaticLaunchCompletion();
  int64_t const vectors_a_row = params.hidden / kVector;
  int64_t const vector = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (vector >= params.rows * vectors_a_row) return;
  int64_t const row = vector / vectors_a_row;
  int64_t const channel = vector % vectors_a_row * kVector;
  auto const* streams = static_cast<__nv_bfloat16 const*>(params.streams) + row * kStreams * params.hidden + channel;
  uint4 raw[kStreams];
#pragma unroll
  for (int stream = 0; stream < kStreams; ++stream) raw[stream] = load_once(streams + stream * params.hidden);
  uint4 const output_raw = load_once(static_cast<__nv_bfloat16 const*>(params.output) + row * params.hidden + channel);
  float comb[kStreams][kStreams];
  float post[kStreams];
  load_quads(params.comb + row * kStreams * kStreams, &comb[0][0], kStreams * kStreams);
  load_quads(params.post + row * kStreams, post, kStreams);
  float output[kVector];
  float values[kStreams][kVector];
  unpack_bf16(output_raw, output);
#pragma unroll
  for (int stream = 0; stream < kStreams; ++stream) unpack_bf16(raw[stream], values[stream]);
  auto* out = static_cast<__nv_bfloat16*>(params.out) + row * kStreams * params.hidden + channel;
#pragma unroll
  for (int to = 0; to < kStreams; ++to) {
    float mixed[kVector];
#pragma unroll
    for (int index = 0; index < kVector; ++index) {
      mixed[index] = post[to] * output[index];
#pragma unroll
      for (int from = 0; from < kStreams; ++from) mixed[index] += comb[from][to] * values[from][index];
    }
    store_vector(out + to * params.hidden, pack_bf16(mixed));
  }
}

template <int kStreams>
Status launch(HyperConnectionPostParams const& params, cudaStream_t stream) {
  int64_t const blocks = (params.rows * (params.hidden / kVector) + kThreads - 1) / kThreads;
  REDKNOT_SUPPORTED(blocks <= INT32_MAX);
  post_kernel<kStreams><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(params);
  REDKNOT_LAUNCHED();
  return Status::kSuccess;
}

}  // namespace

Status hyper_connection_post(HyperConnectionPostParams const& params, cudaStream_t stream) {
  REDKNOT_VALID(params.rows >= 0 && params.hidden > 0);
  REDKNOT_SUPPORTED(params.hidden % kVector == 0 && (params.stream_count == 2 || params.stream_count == 4));
  if (params.rows == 0) return Status::kSuccess;
  REDKNOT_VALID(params.streams != nullptr && params.output != nullptr && params.out != nullptr);
  REDKNOT_VALID(params.post != nullptr && params.comb != nullptr);
  REDKNOT_REQUIRE(aligned(params.streams, 16) && aligned(params.output, 16) && aligned(params.out, 16) &&
                      aligned(params.post, 16) && aligned(params.comb, 16),
                  Status::kMisaligned);
  return params.stream_count == 4 ? launch<4>(params, stream) : launch<2>(params, stream);
}

}  // namespace redknot
