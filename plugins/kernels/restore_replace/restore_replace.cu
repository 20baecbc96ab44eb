#include "common/check.h"
#include "common/packing.cuh"
#include "kernels/restore_replace/launch.h"

namespace redknot {
namespace {

constexpr int kThreads = 256;
constexpr int kRounds = 4;  // independent loads of a thread in flight

struct Source {
  uint4 raw;    // bf16 channels, or codes in x and y
  float scale;  // 0 for bf16
};

__device__ __forceinline__ Source load_packed(RestoreReplaceParams const& params, int64_t row, int channel) {
  int64_t const bytes = packed_row_bytes(params.width);
  auto const* base = static_cast<uint8_t const*>(params.restored) + row * bytes;
  Source source{};
  if (bytes % 8 == 0) {
    uint2 const codes = __ldg(reinterpret_cast<uint2 const*>(base + channel));
    source.raw.x = codes.x, source.raw.y = codes.y;
  } else {
    auto const* words = reinterpret_cast<uint32_t const*>(base + channel);
    source.raw.x = __ldg(words), source.raw.y = __ldg(words + 1);
  }
  source.scale = __ldg(reinterpret_cast<float const*>(base + params.width) + channel / kRowBlock);
  return source;
}

__device__ __forceinline__ Source load_local(RestoreReplaceParams const& params, int64_t row, int channel) {
  if (row < params.local_rows) {
    return {load_once(static_cast<__nv_bfloat16 const*>(params.local) + row * params.width + channel), 0.0F};
  }
  int64_t const order = row - params.local_rows;
  int64_t const index = params.restored_index == nullptr ? order : params.restored_index[order];
  if (index < 0 || index >= params.restored_rows) return {{~0U, ~0U, ~0U, ~0U}, 0.0F};  // bf16 NaN
  if (params.packed) return load_packed(params, index, channel);
  return {load_once(static_cast<__nv_bfloat16 const*>(params.restored) + index * params.width + channel), 0.0F};
}

__global__ void __launch_bounds__(kThreads) restore_replace_kernel(RestoreReplaceParams const params) {
  int64_t const vectors_a_row = params.width / kVector;
  int64_t const vectors = params.rows * vectors_a_row;
  int64_t const first = static_cast<int64_t>(blockIdx.x) * (kThreads * kRounds) + threadIdx.x;
  uint4 global[kRounds];
  Source local[kRounds];
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    int64_t const vector = first + round * kThreads;
    if (vector >= vectors) continue;
    int64_t const row = vector / vectors_a_row;
    int const channel = static_cast<int>(vector % vectors_a_row) * kVector;
    global[round] = load_once(static_cast<__nv_bfloat16 const*>(params.global) + vector * kVector);
    local[round] = load_local(params, row, channel);
  }
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    int64_t const vector = first + round * kThreads;
    if (vector >= vectors) continue;
    float sum[kVector];
    float other[kVector];
    unpack_bf16(global[round], sum);
    if (local[round].scale != 0.0F) {
      decode_e4m3({local[round].raw.x, local[round].raw.y}, local[round].scale, other);
    } else {
      unpack_bf16(local[round].raw, other);
    }
#pragma unroll
    for (int slot = 0; slot < kVector; ++slot) sum[slot] += other[slot];
    store_vector(static_cast<__nv_bfloat16*>(params.out) + vector * kVector, pack_bf16(sum));
  }
}

}  // namespace

Status restore_replace(RestoreReplaceParams const& params, cudaStream_t stream) {
  REDKNOT_VALID(params.rows >= 0 && params.width > 0 && params.local_rows >= 0 && params.local_rows <= params.rows);
  REDKNOT_SUPPORTED(params.width % kVector == 0);
  if (params.rows == 0) return Status::kSuccess;
  int64_t const others = params.rows - params.local_rows;
  REDKNOT_VALID(params.global != nullptr && params.out != nullptr && params.restored_rows >= 0);
  REDKNOT_VALID(params.local_rows == 0 || params.local != nullptr);
  REDKNOT_VALID(params.restored_index != nullptr || params.restored_rows == others);
  REDKNOT_VALID(params.restored_rows == 0 || params.restored != nullptr);
  REDKNOT_REQUIRE(aligned(params.global, 16) && aligned(params.local, 16) && aligned(params.out, 16) &&
                      aligned(params.restored, params.packed ? 8 : 16),
                  Status::kMisaligned);
  int64_t const vectors = params.rows * (params.width / kVector);
  int64_t const blocks = (vectors + kThreads * kRounds - 1) / (kThreads * kRounds);
  REDKNOT_SUPPORTED(blocks <= INT32_MAX);
  restore_replace_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(params);
  REDKNOT_LAUNCHED();
  return Status::kSuccess;
}

}  // namespace redknot
