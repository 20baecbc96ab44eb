#pragma once

// Scores of the rows of one launch, added up entry by entry: one thread an entry, rows in their order, so that the sums
// are the same every time.

#include "kernels/indexer/score.cuh"

namespace redknot::indexer {

inline constexpr int kSalienceThreads = 128;
inline constexpr int kLoadsAhead = 8;

__global__ void __launch_bounds__(kSalienceThreads)
    salience_kernel(__grid_constant__ Scoring const s, float* total, float* seen, int64_t sequence_entries) {
  int64_t const entry = int64_t{blockIdx.x} * kSalienceThreads + threadIdx.x;
  if (entry >= sequence_entries) return;
  bool const first_round = s.first_row == 0;
  float sum = first_round ? 0.0f : total[entry], rows = first_round ? 0.0f : seen[entry];
  float const* scores = s.scores + entry;
  int64_t const* visible = s.op.visible + s.first_row;
#pragma unroll kLoadsAhead
  for (int row = 0; row < s.rows; ++row) {
    // What a row does not see was not written.
    bool const sees = entry < __ldg(visible + row);
    float const score = sees ? __ldcs(scores + row * s.op.entries) : 0.0f;
    sum += score;
    rows += sees ? 1.0f : 0.0f;
  }
  total[entry] = sum;
  seen[entry] = rows;
}

}  // namespace redknot::indexer
