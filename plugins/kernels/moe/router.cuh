#pragma once

// What both routers are made of: a row of logits spread over the lanes of a warp.

#include "common/vector.cuh"
#include "kernels/moe/params.h"

namespace redknot::router {

inline constexpr int kThreads = 128;
inline constexpr int kMinFanout = 3;
inline constexpr float kNormEps = 1e-20F;

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

// Normalises, applies the fanout and writes one row. Lane j of the row's kLanes holds the j-th chosen expert and its
// score, heaviest first; `target` is the row's first output.
template <int kLanes>
__device__ __forceinline__ void write_row(int top_k, int expert, float chosen, float tau, float scale, int64_t target,
                                          bool exists, int64_t* ids, float* weights) {
  int const thread = static_cast<int>(threadIdx.x) % kWarp;
  int const lane = thread % kLanes;
  float sum = lane < top_k ? chosen : 0.0F;
  sum = lane_sum<kLanes>(sum);
  float const weight = lane < top_k ? __fdividef(chosen, sum + kNormEps) : 0.0F;
  float running = weight;  // inclusive prefix sum over lanes
#pragma unroll
  for (int offset = 1; offset < kLanes; offset *= 2) {
    float const below = __shfl_up_sync(kAllLanes, running, offset, kLanes);
    if (lane >= offset) running += below;
  }
  float const total = __shfl_sync(kAllLanes, running, kLanes - 1, kLanes);
  bool const short_of_tau = lane >= kMinFanout - 1 && lane < top_k - 1 && running < tau * total;
  unsigned const short_lanes = __ballot_sync(kAllLanes, short_of_tau) >> (thread - lane);
  unsigned const row_lanes = kAllLanes >> (kWarp - kLanes);
  int const kept = tau >= 1.0F || top_k <= kMinFanout ? top_k : kMinFanout + __popc(short_lanes & row_lanes);
  if (lane >= top_k || !exists) return;
  ids[target + lane] = lane < kept ? expert : -1;
  weights[target + lane] = lane < kept ? weight * scale : 0.0F;
}

// One row by a whole warp, whatever its logits and their number are.
template <int kItems>
__device__ void route_row(RouteLearnedParams const& params, int64_t row) {
  int const lane = static_cast<int>(threadIdx.x) % kWarp;
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
  write_row<kWarp>(params.top_k, sorted_expert, sorted_score, tau, params.scale, row * params.top_k, true, params.ids,
                   params.weights);
}

}  // namespace redknot::router
