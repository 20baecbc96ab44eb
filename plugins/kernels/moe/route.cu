#include "common/check.h"
#include "kernels/moe/four_rows.cuh"
#include "kernels/moe/launch.h"
#include "kernels/moe/router.cuh"

namespace redknot {
namespace {

using router::kThreads;

template <int kItems>
__global__ void __launch_bounds__(kThreads) route_learned_kernel(RouteLearnedParams const params) {
  int64_t const row = static_cast<int64_t>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  if (row < params.rows) router::route_row<kItems>(params, row);
}

template <int kItems>
__global__ void __launch_bounds__(kThreads) route_hash_kernel(RouteHashParams const params) {
  int const lane = static_cast<int>(threadIdx.x) % kWarp;
  int64_t const row = static_cast<int64_t>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  if (row >= params.rows) return;
  float scores[kItems];
  router::load_logits(params.logits, params.logits_are_float, row, params.experts, lane, scores);
  router::score(params.scoring, scores);
  int64_t const token = params.tokens[row];
  bool const known = token >= 0 && token < params.vocab;
  int64_t const listed = known && lane < params.top_k ? params.table[token * params.top_k + lane] : 0;
  bool const inside = listed >= 0 && listed < params.experts;
  bool const good = known && __all_sync(kAllLanes, inside) != 0;
  if (!good && lane == 0) atomicOr(params.faults, known ? kFaultExpert : kFaultToken);
  int const expert = good ? static_cast<int>(listed) : 0;
  float chosen = 0.0F;
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    float const value = __shfl_sync(kAllLanes, scores[item], expert % kWarp);
    if (expert / kWarp == item) chosen = value;
  }
  if (good) {
    router::write_row<kWarp>(params.top_k, expert, chosen, 1.0F, params.scale, row * params.top_k, true, params.ids,
                             params.weights);
  } else if (lane < params.top_k) {
    params.ids[row * params.top_k + lane] = -1;
    params.weights[row * params.top_k + lane] = 0.0F;
  }
}

template <typename Params>
Status check(Params const& params) {
  REDKNOT_VALID(params.rows >= 0 && params.experts > 0 && params.top_k > 0);
  REDKNOT_SUPPORTED(params.experts <= kMaxRoutedExperts && params.top_k <= kMaxTopK && params.rows <= INT32_MAX);
  REDKNOT_VALID(params.rows == 0 || (params.logits != nullptr && params.ids != nullptr && params.weights != nullptr));
  return Status::kSuccess;
}

unsigned blocks(int64_t rows) { return static_cast<unsigned>((rows + kThreads / kWarp - 1) / (kThreads / kWarp)); }

template <typename Logit, int kItems>
void launch_four_rows(RouteLearnedParams const& params, cudaStream_t stream) {
  constexpr int kUsual = 6;  // of both geometries of DeepSeek-V4
  unsigned const grid = blocks((params.rows + router::kTeams - 1) / router::kTeams);
  if (params.top_k != kUsual) {
    router::four_rows_kernel<0, Logit, kItems, false><<<grid, kThreads, 0, stream>>>(params);
  } else if (params.experts == kItems * router::kLanes) {
    router::four_rows_kernel<kUsual, Logit, kItems, true><<<grid, kThreads, 0, stream>>>(params);
  } else {
    router::four_rows_kernel<kUsual, Logit, kItems, false><<<grid, kThreads, 0, stream>>>(params);
  }
}

template <typename Logit>
void launch_four_rows(RouteLearnedParams const& params, cudaStream_t stream) {
  params.experts <= 256 ? launch_four_rows<Logit, 32>(params, stream) : launch_four_rows<Logit, 64>(params, stream);
}

}  // namespace

Status moe_route_learned(RouteLearnedParams const& params, cudaStream_t stream) {
  REDKNOT_TRY(check(params));
  REDKNOT_VALID(params.top_k <= params.experts);
  if (params.rows == 0) return Status::kSuccess;
  REDKNOT_VALID(params.bias != nullptr);
  bool const fits = router::serves_four_rows(params) && aligned(params.logits, 16) && aligned(params.bias, 16);
  if (fits && params.logits_are_float) {
    launch_four_rows<float>(params, stream);
  } else if (fits) {
    launch_four_rows<__nv_bfloat16>(params, stream);
  } else if (params.experts <= 256) {
    route_learned_kernel<8><<<blocks(params.rows), kThreads, 0, stream>>>(params);
  } else {
    route_learned_kernel<16><<<blocks(params.rows), kThreads, 0, stream>>>(params);
  }
  REDKNOT_LAUNCHED();
  return Status::kSuccess;
}

Status moe_route_hash(RouteHashParams const& params, cudaStream_t stream) {
  REDKNOT_TRY(check(params));
  REDKNOT_VALID(params.faults != nullptr && params.vocab >= 0);
  REDKNOT_CUDA(cudaMemsetAsync(params.faults, 0, sizeof(int32_t), stream));
  if (params.rows == 0) return Status::kSuccess;
  REDKNOT_VALID(params.tokens != nullptr && (params.vocab == 0 || params.table != nullptr));
  if (params.experts <= 256) {
    route_hash_kernel<8><<<blocks(params.rows), kThreads, 0, stream>>>(params);
  } else {
    route_hash_kernel<16><<<blocks(params.rows), kThreads, 0, stream>>>(params);
  }
  REDKNOT_LAUNCHED();
  return Status::kSuccess;
}

}  // namespace redknot
