#pragma once

// The warps that mix.

#include "kernels/hyper_connection/one_pass_shape.cuh"

namespace redknot::one_pass {

// Terms of fn as operands of products, a quad of words a lane. An operand has 16 terms (lane / 4 and that plus eight)
// of eight of the lane's channels of one stream. Tile 0: high terms of the first 16 mixes; tile 1: both terms of the
// last eight; tile 2: low terms of the first 16. Two bf16 terms have 16 bits of mantissa.
struct Terms {
  uint4 quads[kKeptQuads];
};
// Where tile `tile` of a half, stream and pair of words is: the first kKeptQuads are in registers, others in shared
// memory.
template <class S>
__device__ __forceinline__ constexpr int quad_index(int tile, int half, int stream, int at) {
  return (tile * S::kHalves + half) * kSteps + stream * (kVector / 4) + at / 2;
}

// Both terms of eight channels of a mix.
__device__ __forceinline__ void split_terms(float const* fn, uint32_t (&high)[kVector / 2],
                                            uint32_t (&low)[kVector / 2]) {
  float values[kVector];
  load_floats(fn, values);
#pragma unroll
  for (int pair = 0; pair < kVector / 2; ++pair) {
    high[pair] = ptx::pack_bf16(values[2 * pair], values[2 * pair + 1]);
    float2 const whole = ptx::unpack_bf16(high[pair]);
    low[pair] = ptx::pack_bf16(values[2 * pair] - whole.x, values[2 * pair + 1] - whole.y);
  }
}

// A warp that mixes: partial sums of its channels.
template <class S>
struct Mixer : Slice<S> {
  using Slice<S>::block;
  using Slice<S>::warp;
  using Slice<S>::lane;
  using Slice<S>::quad;
  using Slice<S>::row;
  using Slice<S>::channel;
  using Slice<S>::half_of;
  using Slice<S>::streams;
  using Slice<S>::row_of;
  using Slice<S>::Slice;

  // Where the lane keeps an operand that is not in registers.
  __device__ __forceinline__ uint4* shared_quad(int index) const {
    return reinterpret_cast<uint4*>(block.shared + S::kTermsAt +
                                    (warp * S::kSharedQuads + index - kKeptQuads) * kQuadBytes) +
           lane;
  }

  // Brings fn into the L2 cache, whatever the kernel before this one still writes.
  __device__ __forceinline__ void prefetch_terms() const {
    for (int line = lane; line < kMixes * kStreams * S::kHalves; line += kWarp) {
      ptx::prefetch(block.params.fn + static_cast<int64_t>(line / S::kHalves) * S::kHidden +
                    (block.rank * S::kWarps + warp) * S::kWarpChannels + line % S::kHalves * kUnitChannels);
    }
  }

  __device__ __forceinline__ void load_terms(Terms& kept) const {
#pragma unroll
    for (int half = 0; half < S::kHalves; ++half) {
#pragma unroll
      for (int stream = 0; stream < kStreams; ++stream) {
        uint32_t high[kMixRows][kVector / 2], low[kMixRows][kVector / 2];
#pragma unroll
        for (int part = 0; part < kMixRows; ++part) {
          int64_t const line = static_cast<int64_t>(lane / 4 + 8 * part) * kStreams + stream;
          split_terms(block.params.fn + line * S::kHidden + channel + half * kUnitChannels, high[part], low[part]);
        }
#pragma unroll
        for (int at = 0; at < kVector / 2; at += 2) {
          uint4 const quads[kTerms] = {{high[0][at], high[1][at], high[0][at + 1], high[1][at + 1]},
                                       {high[2][at], low[2][at], high[2][at + 1], low[2][at + 1]},
                                       {low[0][at], low[1][at], low[0][at + 1], low[1][at + 1]}};
#pragma unroll
          for (int tile = 0; tile < kTerms; ++tile) {
            int const index = quad_index<S>(tile, half, stream, at);
            if (index < kKeptQuads) {
              kept.quads[index] = quads[tile];
            } else {
              *shared_quad(index) = quads[tile];
            }
          }
        }
      }
    }
  }

  // Sums of one tile of rows: fn is the A operand, rows are the columns of B.
  struct Sums {
    float mixes[kTerms][4] = {};
    // Rows times rows: their squares are the diagonals of the upper half of `even` and the lower one of `odd`.
    float even[4] = {};
    float odd[4] = {};
  };

  __device__ __forceinline__ void mix_unit(int of, int unit, Terms const& kept, Sums& sums) const {
#pragma unroll
    for (int stream = 0; stream < kStreams; ++stream) {
      uint4 const raw = streams(of, unit, stream);
      uint32_t const words[kVector / 2] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
      for (int at = 0; at < kVector / 2; at += 2) {
#pragma unroll
        for (int tile = 0; tile < kTerms; ++tile) {
          int const index = quad_index<S>(tile, half_of(unit), stream, at);
          uint4 const quad = index < kKeptQuads ? kept.quads[index < kKeptQuads ? index : 0] : *shared_quad(index);
          ptx::mma_bf16(sums.mixes[tile], quad.x, quad.y, quad.z, quad.w, words[at], words[at + 1]);
        }
        ptx::mma_bf16_short(sums.even, words[at], words[at + 1], words[at]);
        ptx::mma_bf16_short(sums.odd, words[at], words[at + 1], words[at + 1]);
      }
    }
  }

  __device__ __forceinline__ void store_sums(int of, int tile, Sums const& sums) const {
    int const group = lane / 4;
    float* const target = block.partials(of) + (warp * S::kRows + tile * 8 + row_of(2 * quad)) * kLine;
    constexpr int kNext = 4 * kLine;  // from column 2 q to the next
    float const(&mixes)[kTerms][4] = sums.mixes;
    float const both[kMixRows][2] = {{mixes[0][0] + mixes[2][0], mixes[0][1] + mixes[2][1]},
                                     {mixes[0][2] + mixes[2][2], mixes[0][3] + mixes[2][3]},
                                     {mixes[1][0] + mixes[1][2], mixes[1][1] + mixes[1][3]}};
#pragma unroll
    for (int part = 0; part < kMixRows; ++part) {
      target[part * 8 + group] = both[part][0];
      target[kNext + part * 8 + group] = both[part][1];
    }
    if (quad == group / 2) {
      target[group % 2 * kNext + kSquares] = group % 2 == 0 ? sums.even[0] + sums.odd[2] : sums.even[1] + sums.odd[3];
    }
  }

  __device__ __forceinline__ void mix(int of, Terms const& kept) const {
    cluster::barrier_wait(block.loaded(of), block.stage_parity(of));
#pragma unroll
    for (int tile = 0; tile < S::kTiles; ++tile) {
      Sums sums;
#pragma unroll
      for (int half = 0; half < S::kHalves; ++half) mix_unit(of, tile * S::kHalves + half, kept, sums);
      if (tile == 0 && of >= 2) cluster::barrier_wait(block.mixes_taken(of), block.taken_parity(of - 2));
      store_sums(of, tile, sums);
    }
    ptx::barrier_arrive(block.partials_here(of));
  }
};

// fn is asked for before the cluster meets, and most of the streams after that: it would have to wait for them.
template <class S>
__device__ void mix_groups(Block<S> const& block, int lane) {
  Mixer<S> const mixer(block, lane);
  Terms kept;
  bool const works = mixer.warp < S::kWarps;
  if (works) mixer.prefetch_terms();
  cudaGridDependencySynchronize();
  if (works) mixer.load_terms(kept);
  cluster::meet_all();
  if (!works) return;
  for (int group = 0; group < block.count; ++group) mixer.mix(group, kept);
}

}  // namespace redknot::one_pass
