#pragma once

// The warps that collapse.

#include "kernels/hyper_connection/one_pass_shape.cuh"

namespace redknot::one_pass {

// A warp that collapses its channels.
template <class S>
struct Collapser : Slice<S> {
  using Slice<S>::block;
  using Slice<S>::warp;
  using Slice<S>::lane;
  using Slice<S>::quad;
  using Slice<S>::row;
  using Slice<S>::channel;
  using Slice<S>::tile_of;
  using Slice<S>::half_of;
  using Slice<S>::streams;
  using Slice<S>::Slice;

  // The weighted sum of the streams of each unit, as bf16, and the squares of what it gives.
  __device__ __forceinline__ void collapse(int of, uint4 (&rounded)[kUnits]) const {
    cluster::barrier_wait(block.loaded(of), block.stage_parity(of));
    cluster::barrier_wait(block.weights_here(of), block.slot_parity(of));
    float squares[S::kTiles] = {};
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      float4 const weight = block.weights(of)[tile_of(unit) * 8 + row];
      float const weights[kStreams] = {weight.x, weight.y, weight.z, weight.w};
      float sums[kVector] = {};
#pragma unroll
      for (int stream = 0; stream < kStreams; ++stream) {
        float values[kVector];
        unpack_bf16(streams(of, unit, stream), values);
#pragma unroll
        for (int at = 0; at < kVector; ++at) sums[at] = fmaf(weights[stream], values[at], sums[at]);
      }
      rounded[unit] = pack_bf16(sums);
#pragma unroll
      for (float const value : sums) squares[tile_of(unit)] = fmaf(value, value, squares[tile_of(unit)]);
    }
#pragma unroll
    for (float& square : squares) square = lane_sum<4>(square);
    if (of >= 2) cluster::barrier_wait(block.squares_taken(of), block.taken_parity(of - 2));
    float* const partial = block.own_squares(of) + warp * S::kRows + row;
#pragma unroll
    for (int tile = 0; tile < S::kTiles; ++tile) {
      if (quad == tile) partial[tile * 8] = squares[tile];
    }
    ptx::barrier_arrive(block.collapsed(of));
  }

  __device__ __forceinline__ void finish(int of, uint4 const (&rounded)[kUnits],
                                         float const (&norm)[S::kHalves][kVector]) const {
    HyperConnectionPreParams const& params = block.params;
    cluster::barrier_wait(block.squares_here(of), block.square_parity(of));
    if (warp == 0 && lane == 0) block.expect_squares(of);
#pragma unroll
    for (int tile = 0; tile < S::kTiles; ++tile) {
      float const* const source = block.squares(of) + quad * S::kSourcePitch + tile * 8 + row;
      float square = 0.0F;
#pragma unroll
      for (int part = 0; part < kCluster; part += 4) square += source[part * S::kSourcePitch];
      float const inverse = rsqrtf(lane_sum<4>(square) / static_cast<float>(S::kHidden) + params.norm_eps);
      int64_t const at = block.first_row(of) + tile * 8 + row;
      auto* const out = static_cast<__nv_bfloat16*>(params.normed) + at * S::kHidden + channel;
#pragma unroll
      for (int half = 0; half < S::kHalves; ++half) {
        float values[kVector];
        unpack_bf16(rounded[tile * S::kHalves + half], values);
#pragma unroll
        for (int slot = 0; slot < kVector; ++slot) values[slot] = norm[half][slot] * (values[slot] * inverse);
        if (at < params.rows) store_vector(out + half * kUnitChannels, pack_bf16(values));
      }
    }
  }
};

// A group's norm needs its squares of all blocks: until they are there, the next group is collapsed.
template <class S>
__device__ void collapse_groups(Block<S> const& block, int lane) {
  Collapser<S> const collapser(block, lane);
  float norm[S::kHalves][kVector];
  bool const works = collapser.warp < S::kWarps;
  cudaGridDependencySynchronize();
  if (works) {
#pragma unroll
    for (int half = 0; half < S::kHalves; ++half) {
      load_weights(block.params.norm, block.params.norm_is_float, collapser.channel + half * kUnitChannels, norm[half]);
    }
  }
  cluster::meet_all();
  if (!works) return;
  uint4 before[kUnits] = {};
  for (int group = 0; group <= block.count; ++group) {
    uint4 rounded[kUnits] = {};
    if (group < block.count) collapser.collapse(group, rounded);
    if (group > 0) collapser.finish(group - 1, before, norm);
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) before[unit] = rounded[unit];
  }
}

}  // namespace redknot::one_pass
