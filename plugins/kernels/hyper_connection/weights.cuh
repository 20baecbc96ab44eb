#pragma once

// From mixes to weights, one row at a time.

#include "kernels/hyper_connection/params.h"

namespace redknot {

__device__ __forceinline__ float sigmoid(float value) { return 1.0F / (1.0F + __expf(-value)); }

// Columns first, then rows and columns alternately, all of one matrix in the registers of each lane.
template <int kStreams>
__device__ __forceinline__ void normalise_columns(float (&comb)[kStreams][kStreams], float eps) {
#pragma unroll
  for (int column = 0; column < kStreams; ++column) {
    float sum = eps;
#pragma unroll
    for (int row = 0; row < kStreams; ++row) sum += comb[row][column];
    float const inverse = __fdividef(1.0F, sum);
#pragma unroll
    for (int row = 0; row < kStreams; ++row) comb[row][column] *= inverse;
  }
}

template <int kStreams>
__device__ __forceinline__ void normalise_rows(float (&comb)[kStreams][kStreams], float eps) {
#pragma unroll
  for (auto& row : comb) {
    float sum = eps;
#pragma unroll
    for (float const value : row) sum += value;
    float const inverse = __fdividef(1.0F, sum);
#pragma unroll
    for (float& value : row) value *= inverse;
  }
}

template <int kStreams>
__device__ __forceinline__ void sinkhorn(float (&comb)[kStreams][kStreams], int iterations, float eps) {
  normalise_columns<kStreams>(comb, eps);
  for (int step = 1; step < iterations; ++step) {
    normalise_rows<kStreams>(comb, eps);
    normalise_columns<kStreams>(comb, eps);
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
#pragma unroll
    for (int index = 0; index < kStreams; ++index) comb[line][index] = comb[line][index] / total + params.eps;
  }
  sinkhorn<kStreams>(comb, params.iterations, params.eps);
}

}  // namespace redknot
