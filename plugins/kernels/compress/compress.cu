#include <algorithm>

#include "common/check.h"
#include "common/device.h"
#include "common/ptx.cuh"
#include "kernels/compress/launch.h"
#include "kernels/norm_rope_pack/row.cuh"

namespace redknot {
namespace {

constexpr int kFewThreads = 128;
constexpr int kMaxSharedBytes = 48 * 1024;
constexpr int kMaxPairBytes = 100 * 1024;  // of a block of two entries: two blocks fit
constexpr int kMaxThreads = 384;
constexpr int kFewBatch = 4;  // slots pooled at a time
constexpr int kManyBatch = 2;
constexpr int kPairThreads = 256;
constexpr int kPairSlots = 256;                    // most slots that a block of two entries keeps the rows of
constexpr int kPairsFrom = 4 * kHopperProcessors;  // entries that fill the chip twice when blocks take two
constexpr int kFewSlots = 8;                       // entries of at most so many slots take the warp kernel

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
    float const keep = ptx::exp2_fast(fmaf(peak, ptx::kLog2E, offset));
    total *= keep;
    sum *= keep;
#pragma unroll
    for (int slot = 0; slot < kBatch; ++slot) {
      float const weight = ptx::exp2_fast(fmaf(logits[slot], ptx::kLog2E, offset));
      total += weight;
      sum = fmaf(weight, values[slot], sum);
    }
    peak = raised;
  }

  __device__ __forceinline__ void merge(float other_peak, float other_total, float other_sum) {
    float const raised = fmaxf(peak, other_peak);
    float const offset = offset_of(raised);
    float const keep = ptx::exp2_fast(fmaf(peak, ptx::kLog2E, offset));
    float const take = ptx::exp2_fast(fmaf(other_peak, ptx::kLog2E, offset));
    total = keep * total + take * other_total;
    sum = keep * sum + take * other_sum;
    peak = raised;
  }

  __device__ __forceinline__ float pooled() const { return __fdividef(sum, total); }

 private:
  static __device__ __forceinline__ float offset_of(float peak) {
    return peak == -INFINITY ? 0.0F : -peak * ptx::kLog2E;
  }
};

// What one thread reads: eight channels of some slots of an entry.
struct SlotReader {
  CompressParams const& params;
  int channel;
  int ratio;
  int64_t stride;

  __device__ __forceinline__ SlotReader(CompressParams const& all, int first_channel)
      : params(all),
        channel(first_channel),
        ratio(all.slots_an_entry / all.series),
        stride(static_cast<int64_t>(all.series) * all.width) {}

  // Raw gate and value of a slot: zero where it is absent (row -1), NaN where its row is out of range.
  __device__ __forceinline__ bool load(int64_t row, int slot, uint4& gate, uint4& value) const {
    gate = value = uint4{0, 0, 0, 0};
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

// Adds slots `first`, `first + step`, ... of kEntries entries, kBatch of them, to the pools of eight channels.
// `rows`: the raw row of every slot, `pitch` slots an entry. The bias of a slot is read once for all entries.
template <int kBatch, int kEntries>
__device__ __forceinline__ void pool_batch(SlotReader const& reader, int64_t const* rows, int pitch, int first,
                                           int step, Pool (&pools)[kEntries][kVector]) {
  uint4 gates[kEntries][kBatch];
  uint4 raws[kEntries][kBatch];
  bool present[kEntries][kBatch];
  constexpr bool kShared = kEntries > 1;
  int const slots = reader.params.slots_an_entry;
#pragma unroll
  for (int index = 0; index < kBatch; ++index) {
    int const slot = first + index * step;
#pragma unroll
    for (int entry = 0; entry < kEntries; ++entry) {
      int64_t row = -1;
      if constexpr (kShared) {
        if (slot < slots) row = rows[entry * pitch + slot];
      } else {
        if (slot < slots) row = __ldg(rows + slot);
      }
      present[entry][index] = reader.load(row, slot, gates[entry][index], raws[entry][index]);
    }
  }
  // One entry: the bias of a slot is read where it is added, to save registers.
  float shared_bias[kShared ? kBatch : 1][kVector] = {};
  if constexpr (kShared) {
#pragma unroll
    for (int index = 0; index < kBatch; ++index) {
      if (first + index * step < slots) reader.bias(first + index * step, shared_bias[index]);
    }
  }
#pragma unroll
  for (int entry = 0; entry < kEntries; ++entry) {
    float logits[kVector][kBatch];
    float values[kVector][kBatch];
#pragma unroll
    for (int index = 0; index < kBatch; ++index) {
      float bias[kVector] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY};
      if constexpr (kShared) {
#pragma unroll
        for (int channel = 0; channel < kVector; ++channel) {
          bias[channel] = present[entry][index] ? shared_bias[index][channel] : -INFINITY;
        }
      } else {
        if (present[entry][index]) reader.bias(first + index * step, bias);
      }
      float gate[kVector];
      float value[kVector];
      unpack_bf16(gates[entry][index], gate);
      unpack_bf16(raws[entry][index], value);
#pragma unroll
      for (int channel = 0; channel < kVector; ++channel) {
        logits[channel][index] = gate[channel] + bias[channel];
        values[channel][index] = value[channel];
      }
    }
#pragma unroll
    for (int channel = 0; channel < kVector; ++channel) {
      pools[entry][channel].add(logits[channel], values[channel]);
    }
  }
}

// An entry of few slots by one warp: nothing but registers. Not inlined: where it is the exception, it would take the
// registers of the rule.
template <int kVectors>
__device__ __noinline__ void pool_few(CompressParams const& params, RowFinish const& finish, int64_t entry) {
  int const lane = static_cast<int>(threadIdx.x) % kWarp;
  float values[kVectors][kVector];
#pragma unroll
  for (int index = 0; index < kVectors; ++index) {
    int const channel = (index * kWarp + lane) * kVector;
#pragma unroll
    for (float& value : values[index]) value = 0.0F;
    if (channel >= params.width) continue;
    SlotReader const reader(params, channel);
    Pool pools[1][kVector];
#pragma unroll
    for (int first = 0; first < kFewSlots; first += kFewBatch) {
      pool_batch<kFewBatch>(reader, params.slots + entry * params.slots_an_entry, 0, first, 1, pools);
    }
#pragma unroll
    for (int slot = 0; slot < kVector; ++slot) values[index][slot] = pools[0][slot].pooled();
  }
  finish_row<kWarp, kVectors>(finish, lane, params.positions[entry], target_of(params, entry, finish.bytes), values,
                              nullptr);
}

template <int kVectors>
__global__ void __launch_bounds__(kFewThreads, 5)
    compress_few_kernel(__grid_constant__ CompressParams const params, __grid_constant__ RowFinish const finish) {
  int64_t const entry = static_cast<int64_t>(blockIdx.x) * (kFewThreads / kWarp) + threadIdx.x / kWarp;
  if (entry < params.entries) pool_few<kVectors>(params, finish, entry);
}

// One of eight bf16 channels.
__device__ __forceinline__ float channel_of(uint4 const& raw, int channel) {
  int const word = channel / 2;
  float2 const pair = ptx::unpack_bf16(word == 0 ? raw.x : word == 1 ? raw.y : word == 2 ? raw.z : raw.w);
  return channel % 2 == 0 ? pair.x : pair.y;
}

// Four bias values at a channel.
template <bool kFloat>
__device__ __forceinline__ float4 bias_quad(void const* ape, int offset) {
  if constexpr (kFloat) return __ldg(reinterpret_cast<float4 const*>(static_cast<float const*>(ape) + offset));
  uint2 const raw = __ldg(reinterpret_cast<uint2 const*>(static_cast<__nv_bfloat16 const*>(ape) + offset));
  float2 const low = ptx::unpack_bf16(raw.x), high = ptx::unpack_bf16(raw.y);
  return {low.x, low.y, high.x, high.y};
}

// Entries of two overlapping windows of four whose width fills the warp: the model's. One that has all its slots needs
// no tests of them, has addresses known up to its rows, and is pooled in one go: half of the instructions. Others (the
// first of a document, the last of one that ends inside a window) go the general way.
template <int kVectors, bool kFloatBias>
__global__ void __launch_bounds__(kFewThreads, 4)
    compress_overlap_kernel(__grid_constant__ CompressParams const params, __grid_constant__ RowFinish const finish) {
  constexpr int kSlots = kFewSlots;
  constexpr int kRatio = kSlots / 2;
  constexpr int kPart = kWarp * kVector;  // channels of a vector
  constexpr int kWidth = kVectors * kPart;
  constexpr int kStride = 2 * kWidth;
  int64_t const entry = static_cast<int64_t>(blockIdx.x) * (kFewThreads / kWarp) + threadIdx.x / kWarp;
  if (entry >= params.entries) return;
  int const lane = static_cast<int>(threadIdx.x) % kWarp;
  int64_t const own = __ldg(params.slots + entry * kSlots + lane % kSlots);
  if (__any_sync(kAllLanes, own < 0 || own >= params.raw_rows)) {
    pool_few<kVectors>(params, finish, entry);
    return;
  }
  int const own_row = static_cast<int>(own);
  auto const* const gate = static_cast<__nv_bfloat16 const*>(params.gate) + lane * kVector;
  auto const* const kv = static_cast<__nv_bfloat16 const*>(params.kv) + lane * kVector;
  float values[kVectors][kVector];
#pragma unroll
  for (int vector = 0; vector < kVectors; ++vector) {
    uint4 gates[kSlots];
    uint4 raws[kSlots];
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      int64_t const row = static_cast<int64_t>(__shfl_sync(kAllLanes, own_row, slot)) * kStride;
      int const offset = slot / kRatio * kWidth + vector * kPart;
      gates[slot] = load_once(gate + row + offset);
      raws[slot] = load_once(kv + row + offset);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float4 bias[kSlots];
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
        int const offset = slot % kRatio * kStride + slot / kRatio * kWidth + vector * kPart + half * 4;
        bias[slot] = bias_quad<kFloatBias>(params.ape, offset + lane * kVector);
      }
#pragma unroll
      for (int at = 0; at < 4; ++at) {
        int const channel = half * 4 + at;
        float logits[kSlots];
        float peak = -INFINITY;
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) {
          float const added[4] = {bias[slot].x, bias[slot].y, bias[slot].z, bias[slot].w};
          logits[slot] = channel_of(gates[slot], channel) + added[at];
          peak = fmaxf(peak, logits[slot]);
        }
        // NaN logits go through the sums; the peak may lose them.
        float const offset = peak == -INFINITY ? 0.0F : -peak * ptx::kLog2E;
        float total = 0.0F;
        float sum = 0.0F;
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) {
          float const weight = ptx::exp2_fast(fmaf(logits[slot], ptx::kLog2E, offset));
          total += weight;
          sum = fmaf(weight, channel_of(raws[slot], channel), sum);
        }
        values[vector][channel] = __fdividef(sum, total);
      }
    }
  }
  finish_row<kWarp, kVectors>(finish, lane, params.positions[entry], target_of(params, entry, finish.bytes), values,
                              nullptr);
}

template <int kVectors>
void launch_few(CompressParams const& params, RowFinish const& finish, cudaStream_t stream) {
  auto const blocks = static_cast<unsigned>((params.entries + kFewThreads / kWarp - 1) / (kFewThreads / kWarp));
  bool const overlap = params.series == 2 && params.slots_an_entry == kFewSlots && params.raw_rows <= INT32_MAX &&
                       params.width == kVectors * kWarp * kVector;
  if (overlap && params.ape_is_float) {
    compress_overlap_kernel<kVectors, true><<<blocks, kFewThreads, 0, stream>>>(params, finish);
  } else if (overlap) {
    compress_overlap_kernel<kVectors, false><<<blocks, kFewThreads, 0, stream>>>(params, finish);
  } else {
    compress_few_kernel<kVectors><<<blocks, kFewThreads, 0, stream>>>(params, finish);
  }
}

// Shared memory of a block: [entries][groups][3][width], then the pooled vectors [entries][width]. The rows of the
// slots of several entries, [entries][slots], lie in front.
constexpr int64_t pool_bytes(int entries, int groups, int width) {
  return static_cast<int64_t>(entries) * (groups * 3 + 1) * width * 4 + (entries > 1 ? entries * kPairSlots * 8 : 0);
}

// One block kEntries entries. Thread (group, lane): eight channels of every kGroups-th slot; groups merge in shared
// memory. Entries of a block share the bias, which is as many bytes as the rows themselves.
template <int kVectors, int kEntries>
__global__ void __launch_bounds__(kEntries == 1 ? kMaxThreads : kPairThreads, 2)
    compress_kernel(CompressParams const params, RowFinish const finish, int lanes, int groups) {
  extern __shared__ __align__(16) uint8_t pool_memory[];
  auto* const slot_rows = reinterpret_cast<int64_t*>(pool_memory);
  float* const shared = reinterpret_cast<float*>(pool_memory + (kEntries > 1 ? kEntries * kPairSlots * 8 : 0));
  int64_t const entry = static_cast<int64_t>(blockIdx.x) * kEntries;
  int const thread = static_cast<int>(threadIdx.x);
  int const threads = static_cast<int>(blockDim.x);
  int const lane = thread % lanes;
  int const group = thread / lanes;
  int const channel = lane * kVector;
  int const width = params.width;
  int64_t const* rows = params.slots + entry * params.slots_an_entry;
  if constexpr (kEntries > 1) {
    for (int index = thread; index < kEntries * params.slots_an_entry; index += threads) {
      // An entry past the last pools nothing.
      bool const inside = entry + index / params.slots_an_entry < params.entries;
      slot_rows[index] = inside ? __ldg(rows + index) : -1;
    }
    rows = slot_rows;
    __syncthreads();
  }
  if (group < groups) {
    SlotReader const reader(params, channel);
    Pool pools[kEntries][kVector];
    for (int slot = group; slot < params.slots_an_entry; slot += groups * kManyBatch) {
      pool_batch<kManyBatch>(reader, rows, params.slots_an_entry, slot, groups, pools);
    }
#pragma unroll
    for (int which = 0; which < kEntries; ++which) {
#pragma unroll
      for (int index = 0; index < kVector; ++index) {
        float* const target = shared + (which * groups + group) * 3 * width + channel + index;
        target[0] = pools[which][index].peak;
        target[width] = pools[which][index].total;
        target[2 * width] = pools[which][index].sum;
      }
    }
  }
  __syncthreads();
  float* const pooled = shared + kEntries * groups * 3 * width;
  for (int index = thread; index < kEntries * width; index += threads) {
    int const which = kEntries == 1 ? 0 : index / width;
    Pool pool;
    for (int other = 0; other < groups; ++other) {
      float const* const source = shared + (which * groups + other) * 3 * width + index - which * width;
      pool.merge(source[0], source[width], source[2 * width]);
    }
    pooled[index] = pool.pooled();
  }
  __syncthreads();
  for (int which = thread / kWarp; which < kEntries && entry + which < params.entries; which += threads / kWarp) {
    float values[kVectors][kVector];
#pragma unroll
    for (int index = 0; index < kVectors; ++index) {
      int const first = (index * kWarp + thread % kWarp) * kVector;
#pragma unroll
      for (int slot = 0; slot < kVector; ++slot) {
        values[index][slot] = first < width ? pooled[which * width + first + slot] : 0.0F;
      }
    }
    finish_row<kWarp, kVectors>(finish, thread % kWarp, params.positions[entry + which],
                                target_of(params, entry + which, finish.bytes), values, nullptr);
  }
}

// Slots of an entry that a block reads at a time.
int group_count(CompressParams const& params, int most_threads, int64_t most_bytes) {
  int const lanes = params.width / kVector;
  int const fit = static_cast<int>(most_bytes / 4 / params.width - 1) / 3;
  return std::clamp(params.slots_an_entry / 4, 1, std::min(most_threads / lanes, fit));
}

template <int kVectors, int kEntries>
Status launch_blocks(CompressParams const& params, RowFinish const& finish, int groups, cudaStream_t stream) {
  int const lanes = params.width / kVector;
  auto const blocks = static_cast<unsigned>((params.entries + kEntries - 1) / kEntries);
  auto const threads = static_cast<unsigned>(ceil_to(static_cast<int64_t>(lanes) * groups, kWarp));
  auto const bytes = static_cast<size_t>(pool_bytes(kEntries, groups, params.width));
  if constexpr (kEntries > 1) {
    REDKNOT_CUDA(cudaFuncSetAttribute(compress_kernel<kVectors, kEntries>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      kMaxPairBytes));
  }
  compress_kernel<kVectors, kEntries><<<blocks, threads, bytes, stream>>>(params, finish, lanes, groups);
  REDKNOT_LAUNCHED();
  return Status::kSuccess;
}

template <int kVectors>
Status launch(CompressParams const& params, cudaStream_t stream) {
  RowFinish const finish = make_finish(params);
  if (params.slots_an_entry <= kFewSlots) {
    launch_few<kVectors>(params, finish, stream);
    REDKNOT_LAUNCHED();
    return Status::kSuccess;
  }
  if (params.entries >= kPairsFrom && params.slots_an_entry <= kPairSlots) {
    int const groups = group_count(params, kPairThreads, kMaxPairBytes / 2 - kPairSlots * 8);
    return launch_blocks<kVectors, 2>(params, finish, groups, stream);
  }
  int const groups = group_count(params, kMaxThreads, kMaxSharedBytes);
  return launch_blocks<kVectors, 1>(params, finish, groups, stream);
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
