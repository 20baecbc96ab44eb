#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "common/dtype.h"
#include "common/export.h"
#include "common/status.h"

namespace redknot {

inline constexpr int kMaxSelected = 1024;  // entries of a row

// Attention of rows over a segment table; meaning: trt_redknot/ops/reference/attention.py. Tensors are contiguous; q,
// outputs, pools and the rope table are 16-byte aligned.
// Rows see Global heads; the first full_rows of them see Global heads, then Local heads.
struct SegLatentAttentionParams {
  void const* q_global;         // bf16 [rows, global_heads, 512], normed, not rotated
  void const* q_local;          // bf16 [full_rows, local_heads, 512]
  void* out_global;             // bf16 [rows, global_heads, 512]
  void* out_local;              // bf16 [full_rows, local_heads, 512]
  float const* sinks_global;    // [global_heads]
  float const* sinks_local;     // [local_heads]
  void const* latents;          // [latent_rows, 512] of pool_dtype; packed rows are 640 bytes apart
  void const* entries;          // [entry_rows, 512] of pool_dtype; null: sliding window only
  int64_t const* segments;      // [segments, 5], columns of common/segments.h
  int64_t const* row_segments;  // [rows, 2]
  int64_t const* positions;     // [rows]
  int64_t const* visible;       // [rows]
  int64_t const* selected;      // [rows, top_k] distinct entry rows, -1 for none; null: every visible entry
  float const* rope;            // [rope_positions, 32, 2] cos, sin
  int64_t latent_rows;
  int64_t entry_rows;
  int64_t rope_positions;
  int32_t rows;
  int32_t full_rows;
  int32_t global_heads;
  int32_t local_heads;
  int32_t segment_count;
  int32_t top_k;  // at most kMaxSelected
  int32_t window;
  Dtype pool_dtype;  // kBFloat16 or kPacked
  void* workspace;   // seg_latent_attention_workspace bytes, 16-byte aligned
  size_t workspace_bytes;
};

// Bytes that a call of these sizes needs: packed pools that rows with many heads would decode again and again become
// bf16 there. Only sizes and the format are looked at; fewer rows or latents never need more.
REDKNOT_API size_t seg_latent_attention_workspace(SegLatentAttentionParams const& params);

// Indices that point outside a pool or a table are dropped or clamped, never followed.
REDKNOT_API Status seg_latent_attention(SegLatentAttentionParams const& params, cudaStream_t stream);

}  // namespace redknot
