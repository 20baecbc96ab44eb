#pragma once

// The first look of the learned router at 8 x kItems experts: two logits in a register, no exponentials.
//
// A logit plus kSlope times its expert's bias orders experts nearly as the score plus the bias does. From the least
// and the largest bias follows how far the two orders can be apart: a table, worked out once a block, says for what the
// top_k-th best of 32 such sums is what a sum is at least whose expert can be among the chosen. Those few experts,
// of the four rows of a warp together, are spread over its lanes, and chosen from by their exact scores. A warp whose
// rows have more than the lists hold, or no bound, looks closer (four_rows.cuh). Blocks stay; rows come into shared
// memory by bulk copies while the rows before them are worked on.

#include "common/cluster.cuh"
#include "kernels/moe/four_rows.cuh"

namespace redknot::router {

// Copies bytes from device memory into this block: 16 bytes, or a multiple, at multiples of 16 on both sides.
__device__ __forceinline__ void bulk_load(uint32_t shared, void const* global, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
}

inline constexpr int kLookThreads = 256;
template <int kItems>
inline constexpr int kLookBlocks = kItems <= 32 ? 4 : 3;  // of a multiprocessor
inline constexpr int kListed = 32;                        // most candidates of a row
inline constexpr float kSlope = 3.3F;
// Of the table: the bound's lowest value, and its steps.
inline constexpr int kSteps = 512;
inline constexpr float kStepsOfOne = 32.0F;
inline constexpr float kLowest = -8.0F;

// Places where the score rises as 1 in kSlope, with the scores there.
inline constexpr float kLowerTurn = 0.06826F;
inline constexpr float kUpperTurn = 1.95984F;

__device__ __forceinline__ uint32_t add_pairs(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}
__device__ __forceinline__ uint32_t larger_pairs(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}
__device__ __forceinline__ uint32_t smaller_pairs(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}
// All bits of each half that is at least that of b.
__device__ __forceinline__ uint32_t at_least_pairs(uint32_t a, uint32_t b) {
  return __hge2_mask(*reinterpret_cast<__nv_bfloat162 const*>(&a), *reinterpret_cast<__nv_bfloat162 const*>(&b));
}

// What the warps of a block share.
template <int kItems>
struct Looks {
  uint32_t terms[kItems / 2 * kLanes];  // kSlope times the bias less their middle, in order of expert
  uint32_t thresholds[kSteps];          // the same bf16 number twice
  float biases[kItems * kLanes];
  float extremes[2][kLookThreads / kWarp];
  uint16_t experts[(kItems + 31) / 32 * 32];  // of the first lane, by the place of its items among the bits
};

// What the rows of a warp list. Rows lie in different banks.
struct alignas(16) Lists {
  uint64_t keys[kTeams][kListed + 2];  // larger is chosen first: score + bias, then the lower expert; then zeros
  float scores[kTeams][kListed + 1];
  float chosen_scores[kTeams][kLanes];
  int chosen_experts[kTeams][kLanes];
  uint16_t places[kTeams * kListed];  // lane and item, of all rows, one after the other
};

// Adds what the lane `offset` further down holds, where there is one.
__device__ __forceinline__ int add_below(int value, int offset) {
  asm("{\n\t.reg .pred p;\n\t.reg .s32 below;\n\tshfl.sync.up.b32 below|p, %0, %1, 0, 0xffffffff;\n\t"
      "@p add.s32 %0, %0, below;\n\t}"
      : "+r"(value)
      : "r"(offset));
  return value;
}

__device__ __forceinline__ float exact_score(float logit) { return square_root(softplus(logit)); }

// The logit of a score, to 1e-5; -inf where it is none.
__device__ __forceinline__ float logit_of(float score) {
  float const square = score * score;
  float const small = __logf(square) + 0.5F * square;
  float const large = square + __logf(1.0F - __expf(-square));
  return score <= 0.0F ? -INFINITY : square < 0.01F ? small : large;
}

// How far a sum in bf16 is from `sum`, at most: roundings of the logit, the term and the sum.
__device__ __forceinline__ float rounding(float sum, float spread) {
  return 0x1.04p-8F * (fabsf(sum) + kSlope * spread) + 1e-6F;
}

// What a sum is at least whose expert can be among the chosen, where top_k sums are at least `bound`. Biases are
// `spread` from `middle` at most.
__device__ __forceinline__ float threshold_of(float bound, float middle, float spread) {
  // The least score + bias of such a sum: at either end of the biases, or where the score rises as the sum does.
  float const sum = bound - rounding(bound, spread);
  float least = fminf(exact_score(sum + kSlope * spread) - spread, exact_score(sum - kSlope * spread) + spread);
  float const turn = (sum - kLowerTurn) * (1.0F / kSlope);
  if (fabsf(turn) <= spread) least = fminf(least, exact_score(kLowerTurn) + turn);
  least -= 2e-5F * (1.0F + fabsf(least)) + 1e-6F * (fabsf(middle) + spread);
  // And the least sum of an expert that reaches it.
  float lowest = fminf(logit_of(least + spread) - kSlope * spread, logit_of(least - spread) + kSlope * spread);
  float const other = least - exact_score(kUpperTurn);
  if (fabsf(other) <= spread) lowest = fminf(lowest, kUpperTurn + kSlope * other);
  return lowest - rounding(lowest, spread) - 1e-4F;
}

template <typename Logit, int kItems>
__device__ __forceinline__ void prepare(float const* bias, Looks<kItems>& looks) {
  constexpr int kExperts = kItems * kLanes;
  constexpr int kWarps = kLookThreads / kWarp;
  int const thread = static_cast<int>(threadIdx.x);
  float least = INFINITY, most = -INFINITY;
#pragma unroll
  for (int expert = thread; expert < kExperts; expert += kLookThreads) {
    float const value = __ldg(bias + expert);
    least = isnan(value) ? -INFINITY : fminf(least, value);
    most = isnan(value) ? INFINITY : fmaxf(most, value);
  }
  least = -lane_max<kWarp>(-least);
  most = lane_max<kWarp>(most);
  if (thread % kWarp == 0) {
    looks.extremes[0][thread / kWarp] = least;
    looks.extremes[1][thread / kWarp] = most;
  }
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    least = fminf(least, looks.extremes[0][warp]);
    most = fmaxf(most, looks.extremes[1][warp]);
  }
  float const middle = 0.5F * least + 0.5F * most;
  float const spread = fmaxf(most - middle, middle - least);
  if (thread < (kItems + 31) / 32 * 32) {
    int const bit = thread % 32;
    looks.experts[thread] = static_cast<uint16_t>(expert_of<Logit>(thread / 32 * 32 + bit % 16 * 2 + bit / 16, 0));
  }
  for (int pair = thread; pair < kExperts / 2; pair += kLookThreads) {
    float2 const two = __ldg(reinterpret_cast<float2 const*>(bias) + pair);
    looks.terms[pair] = pack_pair(kSlope * (two.x - middle), kSlope * (two.y - middle));
    looks.biases[2 * pair] = two.x;
    looks.biases[2 * pair + 1] = two.y;
  }
  for (int step = thread; step < kSteps; step += kLookThreads) {
    float const threshold = threshold_of(kLowest + static_cast<float>(step) / kStepsOfOne, middle, spread);
    // NaN, where biases are not finite, lets everything through.
    uint32_t const rounded = __bfloat16_as_ushort(__float2bfloat16_rd(isnan(threshold) ? -INFINITY : threshold));
    looks.thresholds[step] = rounded << 16 | rounded;
  }
  __syncthreads();
}

// Maxima of a lane's items, two in a register, are sorted, over the lanes of a row, largest first.
__device__ __forceinline__ uint32_t exchange(uint32_t value, int offset, bool larger) {
  uint32_t const other = __shfl_xor_sync(kAllLanes, value, offset);
  return larger ? larger_pairs(value, other) : smaller_pairs(value, other);
}

// What the top_k-th best sum of the row is at least. NaN where a sum is.
template <int kPairs>
__device__ __forceinline__ float bound_of(uint32_t const (&sums)[kPairs], int top_k, int lane) {
  uint32_t first = sums[0], second = sums[1];
#pragma unroll
  for (int pair = 2; pair < kPairs; pair += 2) {
    first = larger_pairs(first, sums[pair]);
    second = larger_pairs(second, sums[pair + 1]);
  }
  bool const one = (lane & 1) == 0, two = (lane & 2) == 0, four = (lane & 4) == 0;
  bool const one_of_two = one == two, one_of_four = one == four, two_of_four = two == four;
  first = exchange(first, 1, one_of_two);
  second = exchange(second, 1, !one_of_two);
  first = exchange(first, 2, two_of_four);
  second = exchange(second, 2, !two_of_four);
  first = exchange(first, 1, one_of_four);
  second = exchange(second, 1, !one_of_four);
  first = exchange(first, 4, four);
  second = exchange(second, 4, !four);
  first = exchange(first, 2, two);
  second = exchange(second, 2, !two);
  first = exchange(first, 1, one);
  second = exchange(second, 1, !one);
  // One falls with the lane, the other rises: the larger ones are the best eight of both.
  first = larger_pairs(first, second);
  first = exchange(first, 4, four);
  first = exchange(first, 2, two);
  first = exchange(first, 1, one);
  // Of the two sorted lists in the halves: the best i of one and the best top_k - i of the other.
  uint32_t const rest = __shfl_sync(kAllLanes, first, top_k - 2 - lane, kLanes);
  float const low = __uint_as_float(first << 16);
  float const high = __uint_as_float((lane == top_k - 1 ? first : rest) & 0xffff0000U);
  float bound = lane == top_k - 1 ? maximum(low, high) : -maximum(-low, -high);
  if (lane >= top_k) bound = -INFINITY;
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    bound = maximum(bound, __shfl_xor_sync(kAllLanes, bound, offset));
  }
  return bound;
}

// Sums of a lane's items of a row, two in a register: items 2 p and 2 p + 1.
template <int kItems>
__device__ __forceinline__ void sums_of(__nv_bfloat16 const* logits, uint32_t const* terms, int lane,
                                        uint32_t (&sums)[kItems / 2]) {
#pragma unroll
  for (int load = 0; load < kItems / 8; ++load) {
    uint4 const raw = reinterpret_cast<uint4 const*>(logits)[load * kLanes + lane];
    uint4 const term = reinterpret_cast<uint4 const*>(terms)[load * kLanes + lane];
    sums[4 * load] = add_pairs(raw.x, term.x);
    sums[4 * load + 1] = add_pairs(raw.y, term.y);
    sums[4 * load + 2] = add_pairs(raw.z, term.z);
    sums[4 * load + 3] = add_pairs(raw.w, term.w);
  }
}
template <int kItems>
__device__ __forceinline__ void sums_of(float const* logits, uint32_t const* terms, int lane,
                                        uint32_t (&sums)[kItems / 2]) {
#pragma unroll
  for (int load = 0; load < kItems / 4; ++load) {
    float4 const raw = reinterpret_cast<float4 const*>(logits)[load * kLanes + lane];
    uint2 const term = reinterpret_cast<uint2 const*>(terms)[load * kLanes + lane];
    sums[2 * load] = add_pairs(pack_pair(raw.x, raw.y), term.x);
    sums[2 * load + 1] = add_pairs(pack_pair(raw.z, raw.w), term.y);
  }
}

// What a warp has to itself: the rows it works on, and those that are on their way.
template <typename Logit, int kItems>
struct WarpRows {
  static constexpr int kBuffers = 4 / static_cast<int>(sizeof(Logit));
  static constexpr int kRow = kItems * kLanes;
  union {
    Lists lists;
    Team teams[kTeams];
  };
  alignas(128) Logit logits[kBuffers][kTeams * kRow];
  uint64_t full[kBuffers];
};

template <typename Logit, int kItems>
struct LookShared {
  Looks<kItems> looks;
  WarpRows<Logit, kItems> warps[kLookThreads / kWarp];
};

// Rows that a first look does not settle.
template <typename Logit, int kItems>
__device__ __noinline__ void look_closer(RouteLearnedParams const& params, int64_t first, Team* teams) {
  constexpr int kWide = (kItems + 31) / 32 * 32;
  route_four_rows<0, Logit, kWide, kWide == kItems>(params, first, teams);
}

template <int kTopK, typename Logit, int kItems>
__global__ void __launch_bounds__(kLookThreads, kLookBlocks<kItems>)
    packed_look_kernel(__grid_constant__ RouteLearnedParams const params) {
  constexpr int kPairs = kItems / 2;
  constexpr int kWords = (kPairs + 15) / 16;
  constexpr int kWarps = kLookThreads / kWarp;
  using Rows = WarpRows<Logit, kItems>;
  extern __shared__ __align__(128) uint8_t memory[];
  auto& shared = *reinterpret_cast<LookShared<Logit, kItems>*>(memory);
  auto& looks = shared.looks;
  int const top_k = kTopK > 0 ? kTopK : params.top_k;
  int const thread = static_cast<int>(threadIdx.x) % kWarp;
  int const team = thread / kLanes;
  int const lane = thread % kLanes;
  int const warp = static_cast<int>(threadIdx.x) / kWarp;
  Rows& own_rows = shared.warps[warp];
  Lists& lists = own_rows.lists;
  auto const* const logits = static_cast<Logit const*>(params.logits);
  int const rows = static_cast<int>(params.rows);
  int const stride = static_cast<int>(gridDim.x) * kWarps * kTeams;
  int first = (static_cast<int>(blockIdx.x) * kWarps + warp) * kTeams;
  // Starts the copy of the rows from `start` on.
  auto const fill = [&](int start, int buffer) {
    if (start >= rows || thread != 0) return;
    auto const bytes = static_cast<uint32_t>(min(kTeams, rows - start) * Rows::kRow * static_cast<int>(sizeof(Logit)));
    uint32_t const full = ptx::shared_address(own_rows.full + buffer);
    cluster::barrier_expect(full, bytes);
    bulk_load(ptx::shared_address(own_rows.logits[buffer]), logits + static_cast<int64_t>(start) * Rows::kRow, bytes,
              full);
  };
  if (thread == 0) {
    for (int buffer = 0; buffer < Rows::kBuffers; ++buffer) {
      cluster::barrier_init(ptx::shared_address(own_rows.full + buffer), 1);
    }
    cluster::barriers_ready();
  }
  for (int buffer = 0; buffer < Rows::kBuffers; ++buffer) fill(first + buffer * stride, buffer);
  float const tau = params.tau_cell == nullptr ? params.tau : __ldg(params.tau_cell);
  prepare<Logit, kItems>(params.bias, looks);
  int buffer = 0;
  uint32_t parity = 0;
  while (first < rows) {
    uint32_t unsettled = 0;
    int const begin = first;
#pragma unroll 1
    for (uint32_t turn = 1; turn != 0 && first < rows; turn *= 2, first += stride) {
      uint32_t sums[kPairs];
      auto const refill = [&] {
        fill(first + Rows::kBuffers * stride, buffer);
        if (++buffer == Rows::kBuffers) {
          buffer = 0;
          parity ^= 1;
        }
      };
      __syncwarp();
      Logit const* const here = own_rows.logits[buffer];
      cluster::barrier_wait(ptx::shared_address(own_rows.full + buffer), parity);
      sums_of<kItems>(here + min(team, rows - 1 - first) * Rows::kRow, looks.terms, lane, sums);
      float const bound = bound_of<kPairs>(sums, top_k, lane);
      bool const bounded = bound >= kLowest && bound < INFINITY;
      int const step = min(static_cast<int>(fmaf(bound, kStepsOfOne, -kLowest * kStepsOfOne)), kSteps - 1);
      uint32_t const threshold = looks.thresholds[bounded ? step : 0];
      uint32_t above[kWords] = {};  // item 2 p is bit p, item 2 p + 1 bit 16 + p of its word
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        above[pair / 16] |= at_least_pairs(sums[pair], threshold) & (0x00010001U << pair % 16);
      }
      int count = 0;
#pragma unroll
      for (uint32_t const bits : above) count += __popc(bits);
      int through = count;  // of the lanes up to this one
#pragma unroll
      for (int offset = 1; offset < kWarp; offset *= 2) through = add_below(through, offset);
      int const total = __shfl_sync(kAllLanes, through, kWarp - 1);
      int place = through - count;
      int const before = __shfl_sync(kAllLanes, place, 0, kLanes);
      int const listed = __shfl_sync(kAllLanes, through, kLanes - 1, kLanes) - before;
      if (__any_sync(kAllLanes, !bounded || listed > kListed) != 0) {
        unsettled |= turn;
        refill();
        continue;
      }
#pragma unroll
      for (int part = 0; part < kWords; ++part) {
#pragma unroll 1
        for (uint32_t bits = above[part]; bits != 0; ++place) {
          int const bit = 31 - __clz(static_cast<int>(bits));
          bits ^= 1U << bit;
          lists.places[place] = static_cast<uint16_t>(thread * (32 * kWords) + part * 32 + bit);
        }
      }
#pragma unroll
      for (int each = 0; each < kListed / kLanes; each += 2) {
        *reinterpret_cast<ulonglong2*>(lists.keys[team] + each * kLanes + 2 * lane) = ulonglong2{0, 0};
      }
      __syncwarp();
      // Candidates of all rows, a lane each.
      struct Candidate {
        uint64_t key;
        float score;
        int owner;
        int slot;
        bool exists;
      };
      auto const list = [&](int base) {
        Candidate own;
        own.exists = base + thread < total;
        int const found = own.exists ? lists.places[base + thread] : 0;
        int const holder = found / (32 * kWords);
        int const expert = looks.experts[found % (32 * kWords)] + holder % kLanes * kLogits<Logit>;
        own.owner = holder / kLanes;
        own.slot = base + thread - __shfl_sync(kAllLanes, before, own.owner * kLanes);
        own.score = exact_score(to_float(here[min(own.owner, rows - 1 - first) * Rows::kRow + expert]));
        float const value = own.score + looks.biases[expert];
        // There is no NaN here, nor a negative zero.
        uint32_t const bits = __float_as_uint(value);
        uint32_t const order = bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000U);
        own.key = static_cast<uint64_t>(order) << 32 | ~static_cast<uint32_t>(expert);
        if (own.exists) {
          lists.keys[own.owner][own.slot] = own.key;
          lists.scores[own.owner][own.slot] = own.score;
        }
        return own;
      };
      auto const rank = [&](Candidate const& own) {
        int const rivals = __shfl_sync(kAllLanes, listed, own.owner * kLanes);
        if (!own.exists) return;
        int place_of = 0;
#pragma unroll 1
        for (int other = 0; other < rivals; other += 2) {
          ulonglong2 const two = *reinterpret_cast<ulonglong2 const*>(lists.keys[own.owner] + other);
          count_larger(place_of, two.x, own.key);
          count_larger(place_of, two.y, own.key);
        }
        if (place_of < top_k) {
          lists.chosen_scores[own.owner][place_of] = own.score;
          lists.chosen_experts[own.owner][place_of] = static_cast<int>(~static_cast<uint32_t>(own.key));
        }
      };
      if (total <= kWarp) {
        Candidate const own = list(0);
        __syncwarp();
        refill();
        rank(own);
      } else {
#pragma unroll 1
        for (int base = 0; base < total; base += kWarp) list(base);
        __syncwarp();
        refill();
#pragma unroll 1
        for (int base = 0; base < total; base += kWarp) {
          Candidate own;
          own.exists = base + thread < total;
          own.owner = own.exists ? lists.places[base + thread] / (32 * kWords) / kLanes : 0;
          own.slot = base + thread - __shfl_sync(kAllLanes, before, own.owner * kLanes);
          own.key = own.exists ? lists.keys[own.owner][own.slot] : 0;
          own.score = own.exists ? lists.scores[own.owner][own.slot] : 0.0F;
          rank(own);
        }
      }
      __syncwarp();
      // Heaviest first by score, not by score + bias; stable, so equal scores keep the order they were chosen in.
      float const score = lists.chosen_scores[team][lane];
      int const expert = lists.chosen_experts[team][lane];
      int position = 0;
#pragma unroll
      for (int other = 0; other < top_k; ++other) {
        float const rival = lists.chosen_scores[team][other];
        // Scores are not negative: they are ordered as their bits are.
        int const least = __float_as_int(score) - (other < lane ? 1 : 0);
        position += static_cast<int>(static_cast<uint32_t>(least - __float_as_int(rival)) >> 31);
      }
      __syncwarp();
      if (lane < top_k) {
        lists.chosen_scores[team][position] = score;
        lists.chosen_experts[team][position] = expert;
      }
      __syncwarp();
      write_row<kLanes>(top_k, lists.chosen_experts[team][lane], lists.chosen_scores[team][lane], tau, params.scale,
                        static_cast<int64_t>(first + team) * top_k, first + team < rows, params.ids, params.weights);
    }
    for (; unsettled != 0; unsettled &= unsettled - 1) {
      look_closer<Logit, kItems>(params, begin + (__ffs(static_cast<int>(unsettled)) - 1) * stride, own_rows.teams);
      __syncwarp();
    }
  }
}

}  // namespace redknot::router
