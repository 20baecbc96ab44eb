#pragma once

#include <cstddef>
#include <cstdint>

namespace redknot {

inline constexpr int kMaxTopK = 32;            // experts that a row chooses
inline constexpr int kMaxRoutedExperts = 512;  // that a router chooses from
inline constexpr int kMaxExperts = 1024;       // held here
inline constexpr int kScaleBlock = 128;        // channels, and outputs, that share a scale of an e4m3 weight

enum class Scoring : int32_t { kSqrtSoftplus = 0, kSigmoid = 1, kSoftmax = 2 };

// Bits of a fault word: what a router found that it could not follow.
inline constexpr int32_t kFaultToken = 1;   // a token id outside the hash table
inline constexpr int32_t kFaultExpert = 2;  // an expert id outside the logits

// Learned router: the top_k best of score + bias, heaviest first, weights normalised over all top_k; adaptive fanout
// drops the tail (expert -1, weight 0). Ties fall to the lower expert.
struct RouteLearnedParams {
  void const* logits;  // [rows, experts], fp32 or bf16
  bool logits_are_float;
  int64_t rows;
  int32_t experts;    // at most kMaxRoutedExperts
  float const* bias;  // fp32 [experts]
  int32_t top_k;      // at most kMaxTopK, and `experts`
  float scale;
  float tau;              // 1 and above: native routing
  float const* tau_cell;  // fp32 [1] in device memory, read instead of `tau`; null: `tau`
  Scoring scoring;
  int64_t* ids;    // [rows, top_k]
  float* weights;  // [rows, top_k]
};

// Hash router: experts of the token's row of a table. A row whose token or experts are out of range gets experts -1
// with weight 0, and its fault is set.
struct RouteHashParams {
  void const* logits;  // [rows, experts], fp32 or bf16
  bool logits_are_float;
  int64_t rows;
  int32_t experts;       // at most kMaxRoutedExperts
  int64_t const* table;  // [vocab, top_k]
  int64_t vocab;
  int64_t const* tokens;  // [rows]
  int32_t top_k;          // at most kMaxTopK
  float scale;
  Scoring scoring;
  int64_t* ids;     // [rows, top_k]
  float* weights;   // [rows, top_k]
  int32_t* faults;  // [1], cleared by the launcher
};

// Rows ordered by expert, experts `first` .. `first + experts - 1` only; inside an expert by row, then slot.
struct MoePermuteParams {
  void const* x;       // bf16 [rows, hidden], hidden a multiple of 8
  int64_t const* ids;  // [rows, top_k]
  int64_t rows;
  int32_t hidden;
  int32_t top_k;
  int32_t first;
  int32_t experts;   // at most kMaxExperts
  void* permuted;    // bf16 [rows * top_k, hidden]; rows from ends[experts - 1] on are not written
  int32_t* inverse;  // [rows, top_k], row of `permuted`, -1 where the expert is not held here
  int32_t* ends;     // [experts], one past the last permuted row of each expert
  void* workspace;   // moe_permute_workspace bytes
  size_t workspace_bytes;
};

// Clamped SwiGLU of the permuted rows: silu(min(gate, limit)) * clamp(up, -limit, limit).
struct MoeActivationParams {
  void const* gate_up;  // bf16 [capacity, 2 * width], gate first; width a multiple of 8
  int32_t const* ends;  // [experts]; rows from ends[experts - 1] on are left alone
  int64_t capacity;
  int32_t experts;
  int32_t width;
  float limit;
  void* out;  // bf16 [capacity, width]
};

// Rows of each expert through its FP8 weight: out[p] = x[p] W[e(p)]^T. Rows are quantised in blocks of 128 channels,
// with the power of two that brings the block's largest magnitude to at most 448.
struct MoeGroupedGemmParams {
  void const* x;              // bf16 [capacity, depth]
  int32_t const* ends;        // [experts]; rows from ends[experts - 1] on are left alone
  void const* weight;         // e4m3 [experts, width, depth]
  float const* weight_scale;  // [experts, depth / 128, width / 128], of blocks of 128 x 128
  int64_t capacity;
  int32_t experts;  // at most kMaxExperts
  int32_t depth;    // a multiple of 128
  int32_t width;    // a multiple of 128
  void* out;        // bf16 [capacity, width]
  void* workspace;  // moe_grouped_gemm_workspace bytes, 256-byte aligned
  size_t workspace_bytes;
};

// out[r] = sum over slots, in order, of weights[r, j] * y[inverse[r, j]], kept in fp32.
struct MoeCombineParams {
  void const* y;           // bf16 [capacity, hidden], hidden a multiple of 8
  int32_t const* inverse;  // [rows, top_k]; below 0 adds nothing, at `capacity` and above adds NaN
  float const* weights;    // [rows, top_k]
  int64_t capacity;
  int64_t rows;
  int32_t hidden;
  int32_t top_k;
  void* out;  // bf16 [rows, hidden]
};

}  // namespace redknot
