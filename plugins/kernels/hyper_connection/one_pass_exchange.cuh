#pragma once

// The warps that send partial sums to the other blocks of the cluster, and those that make weights of what has come.

#include "kernels/hyper_connection/one_pass_shape.cuh"
#include "kernels/hyper_connection/weights.cuh"

namespace redknot::one_pass {

// The warp that sums the warps' partial mixes and sends them, a quad of floats a lane, to the blocks that weigh them.
template <class S>
__device__ void send_mixes(Block<S> const& block, int lane) {
  constexpr int kQuads = kLine / 4;
  constexpr int kItems = S::kRows * kQuads;
  for (int group = 0; group < block.count; ++group) {
    cluster::barrier_wait(block.partials_here(group), block.taken_parity(group));
    auto const* const source = reinterpret_cast<float4 const*>(block.partials(group));
    constexpr int kRounds = (kItems + kWarp - 1) / kWarp;
    float4 sums[kRounds];
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      int const item = min(round * kWarp + lane, kItems - 1);
      float4 sum{0, 0, 0, 0};
#pragma unroll
      for (int warp = 0; warp < S::kWarps; ++warp) {
        float4 const part = source[warp * kItems + item];
        sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
      }
      sums[round] = sum;
    }
    ptx::barrier_arrive(block.mixes_taken(group));
    ptx::barrier_arrive(block.mixed(group));
    uint32_t const target = ptx::shared_address(block.received(group) + block.rank * kLine);
    uint32_t const barrier = block.mixes_here(group);
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      int const item = round * kWarp + lane;
      if (item >= kItems) break;
      int const row = item / kQuads;
      cluster::store(cluster::address_in(target + item % kQuads * 16, row), sums[round],
                     cluster::address_in(barrier, row));
    }
  }
}

// The warp that starts copies of later groups, and sends squares of the collapse to all blocks.
template <class S>
__device__ void send_squares(Block<S> const& block, CUtensorMap const* streams, int lane) {
  for (int group = 0; group < block.count; ++group) {
    cluster::barrier_wait(block.collapsed(group), block.taken_parity(group));
    if (group + S::kStages < block.count) {
      cluster::barrier_wait(block.mixed(group), block.stage_parity(group));
      if (lane == 0) block.load(group + S::kStages, streams);
      __syncwarp();
    }
    float4 sum{0, 0, 0, 0};
    if (lane < S::kWarps * S::kRowQuads) sum = reinterpret_cast<float4 const*>(block.own_squares(group))[lane];
    ptx::barrier_arrive(block.squares_taken(group));
#pragma unroll
    for (int offset = S::kRowQuads; offset < kWarp; offset *= 2) {
      sum.x += __shfl_xor_sync(kAllLanes, sum.x, offset);
      sum.y += __shfl_xor_sync(kAllLanes, sum.y, offset);
      sum.z += __shfl_xor_sync(kAllLanes, sum.z, offset);
      sum.w += __shfl_xor_sync(kAllLanes, sum.w, offset);
    }
    uint32_t const target = ptx::shared_address(block.squares(group) + block.rank * S::kSourcePitch);
    uint32_t const barrier = block.squares_here(group);
#pragma unroll
    for (int item = lane; item < kCluster * S::kRowQuads; item += kWarp) {
      int const peer = item / S::kRowQuads;
      cluster::store(cluster::address_in(target + item % S::kRowQuads * 16, peer), sum,
                     cluster::address_in(barrier, peer));
    }
    if (lane == 0) block.expect_weights(group);
    __syncwarp();
  }
}

__device__ __forceinline__ void store_weights(float* target, float const (&weights)[kStreams]) {
  store_vector(target, {__float_as_uint(weights[0]), __float_as_uint(weights[1]), __float_as_uint(weights[2]),
                        __float_as_uint(weights[3])});
}

// The warp that works out post and comb of weighed rows, one a lane, when as many as are balanced together wait.
template <class S>
__device__ void balance_rows(Block<S> const& block, int lane) {
  if (block.rank >= S::kRows) return;
  HyperConnectionPreParams const& params = block.params;
  int batch = 0;
  for (int first = -block.missing(); first < block.count; first += kPending, ++batch) {
    __syncwarp();
    cluster::barrier_wait(block.pending_full(), batch & 1);
    float const* const source =
        reinterpret_cast<float const*>(block.shared + S::kWaiting) + lane % kPending * kPendingPitch;
    float mix[kMixes];
#pragma unroll
    for (int value = kStreams; value < kMixes; ++value) mix[value] = source[value - kStreams];
    ptx::barrier_arrive(block.pending_taken());
    int64_t const row = block.first_row(first + lane) + block.rank;
    if (lane >= kPending || first + lane < 0 || row >= params.rows) continue;
    float post[kStreams];
#pragma unroll
    for (int stream = 0; stream < kStreams; ++stream) post[stream] = post_weight<kStreams>(params, mix, 1.0F, stream);
    store_weights(params.post + row * kStreams, post);
    float comb[kStreams][kStreams];
    balance<kStreams>(params, mix, 1.0F, comb);
#pragma unroll
    for (int line = 0; line < kStreams; ++line) {
      store_weights(params.comb + (row * kStreams + line) * kStreams, comb[line]);
    }
  }
}

// The warp that weighs row `rank` of every group.
template <class S>
__device__ void weigh_rows(Block<S> const& block, int lane) {
  if (block.rank >= S::kRows) return;
  HyperConnectionPreParams const& params = block.params;
  float const scale = params.scale[0];
  float const base = lane < kStreams ? params.base[lane] : 0.0F;
  float const inverse_depth = 1.0F / static_cast<float>(kStreams * S::kHidden);
  float* const pending = reinterpret_cast<float*>(block.shared + S::kWaiting);
  for (int group = 0; group < block.count; ++group) {
    cluster::barrier_wait(block.mixes_here(group), block.slot_parity(group));
    if (lane == 0) block.expect_mixes(group);
    float sum = 0.0F;
    if (lane < kSent) {
      float const* const source = block.received(group) + lane;
#pragma unroll
      for (int part = 0; part < kCluster; ++part) sum += source[part * kLine];
    }
    float const inverse = rsqrtf(__shfl_sync(kAllLanes, sum, kSquares) * inverse_depth + params.norm_eps);
    float const weight = sigmoid(sum * inverse * scale + base) + params.eps;
    float4 const pre{__shfl_sync(kAllLanes, weight, 0), __shfl_sync(kAllLanes, weight, 1),
                     __shfl_sync(kAllLanes, weight, 2), __shfl_sync(kAllLanes, weight, 3)};
    if (lane < kCluster) {
      uint32_t const target = ptx::shared_address(block.weights(group) + block.rank);
      cluster::store(cluster::address_in(target, lane), pre, cluster::address_in(block.weights_here(group), lane));
    }
    int const waiting = (group + block.missing()) % kPending;
    int const batch = (group + block.missing()) / kPending;
    if (waiting == 0 && batch > 0) cluster::barrier_wait(block.pending_taken(), (batch - 1) & 1);
    if (lane >= kStreams && lane < kMixes) pending[waiting * kPendingPitch + lane - kStreams] = sum * inverse;
    if (waiting + 1 == kPending) ptx::barrier_arrive(block.pending_full());
  }
}

}  // namespace redknot::one_pass
