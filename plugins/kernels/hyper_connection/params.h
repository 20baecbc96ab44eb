#pragma once

#include <cstddef>
#include <cstdint>

namespace redknot {

// mHC before a block (or before the head), with the block's RMS norm. Pointers 16-byte aligned; hidden a multiple of 8,
// streams * hidden of 32.
struct HyperConnectionPreParams {
  void const* streams;  // bf16 [rows, stream_count, hidden]
  int64_t rows;
  int32_t stream_count;  // 2 or 4
  int32_t hidden;
  float const* fn;     // fp32 [mixes, stream_count * hidden]; mixes: (2 + S) * S, or S for the head
  float const* base;   // fp32 [mixes]
  float const* scale;  // fp32 [3], or [1] for the head
  void const* norm;    // [hidden], fp32 or bf16
  bool norm_is_float;
  bool head;           // only the collapse: no post, no comb
  int32_t iterations;  // of Sinkhorn, at least 1; not of the head
  float eps;
  float norm_eps;
  void* normed;     // bf16 [rows, hidden]
  float* post;      // fp32 [rows, S]
  float* comb;      // fp32 [rows, S, S]
  void* workspace;  // hyper_connection_pre_workspace bytes
  size_t workspace_bytes;
};

// mHC after a block: out[r, s] = post[r, s] * output[r] + sum_j comb[r, j, s] * streams[r, j].
struct HyperConnectionPostParams {
  void const* streams;  // bf16 [rows, stream_count, hidden]
  void const* output;   // bf16 [rows, hidden]
  float const* post;    // fp32 [rows, S]
  float const* comb;    // fp32 [rows, S, S]
  int64_t rows;
  int32_t stream_count;
  int32_t hidden;
  void* out;  // bf16 [rows, stream_count, hidden]
};

}  // namespace redknot
