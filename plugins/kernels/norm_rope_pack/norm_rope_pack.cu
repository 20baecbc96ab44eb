#include <algorithm>

#include "common/check.h"
#include "kernels/norm_rope_pack/latents.cuh"
#include "kernels/norm_rope_pack/launch.h"
#include "kernels/norm_rope_pack/row.cuh"

namespace redknot {
namespace {

constexpr int kThreads = 256;

template <int kTeam, int kVectors>
__global__ void __launch_bounds__(kThreads)
    norm_rope_pack_kernel(NormRopePackParams const params, RowFinish const finish) {
  __shared__ float scratch[kTeam / kWarp];
  int const member = static_cast<int>(threadIdx.x) % kTeam;
  int64_t const vector = static_cast<int64_t>(blockIdx.x) * (kThreads / kTeam) + threadIdx.x / kTeam;
  if (vector >= params.rows * params.heads) return;  // whole teams leave together
  // 64-bit divisions cost more than a row's arithmetic: only rows of several heads pay for one.
  int64_t const row = params.heads == 1 ? vector : vector / params.heads;
  int64_t const head = vector - row * params.heads;
  auto const* source = static_cast<__nv_bfloat16 const*>(params.x) + vector * params.width;
  float values[kVectors][kVector];
#pragma unroll
  for (int index = 0; index < kVectors; ++index) {
    int const channel = (index * kTeam + member) * kVector;
    uint4 const raw = channel < params.width ? load_once(source + channel) : uint4{0, 0, 0, 0};
    unpack_bf16(raw, values[index]);
  }
  int64_t const position = params.rope == nullptr ? 0 : params.positions[row];
  int64_t const target = params.out_rows == nullptr ? row : params.out_rows[row];
  uint8_t* out = nullptr;
  if (target >= 0 && target < params.pool_rows) {
    out = static_cast<uint8_t*>(params.out) + (target * params.heads + head) * finish.bytes;
  }
  finish_row<kTeam, kVectors>(finish, member, position, out, values, scratch);
}

template <int kTeam, int kVectors>
Status launch(NormRopePackParams const& params, cudaStream_t stream) {
  constexpr int kRowsPerBlock = kThreads / kTeam;
  int64_t const blocks = (params.rows * params.heads + kRowsPerBlock - 1) / kRowsPerBlock;
  REDKNOT_SUPPORTED(blocks <= INT32_MAX);
  RowFinish const finish = make_finish(params);
  norm_rope_pack_kernel<kTeam, kVectors><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(params, finish);
  REDKNOT_LAUNCHED();
  return Status::kSuccess;
}

bool is_latent(NormRopePackParams const& params) {
  return params.format == RowFormat::kPackedLatent && params.width == kHeadDim && params.rope_dim == kRopeDim &&
         params.norm != nullptr;
}

Status launch_latents(NormRopePackParams const& params, cudaStream_t stream) {
  RowFinish const finish = make_finish(params);
  int64_t const blocks = (params.rows + kLatentWarps - 1) / kLatentWarps;
  auto const grid = static_cast<unsigned>(std::min<int64_t>(blocks, kLatentBlocks));
  latents_kernel<<<grid, kLatentWarps * kWarp, 0, stream>>>(params, finish);
  REDKNOT_LAUNCHED();
  return Status::kSuccess;
}

}  // namespace

Status norm_rope_pack(NormRopePackParams const& params, cudaStream_t stream) {
  REDKNOT_VALID(params.rows >= 0 && params.heads > 0 && params.width > 0);
  if (params.rows == 0) return Status::kSuccess;
  bool const rotated = params.rope != nullptr;
  REDKNOT_VALID(params.x != nullptr && params.out != nullptr && params.pool_rows > 0);
  REDKNOT_VALID(params.out_rows != nullptr || params.pool_rows >= params.rows);
  REDKNOT_VALID(!rotated || (params.positions != nullptr && params.rope_positions > 0));
  REDKNOT_VALID(params.rope_dim >= 0 && params.rope_dim <= params.width && (rotated == (params.rope_dim > 0)));
  REDKNOT_VALID(params.format == RowFormat::kBFloat16 || params.heads == 1);
  REDKNOT_SUPPORTED(params.width % kVector == 0 && params.rope_dim % kVector == 0 && params.width <= 8192);
  REDKNOT_REQUIRE(aligned(params.x, 16) && aligned(params.norm, 16) && aligned(params.rope, 16) &&
                      aligned(params.out, params.format == RowFormat::kBFloat16 ? 16 : 8),
                  Status::kMisaligned);
  if (is_latent(params)) return launch_latents(params, stream);
  if (params.width <= 256) return launch<32, 1>(params, stream);
  if (params.width <= 512) return launch<32, 2>(params, stream);
  if (params.width <= 1024) return launch<32, 4>(params, stream);
  if (params.width <= 4096) return launch<256, 2>(params, stream);
  return launch<256, 4>(params, stream);
}

}  // namespace redknot
