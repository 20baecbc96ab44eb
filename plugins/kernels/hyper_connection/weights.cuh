#pragma once

// From mixes to weights, one row at a time.

#include "kernels/hyper_connection/params.h"

namespace redknot {

__device__ __forceinline__ float sigmoid(float value) { return 1.0F / (1.0F + __expf(-value)); }

// 1 / value to a unit in the last place or two; values are sums of weights, far above the least normal number.
__device__ __forceinline__ float reciprocal(float value) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

// Columns first, then rows and columns alternately, all of one matrix in the registers of each lane. Lines and columns
// have factors, which take a quarter of the multiplications; the matrix itself is multiplied at the end. A factor f of
// a line whose sum is s becomes f / (f s + eps), which is 1 / (s + eps / f): the reciprocals of factors are kept, too,
// and nothing but the sum and one reciprocal is in the way of the next step.
template <int kStreams>
__device__ __forceinline__ void sinkhorn(float (&comb)[kStreams][kStreams], int iterations, float eps) {
  float lines[kStreams], columns[kStreams], under_lines[kStreams], under_columns[kStreams];
#pragma unroll
  for (int index = 0; index < kStreams; ++index) {
    lines[index] = columns[index] = under_lines[index] = under_columns[index] = 1.0F;
  }
  for (int step = 0; step < iterations; ++step) {
    if (step > 0) {
#pragma unroll
      for (int line = 0; line < kStreams; ++line) {
        float sum = eps * under_lines[line];
#pragma unroll
        for (int column = 0; column < kStreams; ++column) sum = fmaf(comb[line][column], columns[column], sum);
        under_lines[line] = sum;
        lines[line] = reciprocal(sum);
      }
    }
#pragma unroll
    for (int column = 0; column < kStreams; ++column) {
      float sum = eps * under_columns[column];
#pragma unroll
      for (int line = 0; line < kStreams; ++line) sum = fmaf(comb[line][column], lines[line], sum);
      under_columns[column] = sum;
      columns[column] = reciprocal(sum);
    }
  }
#pragma unroll
  for (int line = 0; line < kStreams; ++line) {
#pragma unroll
    for (int column = 0; column < kStreams; ++column) comb[line][column] *= lines[line] * columns[column];
  }
}

// The balanced matrix of a row: softmax of its lines, then Sinkhorn. `mix`: all mixes of the row before its norm;
// `inverse`: 1 / RMS of the row.
template <int kStreams>
__device__ __forceinline__ void balance(HyperConnectionPreParams const& params, float const* mix, float inverse,
                                        float (&comb)[kStreams][kStreams]) {
#pragma unroll
  for (int line = 0; line < kStreams; ++line) {
    float peak = -INFINITY;
#pragma unroll
    for (int index = 0; index < kStreams; ++index) {
      int const cell = 2 * kStreams + line * kStreams + index;
      comb[line][index] = mix[cell] * inverse * params.scale[2] + params.base[cell];
      peak = fmaxf(peak, comb[line][index]);
    }
    float total = 0.0F;
#pragma unroll
    for (int index = 0; index < kStreams; ++index) {
      comb[line][index] = __expf(comb[line][index] - peak);
      total += comb[line][index];
    }
    float const inverse_total = reciprocal(total);
#pragma unroll
    for (int index = 0; index < kStreams; ++index)
      comb[line][index] = fmaf(comb[line][index], inverse_total, params.eps);
  }
  sinkhorn<kStreams>(comb, params.iterations, params.eps);
}

// What the block's output is multiplied by in one of its streams.
template <int kStreams>
__device__ __forceinline__ float post_weight(HyperConnectionPreParams const& params, float const* mix, float inverse,
                                             int stream) {
  float const logit = mix[kStreams + stream] * inverse * params.scale[1] + params.base[kStreams + stream];
  return 2.0F * sigmoid(logit);
}

// post and comb of a row, from lanes that all know its mixes.
template <int kStreams>
__device__ __forceinline__ void write_weights(HyperConnectionPreParams const& params, int64_t row, int lane,
                                              float const* mix, float inverse) {
#pragma unroll
  for (int stream = 0; stream < kStreams; ++stream) {
    float const post = post_weight<kStreams>(params, mix, inverse, stream);
    if (lane == stream) params.post[row * kStreams + stream] = post;
  }
  float comb[kStreams][kStreams];
  balance<kStreams>(params, mix, inverse, comb);
#pragma unroll
  for (int line = 0; line < kStreams; ++line) {
#pragma unroll
    for (int index = 0; index < kStreams; ++index) {
      if (lane == line) params.comb[(row * kStreams + line) * kStreams + index] = comb[line][index];
    }
  }
}

}  // namespace redknot
