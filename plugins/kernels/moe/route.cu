#include "common/check.h"
#include "common/vector.cuh"
#include "kernels/moe/launch.h"

namespace redknot {
namespace {

constexpr int kThreads = 128;  // four rows, a warp each
constexpr int kMaxTopK = 32;
constexpr int kMinFanout = 3;
constexpr float kNormEps = 1e-20F;

// log(1 + e^x) to a few units in the last place: log1p by its series where 1 + e^-|x| would round e^-|x| away.
__device__ __forceinline__ float softplus(float value) {
  float const e = __expf(-fabsf(value));
  float const series = e * (1.0F - e * (0.5F - e * (1.0F / 3.0F - e * 0.25F)));
  return fmaxf(value, 0.0F) + (e < 0.02F ? series : __logf(1.0F + e));
}

__device__ __forceinline__ float square_root(float value) {
  float result;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

template <int kItems>
__device__ __forceinline__ void load_logits(void const* logits, bool is_float, int64_t row, int experts, int lane,
                                            float (&values)[kItems]) {
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    int const expert = item * kWarp + lane;
    values[item] = -INFINITY;
    if (expert >= experts) continue;
    int64_t const offset = row * experts + expert;
    values[item] = is_float ? __ldg(static_cast<float const*>(logits) + offset)
                            : __bfloat162float(static_cast<__nv_bfloat16 const*>(logits)[offset]);
  }
}

// Scores of one row from its logits, spread over the lanes of a warp.
template <int kItems>
__device__ __forceinline__ void score(Scoring scoring, float (&values)[kItems]) {
  if (scoring == Scoring::kSoftmax) {
    float peak = -INFINITY;
#pragma unroll
    for (float const value : values) peak = fmaxf(peak, value);
    peak = lane_max<kWarp>(peak);
    float total = 0.0F;
#pragma unroll
    for (float& value : values) {
      value = expf(value - peak);
      total += value;
    }
    total = lane_sum<kWarp>(total);
#pragma unroll
    for (float& value : values) value /= total;
    return;
  }
#pragma unroll
  for (float& value : values) {
    value = scoring == Scoring::kSigmoid ? __fdividef(1.0F, 1.0F + __expf(-value)) : square_root(softplus(value));
  }
}

// Unsigned order of floats as torch sorts them: NaN above everything.
__device__ __forceinline__ uint32_t ordered(float value) {
  if (isnan(value)) return 0xffffffffU;
  uint32_t const bits = __float_as_uint(value == 0.0F ? 0.0F : value);
  return bits >> 31 != 0 ? ~bits : bits | 0x80000000U;
}

// Normalises, applies the fanout and writes one row. Lane j holds the j-th chosen expert and its score, heaviest first.
__device__ __forceinline__ void write_row(int lane, int top_k, int expert, float chosen, float tau, float scale,
                                          int64_t* ids, float* weights) {
  float sum = lane < top_k ? chosen : 0.0F;
  sum = lane_sum<kWarp>(sum);
  float const weight = lane < top_k ? chosen / (sum + kNormEps) : 0.0F;
  float running = weight;  // inclusive prefix sum over lanes
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    float const below = __shfl_up_sync(kAllLanes, running, offset);
    if (lane >= offset) running += below;
  }
  float const total = __shfl_sync(kAllLanes, running, kWarp - 1);
  bool const short_of_tau = lane >= kMinFanout - 1 && lane < top_k - 1 && running / total < tau;
  int const kept =
      tau >= 1.0F || top_k <= kMinFanout ? top_k : kMinFanout + __popc(__ballot_sync(kAllLanes, short_of_tau));
  if (lane >= top_k) return;
  ids[lane] = lane < kept ? expert : -1;
  weights[lane] = lane < kept ? weight * scale : 0.0F;
}

template <int kItems>
__global__ void __launch_bounds__(kThreads) route_learned_kernel(RouteLearnedParams const params) {
  int const lane = static_cast<int>(threadIdx.x) % kWarp;
  int64_t const row = static_cast<int64_t>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  if (row >= params.rows) return;
  float scores[kItems];
  load_logits(params.logits, params.logits_are_float, row, params.experts, lane, scores);
  score(params.scoring, scores);
  uint32_t orders[kItems];  // of score + bias; 0, below every number, once taken or absent
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    int const expert = item * kWarp + lane;
    orders[item] = expert < params.experts ? ordered(scores[item] + __ldg(params.bias + expert)) : 0U;
  }
  int expert = -1;
  float chosen = 0.0F;
  for (int rank = 0; rank < params.top_k; ++rank) {
    uint32_t mine = 0;
#pragma unroll
    for (uint32_t const order : orders) mine = max(mine, order);
    uint32_t const best = __reduce_max_sync(kAllLanes, mine);
    unsigned lowest = UINT32_MAX;  // ties fall to the lower expert
#pragma unroll
    for (int item = kItems - 1; item >= 0; --item) {
      if (orders[item] == best) lowest = static_cast<unsigned>(item * kWarp + lane);
    }
    unsigned const winner = __reduce_min_sync(kAllLanes, lowest);
    float held = 0.0F;
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      if (static_cast<unsigned>(item * kWarp + lane) != winner) continue;
      orders[item] = 0;
      held = scores[item];
    }
    float const value = __shfl_sync(kAllLanes, held, static_cast<int>(winner % kWarp));
    if (lane == rank) {
      expert = static_cast<int>(winner);
      chosen = value;
    }
  }
  // Heaviest first by score, not by score + bias; stable, so equal scores keep the order they were chosen in.
  uint32_t const order = ordered(chosen);
  int position = 0;
  for (int other = 0; other < params.top_k; ++other) {
    uint32_t const rival = __shfl_sync(kAllLanes, order, other);
    position += rival > order || (rival == order && other < lane) ? 1 : 0;
  }
  int source = lane;
  for (int other = 0; other < params.top_k; ++other) {
    if (__shfl_sync(kAllLanes, position, other) == lane) source = other;
  }
  int const sorted_expert = __shfl_sync(kAllLanes, expert, source);
  float const sorted_score = __shfl_sync(kAllLanes, chosen, source);
  float const tau = params.tau_cell == nullptr ? params.tau : __ldg(params.tau_cell);
  write_row(lane, params.top_k, sorted_expert, sorted_score, tau, params.scale, params.ids + row * params.top_k,
            params.weights + row * params.top_k);
}

template <int kItems>
__global__ void __launch_bounds__(kThreads) route_hash_kernel(RouteHashParams const params) {
  int const lane = static_cast<int>(threadIdx.x) % kWarp;
  int64_t const row = static_cast<int64_t>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  if (row >= params.rows) return;
  float scores[kItems];
  load_logits(params.logits, params.logits_are_float, row, params.experts, lane, scores);
  score(params.scoring, scores);
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
    write_row(lane, params.top_k, expert, chosen, 1.0F, params.scale, params.ids + row * params.top_k,
              params.weights + row * params.top_k);
  } else if (lane < params.top_k) {
    params.ids[row * params.top_k + lane] = -1;
    params.weights[row * params.top_k + lane] = 0.0F;
  }
}

template <typename Params>
Status check(Params const& params) {
  REDKNOT_VALID(params.rows >= 0 && params.experts > 0 && params.top_k > 0);
  REDKNOT_SUPPORTED(params.experts <= 512 && params.top_k <= kMaxTopK && params.rows <= INT32_MAX);
  REDKNOT_VALID(params.rows == 0 || (params.logits != nullptr && params.ids != nullptr && params.weights != nullptr));
  return Status::kSuccess;
}

unsigned blocks(int64_t rows) { return static_cast<unsigned>((rows + kThreads / kWarp - 1) / (kThreads / kWarp)); }

}  // namespace

Status moe_route_learned(RouteLearnedParams const& params, cudaStream_t stream) {
  REDKNOT_REQUIRE(check(params) == Status::kSuccess, check(params));
  REDKNOT_VALID(params.top_k <= params.experts);
  if (params.rows == 0) return Status::kSuccess;
  REDKNOT_VALID(params.bias != nullptr);
  if (params.experts <= 256) {
    route_learned_kernel<8><<<blocks(params.rows), kThreads, 0, stream>>>(params);
  } else {
    route_learned_kernel<16><<<blocks(params.rows), kThreads, 0, stream>>>(params);
  }
  REDKNOT_LAUNCHED();
  return Status::kSuccess;
}

Status moe_route_hash(RouteHashParams const& params, cudaStream_t stream) {
  REDKNOT_REQUIRE(check(params) == Status::kSuccess, check(params));
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
