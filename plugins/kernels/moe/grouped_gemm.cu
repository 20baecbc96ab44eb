// The experts' matrix products in FP8: rows are quantised, then one persistent kernel multiplies the rows of every
// expert. What is done where is worked out on the device: the host never learns how many rows an expert has.

#include "common/check.h"
#include "common/device.h"
#include "common/launch_after.h"
#include "common/packing.cuh"
#include "kernels/moe/grouped_gemm.cuh"
#include "kernels/moe/launch.h"

namespace redknot {
namespace {

using grouped::kBlock;

constexpr int kQuantiseThreads = 256;
constexpr int kQuantiseBlocks = 5;  // of a multiprocessor
constexpr int kBatch = 2;           // vectors of a lane that are on their way together
constexpr int64_t kAlignment = 256;

// The workspace, cut into what it holds.
struct Workspace {
  uint8_t* codes;  // e4m3 [code_rows, depth]
  float* scales;   // [depth / 128, code_rows]
  int64_t code_rows;
  int64_t bytes;
};

Workspace cut(void* workspace, int64_t capacity, int64_t depth) {
  Workspace result{};
  result.code_rows = ceil_to(capacity, kBlock);
  int64_t const code_bytes = result.code_rows * depth;
  result.bytes = ceil_to(code_bytes + result.code_rows * (depth / kBlock) * int64_t{sizeof(float)}, kAlignment);
  if (workspace == nullptr) return result;
  result.codes = static_cast<uint8_t*>(workspace);
  result.scales = reinterpret_cast<float*>(result.codes + code_bytes);
  return result;
}

// A warp takes strips of 512 channels of a row: codes of 128 channels by half a warp, and their scale.
__global__ void __launch_bounds__(kQuantiseThreads, kQuantiseBlocks)
    quantise_kernel(MoeGroupedGemmParams const params, uint8_t* codes, float* scales, int64_t scale_stride) {
  constexpr int kWarps = kQuantiseThreads / kWarp;
  constexpr int kStep = kWarp * kVector;
  constexpr int kStrip = kBatch * kStep;
  cudaTriggerProgrammaticLaunchCompletion();
  int64_t const rows = min(static_cast<int64_t>(params.ends[params.experts - 1]), params.capacity);
  int const lane = static_cast<int>(threadIdx.x) % kWarp;
  int const strips = (params.depth + kStrip - 1) / kStrip;
  int const warp = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / kWarp;
  int const all = static_cast<int>(gridDim.x) * kWarps;
  int64_t row = warp / strips;
  int strip = warp % strips;
  while (row < rows) {
    int64_t const first = row * params.depth;
    int const begin = strip * kStrip + lane * kVector;
    auto const* const source = static_cast<__nv_bfloat16 const*>(params.x) + first;
    uint4 raw[kBatch];
#pragma unroll
    for (int index = 0; index < kBatch; ++index) {
      int const channel = begin + index * kStep;
      raw[index] = channel < params.depth ? load_once(source + channel) : uint4{0, 0, 0, 0};
    }
#pragma unroll
    for (int index = 0; index < kBatch; ++index) {
      int const channel = begin + index * kStep;
      float values[kVector];
      unpack_bf16(raw[index], values);
      bool finite = true;
      int const exponent = scale_exponent(lane_max<kBlock / kVector>(finite_peak(values, finite)));
      if (channel >= params.depth) continue;
      *reinterpret_cast<uint2*>(codes + first + channel) = encode_e4m3(values, exponent, finite);
      if (channel % kBlock == 0) scales[channel / kBlock * scale_stride + row] = power_of_two(exponent);
    }
    row += all / strips;
    strip += all % strips;
    if (strip >= strips) {
      strip -= strips;
      ++row;
    }
  }
}

Status check(MoeGroupedGemmParams const& params) {
  REDKNOT_VALID(params.capacity >= 0 && params.experts > 0 && params.depth > 0 && params.width > 0);
  REDKNOT_SUPPORTED(params.experts <= kMaxExperts && params.depth % kBlock == 0 && params.width % kBlock == 0);
  int64_t const row_tiles = params.capacity / kBlock + params.experts;
  REDKNOT_SUPPORTED(params.capacity <= INT32_MAX - kBlock && row_tiles * (params.width / kBlock) <= INT32_MAX);
  REDKNOT_SUPPORTED(int64_t{params.experts} * params.width <= INT32_MAX);
  if (params.capacity == 0) return Status::kSuccess;
  REDKNOT_VALID(params.x != nullptr && params.ends != nullptr && params.weight != nullptr && params.out != nullptr);
  REDKNOT_VALID(params.weight_scale != nullptr && params.workspace != nullptr);
  REDKNOT_REQUIRE(aligned(params.x, 16) && aligned(params.weight, 16) && aligned(params.out, 16) &&
                      aligned(params.workspace, kAlignment),
                  Status::kMisaligned);
  REDKNOT_REQUIRE(
      params.workspace_bytes >= moe_grouped_gemm_workspace(params.capacity, params.experts, params.depth, params.width),
      Status::kWorkspaceTooSmall);
  return Status::kSuccess;
}

}  // namespace

size_t moe_grouped_gemm_workspace(int64_t capacity, int32_t experts, int32_t depth, int32_t width) {
  if (capacity <= 0 || experts <= 0 || depth <= 0 || width <= 0) return 0;
  return static_cast<size_t>(cut(nullptr, capacity, depth).bytes);
}

Status moe_grouped_gemm(MoeGroupedGemmParams const& params, cudaStream_t stream) {
  REDKNOT_TRY(check(params));
  if (params.capacity == 0) return Status::kSuccess;
  REDKNOT_TRY(require_warpgroup_products());
  int processors = 0;
  REDKNOT_TRY(count_processors(processors));
  Workspace const workspace = cut(params.workspace, params.capacity, params.depth);

  CUtensorMap rows{}, weights{};
  REDKNOT_TRY(encode_byte_matrix(rows, workspace.codes, workspace.code_rows, params.depth, grouped::kHalf));
  int64_t const weight_rows = int64_t{params.experts} * params.width;
  REDKNOT_TRY(encode_byte_matrix(weights, params.weight, weight_rows, params.depth, kBlock));

  auto const blocks = static_cast<unsigned>(processors * kQuantiseBlocks);
  quantise_kernel<<<blocks, kQuantiseThreads, 0, stream>>>(params, workspace.codes, workspace.scales,
                                                           workspace.code_rows);
  REDKNOT_LAUNCHED();

  grouped::Operands const operands{workspace.scales,    params.weight_scale,
                                   params.ends,         static_cast<__nv_bfloat16*>(params.out),
                                   workspace.code_rows, static_cast<int32_t>(params.capacity),
                                   params.experts,      params.depth,
                                   params.width};
  constexpr int kSharedBytes = static_cast<int>(sizeof(grouped::Shared));
  REDKNOT_CUDA(
      cudaFuncSetAttribute(grouped::multiply_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  auto const grid = static_cast<unsigned>(processors / grouped::kPair * grouped::kPair);
  REDKNOT_CUDA(
      launch_after(grouped::multiply_kernel, grid, grouped::kThreads, kSharedBytes, stream, rows, weights, operands));
  return Status::kSuccess;
}

}  // namespace redknot
