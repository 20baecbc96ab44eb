#include "common/check.h"
#include "common/dtype.h"
#include "common/turn.cuh"
#include "kernels/turn_rows/launch.h"

namespace redknot {
namespace {

constexpr int kThreads = 256;
constexpr int kLanes = kRopeDim / 8;  // lanes of a row, eight channels each

__global__ void __launch_bounds__(kThreads) turn_rows_kernel(__grid_constant__ TurnRowsParams const op) {
  int64_t const row = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kLanes;
  if (row >= op.count) return;
  int64_t const frame = __ldg(op.frames + row);
  if (frame <= 0 || frame >= op.positions) return;
  int const lane = threadIdx.x % kLanes;
  auto* const at = reinterpret_cast<uint4*>(static_cast<uint16_t*>(op.rows) + (row + 1) * op.width - kRopeDim) + lane;
  auto const* const angles = reinterpret_cast<float4 const*>(op.rope + frame * kRopeDim) + 2 * lane;
  float4 const turns[2] = {__ldg(angles), __ldg(angles + 1)};
  float const inverse = 1.0f / __ldg(op.rope);
  *at = turned(*at, turns, inverse);
}

}  // namespace

Status turn_rows(TurnRowsParams const& op, cudaStream_t stream) {
  REDKNOT_VALID(op.count >= 0 && op.width >= kRopeDim && op.width % 8 == 0);
  if (op.count == 0) return Status::kSuccess;
  REDKNOT_VALID(op.rows != nullptr && op.frames != nullptr && op.rope != nullptr && op.positions > 0);
  REDKNOT_REQUIRE(aligned(op.rows, 16) && aligned(op.rope, 16), Status::kMisaligned);
  int64_t const blocks = (op.count * kLanes + kThreads - 1) / kThreads;
  REDKNOT_SUPPORTED(blocks <= INT32_MAX);
  turn_rows_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(op);
  REDKNOT_LAUNCHED();
  return Status::kSuccess;
}

}  // namespace redknot
