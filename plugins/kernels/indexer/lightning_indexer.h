#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/dtype.h"
#include "common/export.h"
#include "common/status.h"

namespace redknot {

inline constexpr int kIndexHeads = 64;
inline constexpr int kIndexDim = 128;
inline constexpr int kMostSelected = 1024;
inline constexpr int kPackedIndexBytes = packed_row_bytes(kIndexDim);

// Rows and the entries that they are scored against; meaning: trt_redknot/ops/reference/indexer.py. Tensors are
// contiguous. Rows are scored a few at a time: the scores of those rows, never of all, lie in the workspace.
struct IndexScoreParams {
  void const* q;                // bf16 [rows, 64, 128], not rotated, finite; 16-byte aligned
  void const* weights;          // bf16 [rows, 64]
  void const* keys;             // [entries, 128] bf16, or [entries, 132] packed, 16-byte aligned
  int64_t const* segments;      // [segments, 5], columns of common/segments.h
  int64_t const* row_segments;  // [rows, 2]
  int64_t const* positions;     // [rows]
  int64_t const* visible;       // [rows]
  float const* rope;            // [rope_positions, 32, 2] cos, sin of the last 64 channels, 8-byte aligned
  void* workspace;              // 256-byte aligned
  int64_t workspace_bytes;
  int64_t entries;
  int64_t rope_positions;
  int32_t rows;
  int32_t segment_count;
  Dtype keys_dtype;  // kBFloat16 or kPacked
  bool fp8;          // score in e4m3 (one scale a head, one a key); else in bf16, for bf16 keys only
};

// The best visible entries of every row.
struct LightningIndexerParams : IndexScoreParams {
  int64_t* selected;  // [rows, top_k]: best first, ties to the earlier entry, -1 where there are fewer
  int32_t top_k;      // 1 to kMostSelected
};

// How much the rows of one sequence look at each of its entries.
struct IndexSalienceParams : IndexScoreParams {
  float* total;  // [sequence_entries]: the sum of the scores of the rows that see the entry, in the order of the rows
  float* seen;   // [sequence_entries]: how many rows see it
  int64_t sequence_entries;  // at most `entries`
};

// Bytes that hold the scores of `rows_at_a_time` rows; any workspace that fits at least four rows will do.
REDKNOT_API int64_t lightning_indexer_workspace(int64_t entries, int64_t rows_at_a_time);
REDKNOT_API Status lightning_indexer(LightningIndexerParams const& params, cudaStream_t stream);
REDKNOT_API Status index_salience(IndexSalienceParams const& params, cudaStream_t stream);

}  // namespace redknot
