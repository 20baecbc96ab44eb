#include <algorithm>

#include "common/check.h"
#include "kernels/compress/launch.h"
#include "kernels/norm_rope_pack/row.cuh"

namespace redknot {
namespace {

constexpr int kFewThreads = 128;
constexpr int kMaxSharedBytes = 48 * 1024;
constexpr int kMaxThreads = 384;
constexpr int kFewBatch = 4;  // slots pooled at a time
constexpr int kManyBatch = 2;
constexpr int kFewSlots = 8;  // entries of at most so many slots take the warp kernel
constexpr float kLog2E = 1.4426950408889634F;

__device__ __forceinline__ float exponential(float exponent_of_two) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(exponent_of_two));
  return result;
}

// Softmax pooling of one channel. NaN logits go through the sums; the peak may lose them.
struct Pool {
  float peak = -INFINITY;
  float total = 0.0F;
  float sum = 0.0F;

  // Absent slots have logit -inf and value 0.
  template <int kBatch>
  __device__ __forceinline__ void add(float const (&logits)[kBatch], float const (&values)[kBatch]) {
    float raised = peak;
#pragma unroll
    for (float const logit : logits) raised = fmaxf(raised, logit);
    float const offset = offset_of(raised);
    float const keep = exponential(fmaf(peak, kLog2E, offset));
    total *= keep;
    sum *= keep;
#pragma unroll
    for (int slot = 0; slot < kBatch; ++slot) {
      float const weight = exponential(fmaf(logits[slot], kLog2E, offset));
      total += weight;
      sum = fmaf(weight, values[slot], sum);
    }
    peak = raised;
  }

  __device__ __forceinline__ void merge(float other_peak, float other_total, float other_sum) {
    float const raised = fmaxf(peak, other_peak);
    float const offset = offset_of(raised);
    float const keep = exponential(fmaf(peak, kLog2E, offset));
    float const take = exponential(fmaf(other_peak, kLog2E, offset));
    total = keep * total + take * other_total;
    sum = keep * sum + take * other_sum;
    peak = raised;
  }

  __device__ __forceinline__ float pooled() const { return __fdividef(sum, total); }

 private:
  static __device__ __forceinline__ float offset_of(float peak) { return peak == -INFINITY ? 0.0F : -peak * kLog2E; }
};

// What one thread reads of one entry: eight channels of some slots.
struct SlotReader {
  CompressParams const& params;
  int64_t const* slots;
  int channel;
  int ratio;
  int64_t stride;

  __device__ __forceinline__ SlotReader(CompressParams const& all, int64_t entry, int first_channel)
      : params(all),
        slots(all.slots + entry * all.slots_an_entry),
        channel(first_channel),
        ratio(all.slots_an_entry / all.series),
        stride(static_cast<int64_t>(all.series) * all.width) {}

  // Raw gate and value of a slot: zero where it is absent (-1, or past the last), NaN where its row is out of range.
  __device__ __forceinline__ bool load(int slot, uint4& gate, uint4& value) const {
    gate = value = uint4{0, 0, 0, 0};
    if (slot >= params.slots_an_entry) return false;
    int64_t const row = __ldg(slots + slot);
    if (row == -1) return false;
    if (row >= 0 && row < params.raw_rows) {
      int64_t const offset = row * stride + series_channel(slot);
      gate = load_once(static_cast<__nv_bfloat16 const*>(params.gate) + offset);
      value = load_once(static_cast<__nv_bfloat16 const*>(params.kv) + offset);
    } else {
      gate = uint4{~0U, ~0U, ~0U, ~0U};
    }
    return true;
  }

  // The window before gives the first series, the window itself the last.
  __device__ __forceinline__ int64_t series_channel(int slot) const {
    return (slot < ratio ? 0 : static_cast<int64_t>(params.width)) + channel;
  }

  __device__ __forceinline__ void bias(int slot, float (&values)[kVector]) const {
    int64_t const offset = (slot < ratio ? slot : slot - ratio) * stride + series_channel(slot);
    load_weights(params.ape, params.ape_is_float, offset, values);
  }
};

__device__ __forceinline__ uint8_t* target_of(CompressParams const& params, int64_t entry, int64_t bytes) {
  int64_t const target = params.out_rows == nullptr ? entry : params.out_rows[entry];
  if (target < 0 || target >= params.pool_rows) return nullptr;
  return static_cast<uint8_t*>(params.out) + target * bytes;
}

// Adds slots `first`, `first + step`, ... of one entry, kBatch of them, to the pools of eight channels.
template <int kBatch>
__device__ __forceinline__ void pool_batch(SlotReader const& reader, int first, int step, Pool (&pools)[kVector]) {
  uint4 gates[kBatch];
  uint4 raws[kBatch];
  bool present[kBatch];
#pragma unroll
  for (int index = 0; index < kBatch; ++index)
    present[index] = reader.load(first + index * step, gates[index], raws[index]);
  float logits[kVector][kBatch];
  float values[kVector][kBatch];
#pragma unroll
  for (int index = 0; index < kBatch; ++index) {
    float bias[kVector] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY};
    if (present[index]) reader.bias(first + index * step, bias);
    float gate[kVector];
    float value[kVector];
    unpack_bf16(gates[index], gate);
    unpack_bf16(raws[index], value);
#pragma unroll
    for (int channel = 0; channel < kVector; ++channel) {
      logits[channel][index] = gate[channel] + bias[channel];
      values[channel][index] = value[channel];
    }
  }
#pragma unroll
  for (int channel = 0; channel < kVector; ++channel) pools[channel].add(logits[channel], values[channel]);
}

// One warp an entry of few slots: nothing but registers.
template <int kVectors>
__global__ void __launch_bounds__(kFewThreads, 5)
    compress_few_kernel(CompressParams const params, RowFinish const finish) {
  int64_t const entry = static_cast<int64_t>(blockIdx.x) * (kFewThreads / kWarp) + threadIdx.x / kWarp;
  if (entry >= params.entries) return;
  int const lane = static_cast<int>(threadIdx.x) % kWarp;
  float values[kVectors][kVector];
#pragma unroll
  for (int index = 0; index < kVectors; ++index) {
    int const channel = (index * kWarp + lane) * kVector;
#pragma unroll
    for (float& value : values[index]) value = 0.0F;
    if (channel >= params.width) continue;
    SlotReader const reader(params, entry, channel);
    Pool pools[kVector];
#pragma unroll
    for (int first = 0; first < kFewSlots; first += kFewBatch) pool_batch<kFewBatch>(reader, first, 1, pools);
#pragma unroll
    for (int slot = 0; slot < kVector; ++slot) values[index][slot] = pools[slot].pooled();
  }
  finish_row<kWarp, kVectors>(finish, lane, params.positions[entry], target_of(params, entry, finish.bytes), values,
                              nullptr);
}

// One block an entry. Thread (group, lane): eight channels of every kGroups-th slot; groups merge in shared memory.
template <int kVectors>
__global__ void __launch_bounds__(kMaxThreads, 2)
    compress_kernel(CompressParams const params, RowFinish const finish, int lanes, int groups) {
  extern __shared__ float shared[];  // [groups][3][width], then the pooled vector [width]
  int64_t const entry = blockIdx.x;
  int const lane = static_cast<int>(threadIdx.x) % lanes;
  int const group = static_cast<int>(threadIdx.x) / lanes;
  int const channel = lane * kVector;
  int const width = params.width;

  if (group < groups) {
    SlotReader const reader(params, entry, channel);
    Pool pools[kVector];
    for (int slot = group; slot < params.slots_an_entry; slot += groups * kManyBatch) {
      pool_batch<kManyBatch>(reader, slot, groups, pools);
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
    pooled[index] = pool.pooled();
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
  finish_row<kWarp, kVectors>(finish, static_cast<int>(threadIdx.x), params.positions[entry],
                              target_of(params, entry, finish.bytes), values, nullptr);
}

template <int kVectors>
Status launch(CompressParams const& params, cudaStream_t stream) {
  RowFinish const finish = make_finish(params.norm, params.norm_is_float, params.rope, params.rope_positions,
                                       params.rope_dim, params.width, params.format, params.eps);
  if (params.slots_an_entry <= kFewSlots) {
    int64_t const blocks = (params.entries + kFewThreads / kWarp - 1) / (kFewThreads / kWarp);
    compress_few_kernel<kVectors><<<static_cast<unsigned>(blocks), kFewThreads, 0, stream>>>(params, finish);
    REDKNOT_LAUNCHED();
    return Status::kSuccess;
  }
  int const lanes = params.width / kVector;
  int const most = std::min(kMaxThreads / lanes, (kMaxSharedBytes / 4 / params.width - 1) / 3);
  int const groups = std::clamp(params.slots_an_entry / 4, 1, most);
  unsigned const threads = static_cast<unsigned>(ceil_to(static_cast<int64_t>(lanes) * groups, kWarp));
  size_t const bytes = sizeof(float) * static_cast<size_t>((groups * 3 + 1) * params.width);
  compress_kernel<kVectors>
      <<<static_cast<unsigned>(params.entries), threads, bytes, stream>>>(params, finish, lanes, groups);
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
