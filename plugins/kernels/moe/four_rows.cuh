#pragma once

// The learned router of DeepSeek-V4 (sqrt(softplus), up to 8 of up to 512 experts), four rows a warp.
//
// Eight lanes hold a row, each up to 64 of its experts. Scores are worked out twice: for all experts to about 2e-4, in
// as few instructions as that takes, and exactly for those that can be among the chosen. The sixth best (top_k-th) of
// 32 maxima over parts of the row bounds the top_k-th best expert from below, so few experts remain: seldom more than
// lanes. A warp whose rows have NaN, fewer finite maxima than choices, or more candidates than fit (very many equal
// scores) routes its rows one by one, the general way.

#include "common/ptx.cuh"
#include "kernels/moe/router.cuh"

namespace redknot::router {

inline constexpr int kLanes = 8;  // of a row, and the most experts a row chooses
inline constexpr int kTeams = kWarp / kLanes;
inline constexpr int kCandidates = 2 * kLanes;
inline constexpr int kParts = 4;  // of a lane's experts, whose maxima bound the choice
// Twice what approximate_score can be away from the exact one, for scores up to 1024.
inline constexpr float kMargin = 5e-4F;
inline constexpr float kRelativeMargin = 4e-6F;

inline bool serves_four_rows(RouteLearnedParams const& params) {
  return params.scoring == Scoring::kSqrtSoftplus && params.experts % 8 == 0 && params.top_k <= kLanes;
}

__device__ __forceinline__ float maximum(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// sqrt(log(1 + e^x)) to 1.7e-4: log(1 + e) = e P(e) with P the cubic whose largest relative error on [0, 1], 4e-4, is
// least. A logarithm would keep the unit of special functions busy for longer than the rest takes.
__device__ __forceinline__ float approximate_score(float logit) {
  float const e = ptx::exp2_fast(-fabsf(logit) * ptx::kLog2E);
  float root;
  float const cubic = fmaf(fmaf(fmaf(-0.074343182F, e, 0.25402513F), e, -0.48641419F), e, 0.99960703F);
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(fmaf(e, cubic, fmaxf(logit, 0.0F))));
  return root;
}

template <typename Logit>
inline constexpr int kLogits = 16 / static_cast<int>(sizeof(Logit));  // of one 16-byte load

__device__ __forceinline__ void unpack_logits(uint4 raw, float (&values)[4]) {
  values[0] = __uint_as_float(raw.x), values[1] = __uint_as_float(raw.y);
  values[2] = __uint_as_float(raw.z), values[3] = __uint_as_float(raw.w);
}
__device__ __forceinline__ void unpack_logits(uint4 raw, float (&values)[kVector]) { unpack_bf16(raw, values); }

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

// The expert of a lane's item: lanes take turns, 16 bytes each.
template <typename Logit>
__device__ __forceinline__ int expert_of(int item, int lane) {
  return (item / kLogits<Logit> * kLanes + lane) * kLogits<Logit> + item % kLogits<Logit>;
}

// What the lanes of a row tell each other.
struct alignas(16) Team {
  uint64_t keys[kCandidates];  // larger is chosen first: score + bias, then the lower expert
  float scores[kCandidates];
  int experts[kCandidates];
  float chosen_scores[kLanes];
  int chosen_experts[kLanes];
  int unused[kLanes];  // the teams of a warp lie in different banks
};

// Approximate score + bias of a lane's items; -inf past the last expert, which kWhole says there is none of.
template <typename Logit, int kItems, bool kWhole>
__device__ __forceinline__ void load_values(Logit const* logits, float const* bias, int experts, int lane,
                                            float (&values)[kItems]) {
  constexpr int kEach = kLogits<Logit>;
  constexpr int kLoads = kItems / kEach;
  float4 const kNone{-INFINITY, -INFINITY, -INFINITY, -INFINITY};
  uint4 raw[kLoads];
  logits += lane * kEach;
  bias += lane * kEach;
#pragma unroll
  for (int load = 0; load < kLoads; ++load) {
    int const offset = load * kLanes * kEach;
    bool const inside = kWhole || offset + lane * kEach < experts;
    raw[load] = inside ? __ldg(reinterpret_cast<uint4 const*>(logits + offset)) : uint4{0, 0, 0, 0};
  }
#pragma unroll
  for (int load = 0; load < kLoads; ++load) {
    float found[kEach];
    unpack_logits(raw[load], found);
#pragma unroll
    for (int index = 0; index < kEach; index += 4) {
      int const offset = load * kLanes * kEach;
      bool const inside = kWhole || offset + lane * kEach < experts;
      float4 const added = inside ? __ldg(reinterpret_cast<float4 const*>(bias + offset + index)) : kNone;
      float const four[4] = {added.x, added.y, added.z, added.w};
#pragma unroll
      for (int other = 0; other < 4; ++other) {
        values[load * kEach + index + other] = approximate_score(found[index + other]) + four[other];
      }
    }
  }
}

// What the top_k-th best value of the row is at least: that of 8 x kParts maxima. NaN where a value is.
template <int kItems>
__device__ __forceinline__ float lower_bound(float const (&values)[kItems], int top_k) {
  float parts[kParts];
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    parts[item % kParts] = item < kParts ? values[item] : maximum(parts[item % kParts], values[item]);
  }
  float bound = 0.0F;
#pragma unroll
  for (int rank = 0; rank < top_k; ++rank) {
    bound = parts[0];
#pragma unroll
    for (int part = 1; part < kParts; ++part) bound = maximum(bound, parts[part]);
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) {
      bound = maximum(bound, __shfl_xor_sync(kAllLanes, bound, offset));
    }
#pragma unroll
    for (float& part : parts) part = part == bound ? -INFINITY : part;
  }
  return bound;
}

// Chooses among the `total` experts that the team lists, by their exact scores, and writes the row.
template <typename Logit>
__device__ __forceinline__ void choose(RouteLearnedParams const& params, int top_k, Team& team, Logit const* logits,
                                       int total, int lane, int64_t row, bool exists) {
  int const most = static_cast<int>(__reduce_max_sync(kAllLanes, static_cast<unsigned>(total)));
  uint64_t keys[2] = {};
  float scores[2];
  int experts[2];
#pragma unroll
  for (int round = 0; round < 2; ++round) {
    int const own = round * kLanes + lane;
    if (round * kLanes < most) {
      bool const mine = own < total;
      int const expert = mine ? team.experts[own] : 0;
      float const score = square_root(softplus(to_float(logits[expert])));
      uint32_t const order = ordered(score + __ldg(params.bias + expert));
      keys[round] = mine ? static_cast<uint64_t>(order) << 32 | ~static_cast<uint32_t>(expert) : 0;
      scores[round] = score;
      experts[round] = expert;
      team.keys[own] = keys[round];
    }
  }
  __syncwarp();
  int ranks[2] = {};
  for (int other = 0; other < most; other += 2) {
    ulonglong2 const rivals = *reinterpret_cast<ulonglong2 const*>(team.keys + other);
#pragma unroll
    for (int round = 0; round < 2; ++round) {
      ranks[round] += rivals.x > keys[round] ? 1 : 0;
      ranks[round] += rivals.y > keys[round] ? 1 : 0;
    }
  }
#pragma unroll
  for (int round = 0; round < 2; ++round) {
    if (round * kLanes + lane < total && ranks[round] < top_k) {
      team.chosen_scores[ranks[round]] = scores[round];
      team.chosen_experts[ranks[round]] = experts[round];
    }
  }
  __syncwarp();
  // Heaviest first by score, not by score + bias; stable, so equal scores keep the order they were chosen in.
  float const score = team.chosen_scores[lane];
  int const expert = team.chosen_experts[lane];
  int position = 0;
#pragma unroll
  for (int other = 0; other < top_k; ++other) {
    float const rival = __shfl_sync(kAllLanes, score, other, kLanes);
    position += rival > score || (rival == score && other < lane) ? 1 : 0;
  }
  __syncwarp();
  if (lane < top_k) {
    team.chosen_scores[position] = score;
    team.chosen_experts[position] = expert;
  }
  __syncwarp();
  float const tau = params.tau_cell == nullptr ? params.tau : __ldg(params.tau_cell);
  write_row<kLanes>(top_k, team.chosen_experts[lane], team.chosen_scores[lane], tau, params.scale, row * top_k, exists,
                    params.ids, params.weights);
}

template <int kItems>
__device__ __noinline__ void route_one_by_one(RouteLearnedParams const& params, int64_t first) {
  for (int64_t row = first; row < min(params.rows, first + kTeams); ++row) {
    route_row<kItems * kLanes / kWarp>(params, row);
  }
}

// kTopK: how many are chosen, 0 where the compiler does not know.
template <int kTopK, typename Logit, int kItems, bool kWhole>
__global__ void __launch_bounds__(kThreads) four_rows_kernel(__grid_constant__ RouteLearnedParams const params) {
  constexpr int kBits = 32;
  int const top_k = kTopK > 0 ? kTopK : params.top_k;
  __shared__ Team teams[kThreads / kLanes];
  Team& team = teams[threadIdx.x / kLanes];
  int const lane = static_cast<int>(threadIdx.x) % kLanes;
  int64_t const first = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp * kTeams;
  if (first >= params.rows) return;
  int64_t const own = first + threadIdx.x % kWarp / kLanes;
  int64_t const row = min(own, params.rows - 1);
  auto const* const logits = static_cast<Logit const*>(params.logits) + row * params.experts;

  float values[kItems];
  load_values<Logit, kItems, kWhole>(logits, params.bias, params.experts, lane, values);
  float bound = lower_bound(values, top_k);
  bool const bounded = isfinite(bound);
  bound -= kMargin + kRelativeMargin * fabsf(bound);
  uint32_t above[kItems / kBits] = {};  // the first item is the highest bit
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    uint32_t& bits = above[item / kBits];
    bits = __funnelshift_l(__float_as_uint(bound - values[item]), bits, 1);
  }
  int count = 0;
#pragma unroll
  for (uint32_t const bits : above) count += __popc(bits);
  int through = count;
#pragma unroll
  for (int offset = 1; offset < kLanes; offset *= 2) {
    int const below = __shfl_up_sync(kAllLanes, through, offset, kLanes);
    if (lane >= offset) through += below;
  }
  int const total = __shfl_sync(kAllLanes, through, kLanes - 1, kLanes);
  if (__any_sync(kAllLanes, !bounded || total > kCandidates) != 0) {
    route_one_by_one<kItems>(params, first);
    return;
  }
  int place = through - count;
#pragma unroll
  for (int part = 0; part < kItems / kBits; ++part) {
    for (uint32_t bits = above[part]; bits != 0; ++place) {
      int const item = __clz(static_cast<int>(bits));
      bits ^= 0x80000000U >> item;
      team.experts[place] = expert_of<Logit>(part * kBits + item, lane);
    }
  }
  __syncwarp();
  choose(params, top_k, team, logits, total, lane, row, own < params.rows);
}

}  // namespace redknot::router
