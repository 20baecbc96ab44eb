#include <algorithm>

#include "common/check.h"
#include "kernels/compress/launch.h"
#include "kernels/norm_rope_pack/row.cuh"

namespace redknot {
namespace {

// Softmax pooling of one channel, slot after slot, with a single exponential each.
struct Pool {
  float peak = -INFINITY;
  float total = 0.0F;
  float sum = 0.0F;

  __device__ __forceinline__ void add(float logit, float value) { merge(logit, 1.0F, value); }

  __device__ __forceinline__ void merge(float other_peak, float other_total, float other_sum) {
    if (other_peak == -INFINITY) return;
    float const factor = __expf(-fabsf(other_peak - peak));
    bool const raised = other_peak > peak;
    float const keep = raised ? factor : 1.0F;
    float const take = raised ? 1.0F : factor;
    peak = raised ? other_peak : peak;
    total = keep * total + take * other_total;
    sum = keep * sum + take * other_sum;
  }
};

// One block an entry. Thread (group, lane): eight channels of every kGroups-th slot; groups merge in shared memory.
template <int kVectors>
__global__ void compress_kernel(CompressParams const params, int lanes, int groups) {
  extern __shared__ float shared[];  // [groups][3][width], then the pooled vector [width]
  int64_t const entry = blockIdx.x;
  int const lane = static_cast<int>(threadIdx.x) % lanes;
  int const group = static_cast<int>(threadIdx.x) / lanes;
  int const channel = lane * kVector;
  int const width = params.width;
  int const ratio = params.slots_an_entry / params.series;
  int64_t const stride = static_cast<int64_t>(params.series) * width;
  int64_t const* const slots = params.slots + entry * params.slots_an_entry;

  Pool pools[kVector];
  if (group < groups) {
#pragma unroll 4
    for (int slot = group; slot < params.slots_an_entry; slot += groups) {
      int64_t const row = __ldg(slots + slot);
      if (row == -1) continue;
      int const series = slot / ratio;  // the window before gives the first series, the window itself the last
      int64_t const offset = static_cast<int64_t>(series) * width + channel;
      float bias[kVector];
      float logits[kVector];
      float values[kVector];
      int64_t const ape_offset = (slot - series * ratio) * stride + offset;
      if (params.ape_is_float) {
        load_floats(static_cast<float const*>(params.ape) + ape_offset, bias);
      } else {
        unpack_bf16(__ldg(reinterpret_cast<uint4 const*>(static_cast<__nv_bfloat16 const*>(params.ape) + ape_offset)), bias);
      }
      bool const inside = row >= 0 && row < params.raw_rows;
      uint4 const poison{~0U, ~0U, ~0U, ~0U};
      auto const* gate = static_cast<__nv_bfloat16 const*>(params.gate) + row * stride + offset;
      auto const* kv = static_cast<__nv_bfloat16 const*>(params.kv) + row * stride + offset;
      uint4 const gate_raw = inside ? load_once(gate) : poison;
      uint4 const kv_raw = inside ? load_once(kv) : poison;
      unpack_bf16(gate_raw, logits);
      unpack_bf16(kv_raw, values);
#pragma unroll
      for (int index = 0; index < kVector; ++index) pools[index].add(logits[index] + bias[index], values[index]);
    }
#pragma unroll
    for (int index = 0; index < kVector; ++index) {
      float* const target = shared + group * 3 * width + channel + index;
      target[0] = pools[index].peak;
      target[width] = pools[index].total;
      target[2 * width] = pools[index].sum;
    }
  }
  __syncthreads();
  float* const pooled = shared + groups * 3 * width;
  for (int index = static_cast<int>(threadIdx.x); index < width; index += static_cast<int>(blockDim.x)) {
    Pool pool;
    for (int other = 0; other < groups; ++other) {
      float const* const source = shared + other * 3 * width + index;
      pool.merge(source[0], source[width], source[2 * width]);
    }
    pooled[index] = pool.sum / pool.total;
  }
  __syncthreads();
  if (threadIdx.x >= kWarp) return;
  float values[kVectors][kVector];
#pragma unroll
  for (int index = 0; index < kVectors; ++index) {
    int const first = (index * kWarp + static_cast<int>(threadIdx.x)) * kVector;
#pragma unroll
    for (int slot = 0; slot < kVector; ++slot) values[index][slot] = first < width ? pooled[first + slot] : 0.0F;
  }
  RowFinish const finish{params.norm, params.norm_is_float, params.rope,   params.rope_positions, params.rope_dim,
                         width,       params.format,        params.eps};
  int64_t const target = params.out_rows == nullptr ? entry : params.out_rows[entry];
  uint8_t* out = nullptr;
  if (target >= 0 && target < params.pool_rows) {
    out = static_cast<uint8_t*>(params.out) + target * row_bytes(params.format, width, params.rope_dim);
  }
  finish_row<kWarp, kVectors>(finish, static_cast<int>(threadIdx.x), params.positions[entry], out, values, nullptr);
}

constexpr int kMaxSharedBytes = 48 * 1024;
constexpr int kMaxThreads = 512;

template <int kVectors>
Status launch(CompressParams const& params, cudaStream_t stream) {
  int const lanes = params.width / kVector;
  int const most = std::min(kMaxThreads / lanes, (kMaxSharedBytes / 4 / params.width - 1) / 3);
  int const groups = std::clamp(params.slots_an_entry / 4, 1, most);
  unsigned const threads = static_cast<unsigned>(ceil_to(static_cast<int64_t>(lanes) * groups, kWarp));
  size_t const bytes = sizeof(float) * static_cast<size_t>((groups * 3 + 1) * params.width);
  compress_kernel<kVectors><<<static_cast<unsigned>(params.entries), threads, bytes, stream>>>(params, lanes, groups);
  REDKNOT_LAUNCHED();
  return Status::kSuccess;
}

}  // namespace

Status compress(CompressParams const& params, cudaStream_t stream) {
  REDKNOT_VALID(params.entries >= 0 && params.raw_rows >= 0 && params.width > 0);
  REDKNOT_VALID(params.series == 1 || params.series == 2);
  REDKNOT_VALID(params.slots_an_entry > 0 && params.slots_an_entry % params.series == 0);
  if (params.entries == 0) return Status::kSuccess;
  REDKNOT_VALID(params.kv != nullptr && params.gate != nullptr && params.ape != nullptr && params.norm != nullptr);
  REDKNOT_VALID(params.slots != nullptr && params.positions != nullptr && params.out != nullptr);
  REDKNOT_VALID(params.rope != nullptr && params.rope_positions > 0 && params.pool_rows > 0);
  REDKNOT_VALID(params.out_rows != nullptr || params.pool_rows >= params.entries);
  REDKNOT_VALID(params.rope_dim > 0 && params.rope_dim <= params.width);
  REDKNOT_SUPPORTED(params.width % kVector == 0 && params.rope_dim % kVector == 0 && params.width <= 1024);
  REDKNOT_SUPPORTED(params.entries <= INT32_MAX);
  REDKNOT_REQUIRE(aligned(params.kv, 16) && aligned(params.gate, 16) && aligned(params.ape, 16) &&
                      aligned(params.norm, 16) && aligned(params.rope, 16) &&
                      aligned(params.out, params.format == RowFormat::kBFloat16 ? 16 : 8),
                  Status::kMisaligned);
  if (params.width <= 256) return launch<1>(params, stream);
  if (params.width <= 512) return launch<2>(params, stream);
  return launch<4>(params, stream);
}

}  // namespace redknot
