#include <algorithm>

#include "common/check.h"
#include "kernels/unpack/latent.cuh"
#include "kernels/unpack/launch.h"

namespace redknot {
namespace {

constexpr int kThreads = 256;
constexpr int kRowsPerBlock = kThreads / kWarp;

// Eight channels of a plain row, which is aligned to words only.
__device__ __forceinline__ uint4 plain_chunk(uint8_t const* row, int chunk, int scales) {
  auto const* const codes = reinterpret_cast<uint32_t const*>(row) + 2 * chunk;
  float const scale = __ldg(reinterpret_cast<float const*>(row + scales) + chunk / (kRowBlock / kVector));
  float values[kVector];
  decode_e4m3({__ldg(codes), __ldg(codes + 1)}, scale, values);
  return pack_bf16(values);
}

// A warp a row.
template <bool kLatent>
__global__ void __launch_bounds__(kThreads) unpack_kernel(UnpackParams const params, int row_bytes) {
  int const lane = static_cast<int>(threadIdx.x) % kWarp;
  int64_t const row = static_cast<int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.x / kWarp;
  if (row >= params.rows) return;
  auto const* const packed = static_cast<uint8_t const*>(params.packed) + row * row_bytes;
  auto* const out = static_cast<uint4*>(params.out) + row * (params.width / kVector);
  if constexpr (kLatent) {
    LatentChunks chunks;
    chunks.load(packed, lane);
#pragma unroll
    for (int i = 0; i < LatentChunks::kCount; ++i) out[kWarp * i + lane] = chunks.chunk(i, lane);
  } else {
    for (int chunk = lane; chunk < params.width / kVector; chunk += kWarp) {
      out[chunk] = plain_chunk(packed, chunk, params.width);
    }
  }
}

}  // namespace

Status unpack(UnpackParams const& params, cudaStream_t stream) {
  REDKNOT_VALID(params.rows >= 0 && params.width > 0);
  REDKNOT_SUPPORTED(params.width % kVector == 0);
  bool const latent = params.format == RowFormat::kPackedLatent;
  REDKNOT_SUPPORTED(latent ? params.width == kHeadDim : params.format == RowFormat::kPackedRow);
  if (params.rows == 0) return Status::kSuccess;
  REDKNOT_VALID(params.packed != nullptr && params.out != nullptr);
  REDKNOT_REQUIRE(aligned(params.packed, latent ? 8 : 4) && aligned(params.out, 16), Status::kMisaligned);
  int64_t const blocks = (params.rows + kRowsPerBlock - 1) / kRowsPerBlock;
  REDKNOT_SUPPORTED(blocks <= INT32_MAX);
  auto const grid = static_cast<unsigned>(blocks);
  if (latent) {
    unpack_kernel<true><<<grid, kThreads, 0, stream>>>(params, kPackedLatentBytes);
  } else {
    unpack_kernel<false><<<grid, kThreads, 0, stream>>>(params, static_cast<int>(packed_row_bytes(params.width)));
  }
  REDKNOT_LAUNCHED();
  return Status::kSuccess;
}

}  // namespace redknot
