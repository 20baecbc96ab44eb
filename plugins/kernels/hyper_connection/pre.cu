// A few rows run by themselves (few_rows.cu), rows of 4096 and 7168 channels in one pass (one_pass.cu). Others, and the
// head of many rows, take three kernels: the mixes (streams x fn, split over the long axis, on tensor cores; each block
// keeps its slice of fn in shared memory and streams rows past it), their weights (Sinkhorn, a row a thread), then the
// collapse with its norm, from the last row back, so that the streams read last by the first kernel are still in L2.

#include <algorithm>

#include "common/check.h"
#include "common/device.h"
#include "common/ptx.cuh"
#include "common/vector.cuh"
#include "kernels/hyper_connection/few_rows.h"
#include "kernels/hyper_connection/launch.h"
#include "kernels/hyper_connection/one_pass.h"
#include "kernels/hyper_connection/weights.cuh"

namespace redknot {
namespace {

constexpr int kThreads = 256;
constexpr int kTileRows = 128;            // 8 warps of 16 rows
constexpr int kSlice = 1024;              // depth of one block
constexpr int kSlicePitch = kSlice + 32;  // rows 64 bytes apart modulo the banks: quads of lanes do not collide
constexpr int kMixTiles = 3;              // of eight mixes
constexpr int kMixes = kMixTiles * 8;
constexpr int kGroup = 2;     // blocks of 32 channels loaded ahead
constexpr int kPartial = 28;  // floats a row and split: mixes, then the sum of squares at kMixes
constexpr int kPre = 4;       // floats a row: weights of the collapse
constexpr int kResidentBlocks = 2 * kHopperProcessors;
constexpr int kWeighThreads = 128;
constexpr int kRowLanes = 8;  // lanes that weigh one row

struct Split {
  int depth;  // streams * hidden
  int splits;
};

Split split_of(int64_t depth) { return {static_cast<int>(depth), static_cast<int>((depth + kSlice - 1) / kSlice)}; }

int mix_count(HyperConnectionPreParams const& params) {
  return params.head ? params.stream_count : (2 + params.stream_count) * params.stream_count;
}

// fn as two bf16 terms (16 bits of mantissa) into shared memory: high [mixes][pitch], then low.
template <int kTiles>
__device__ void stage_fn(float const* fn, int mixes, int depth, int first, __nv_bfloat16* high) {
  __nv_bfloat16* const low = high + kTiles * 8 * kSlicePitch;
  constexpr int kQuads = kSlice / 4;
#pragma unroll 8
  for (int index = static_cast<int>(threadIdx.x); index < kTiles * 8 * kQuads; index += kThreads) {
    int const mix = index / kQuads;
    int const column = index % kQuads * 4;
    float4 value{0, 0, 0, 0};
    if (mix < mixes && first + column < depth) {
      value = __ldg(reinterpret_cast<float4 const*>(fn + static_cast<int64_t>(mix) * depth + first + column));
    }
    float const rest[4] = {value.x - round_bf16(value.x), value.y - round_bf16(value.y), value.z - round_bf16(value.z),
                           value.w - round_bf16(value.w)};
    int const target = mix * kSlicePitch + column;
    *reinterpret_cast<uint2*>(high + target) = {ptx::pack_bf16(value.x, value.y), ptx::pack_bf16(value.z, value.w)};
    *reinterpret_cast<uint2*>(low + target) = {ptx::pack_bf16(rest[0], rest[1]), ptx::pack_bf16(rest[2], rest[3])};
  }
}

__device__ __forceinline__ float squares(uint4 raw) {
  float values[kVector];
  unpack_bf16(raw, values);
  float sum = 0.0F;
#pragma unroll
  for (float const value : values) sum += value * value;
  return sum;
}

// The streams of one lane in kGroup blocks of 32 channels: rows `row` and `row + 8`, zero outside the tensor.
struct Fragments {
  uint4 upper[kGroup];
  uint4 lower[kGroup];

  __device__ __forceinline__ void load(__nv_bfloat16 const* streams, int64_t rows, int depth, int64_t row, int first,
                                       int blocks) {
    __nv_bfloat16 const* const source = streams + row * depth + first * 32;
#pragma unroll
    for (int index = 0; index < kGroup; ++index) {
      bool const inside = first + index < blocks;
      upper[index] = lower[index] = uint4{0, 0, 0, 0};
      if (inside && row < rows) upper[index] = load_once(source + index * 32);
      if (inside && row + 8 < rows) lower[index] = load_once(source + static_cast<int64_t>(depth) * 8 + index * 32);
    }
  }
};

// Partial mixes and sums of squares over one slice of the depth, for every gridDim.x-th tile of 128 rows. The depth is
// permuted inside blocks of 32 (a lane's 16-byte load feeds two products), alike for both operands: sums do not change.
template <int kTiles>
__global__ void __launch_bounds__(kThreads, 2)
    mix_kernel(HyperConnectionPreParams const params, int mixes, Split const split, float* partials) {
  extern __shared__ uint4 shared_raw[];
  auto* const high = reinterpret_cast<__nv_bfloat16*>(shared_raw);
  __nv_bfloat16* const low = high + kTiles * 8 * kSlicePitch;
  int const lane = static_cast<int>(threadIdx.x) % kWarp;
  int const warp = static_cast<int>(threadIdx.x) / kWarp;
  int const group = lane / 4;
  int const quad = lane % 4;
  int const first = static_cast<int>(blockIdx.y) * kSlice;
  int const blocks = min(kSlice, split.depth - first) / 32;
  auto const* streams = static_cast<__nv_bfloat16 const*>(params.streams) + first + quad * kVector;
  float* const partial = partials + static_cast<int64_t>(blockIdx.y) * params.rows * kPartial;
  int64_t const tiles = (params.rows + kTileRows - 1) / kTileRows;
  int const row_in_tile = warp * 16 + group;
  Fragments next;
  next.load(streams, params.rows, split.depth, static_cast<int64_t>(blockIdx.x) * kTileRows + row_in_tile, 0, blocks);
  stage_fn<kTiles>(params.fn, mixes, split.depth, first, high);
  __syncthreads();
  for (int64_t tile_index = blockIdx.x; tile_index < tiles; tile_index += gridDim.x) {
    int64_t const tile_row = tile_index * kTileRows + row_in_tile;
    int64_t const next_row = tile_row + static_cast<int64_t>(gridDim.x) * kTileRows;
    float sums[kTiles][4] = {};
    float rests[kTiles][4] = {};
    float square_upper = 0.0F;
    float square_lower = 0.0F;
    for (int begin = 0; begin < blocks; begin += kGroup) {
      Fragments const now = next;
      bool const last = begin + kGroup >= blocks;  // then the first group of the next tile
      next.load(streams, params.rows, split.depth, last ? next_row : tile_row, last ? 0 : begin + kGroup, blocks);
#pragma unroll
      for (int index = 0; index < kGroup; ++index) {
        uint4 const a = now.upper[index];
        uint4 const b = now.lower[index];
        square_upper += squares(a);
        square_lower += squares(b);
        uint32_t const early[4] = {a.x, b.x, a.y, b.y};
        uint32_t const late[4] = {a.z, b.z, a.w, b.w};
        // Past the last block the fragments are zero; any fn inside shared memory will do.
        int const block = min(begin + index, blocks - 1);
        uint4 h[kTiles];
        uint4 l[kTiles];
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          int const source = (tile * 8 + group) * kSlicePitch + block * 32 + quad * kVector;
          h[tile] = *reinterpret_cast<uint4 const*>(high + source);
          l[tile] = *reinterpret_cast<uint4 const*>(low + source);
        }
        // High and low terms have sums of their own: twice as many independent products in flight.
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
          ptx::mma_bf16(sums[tile], early[0], early[1], early[2], early[3], h[tile].x, h[tile].y);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
          ptx::mma_bf16(rests[tile], early[0], early[1], early[2], early[3], l[tile].x, l[tile].y);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
          ptx::mma_bf16(sums[tile], late[0], late[1], late[2], late[3], h[tile].z, h[tile].w);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
          ptx::mma_bf16(rests[tile], late[0], late[1], late[2], late[3], l[tile].z, l[tile].w);
      }
    }
    square_upper = lane_sum<4>(square_upper);
    square_lower = lane_sum<4>(square_lower);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int64_t const row = tile_row + half * 8;
      if (row >= params.rows) continue;
      float* const target = partial + row * kPartial;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        *reinterpret_cast<float2*>(target + tile * 8 + quad * 2) = {
            sums[tile][half * 2] + rests[tile][half * 2], sums[tile][half * 2 + 1] + rests[tile][half * 2 + 1]};
      }
      if (quad == 0) {
        *reinterpret_cast<float4*>(target + kMixes) = {half == 0 ? square_upper : square_lower, 0.0F, 0.0F, 0.0F};
      }
    }
  }
}

// Weights of one row: `pre` for the collapse, post and comb. Eight lanes a row read its partials; then each works out
// the whole row, since a four by four Sinkhorn is a chain of latencies, not of work.
template <int kStreams>
__global__ void __launch_bounds__(kWeighThreads)
    weigh_kernel(HyperConnectionPreParams const params, Split const split, float const* partials, float* weights) {
  int64_t const row = (static_cast<int64_t>(blockIdx.x) * kWeighThreads + threadIdx.x) / kRowLanes;
  int const lane = static_cast<int>(threadIdx.x) % kRowLanes;
  bool const inside = row < params.rows;
  constexpr int kCells = kStreams * kStreams;
  static_assert(2 * kStreams + kCells <= kMixes && kStreams <= kPre && kPartial <= 4 * kRowLanes);
  float4 sum{0, 0, 0, 0};
  int const used = params.head ? kStreams : 2 * kStreams + kCells;  // other quads were not written
  if (inside && (lane * 4 < used || lane * 4 == kMixes)) {
    auto const* source = reinterpret_cast<float4 const*>(partials + row * kPartial) + lane;
    int64_t const step = params.rows * (kPartial / 4);
#pragma unroll 8
    for (int part = 0; part < split.splits; ++part) {
      float4 const value = __ldcg(source + part * step);
      sum.x += value.x, sum.y += value.y, sum.z += value.z, sum.w += value.w;
    }
  }
  float mix[kPartial];
#pragma unroll
  for (int quad = 0; quad < kPartial / 4; ++quad) {
    mix[quad * 4] = __shfl_sync(kAllLanes, sum.x, quad, kRowLanes);
    mix[quad * 4 + 1] = __shfl_sync(kAllLanes, sum.y, quad, kRowLanes);
    mix[quad * 4 + 2] = __shfl_sync(kAllLanes, sum.z, quad, kRowLanes);
    mix[quad * 4 + 3] = __shfl_sync(kAllLanes, sum.w, quad, kRowLanes);
  }
  if (!inside) return;
  float const inverse = rsqrtf(mix[kMixes] / static_cast<float>(split.depth) + params.norm_eps);
#pragma unroll
  for (int stream = 0; stream < kStreams; ++stream) {
    float const logit = mix[stream] * inverse * params.scale[0] + params.base[stream];
    if (lane == stream) weights[row * kPre + stream] = sigmoid(logit) + params.eps;
  }
  if (params.head) return;
  write_weights<kStreams>(params, row, lane, mix, inverse);
}

// One block a row, from the last row back.
template <int kStreams, int kVectors>
__global__ void __launch_bounds__(kThreads)
    collapse_kernel(HyperConnectionPreParams const params, float const* weights) {
  __shared__ float scratch[kThreads / kWarp];
  int64_t const row = params.rows - 1 - blockIdx.x;
  auto const* streams = static_cast<__nv_bfloat16 const*>(params.streams) + row * kStreams * params.hidden;
  uint4 raw[kVectors][kStreams];
#pragma unroll
  for (int index = 0; index < kVectors; ++index) {
    int const channel = (index * kThreads + static_cast<int>(threadIdx.x)) * kVector;
#pragma unroll
    for (int stream = 0; stream < kStreams; ++stream) {
      raw[index][stream] =
          channel < params.hidden ? load_once(streams + stream * params.hidden + channel) : uint4{0, 0, 0, 0};
    }
  }
  float4 const pre_row = __ldg(reinterpret_cast<float4 const*>(weights) + row);
  float const pre[kPre] = {pre_row.x, pre_row.y, pre_row.z, pre_row.w};
  float collapsed[kVectors][kVector];
  float square = 0.0F;
#pragma unroll
  for (int index = 0; index < kVectors; ++index) {
#pragma unroll
    for (float& value : collapsed[index]) value = 0.0F;
#pragma unroll
    for (int stream = 0; stream < kStreams; ++stream) {
      float values[kVector];
      unpack_bf16(raw[index][stream], values);
#pragma unroll
      for (int slot = 0; slot < kVector; ++slot) collapsed[index][slot] += pre[stream] * values[slot];
    }
#pragma unroll
    for (float& value : collapsed[index]) {
      value = round_bf16(value);
      square += value * value;
    }
  }
  float const inverse =
      rsqrtf(block_sum<kThreads>(square, scratch) / static_cast<float>(params.hidden) + params.norm_eps);
  auto* const normed = static_cast<__nv_bfloat16*>(params.normed) + row * params.hidden;
#pragma unroll
  for (int index = 0; index < kVectors; ++index) {
    int const channel = (index * kThreads + static_cast<int>(threadIdx.x)) * kVector;
    if (channel >= params.hidden) continue;
    float weights[kVector];
    load_weights(params.norm, params.norm_is_float, channel, weights);
#pragma unroll
    for (int slot = 0; slot < kVector; ++slot) weights[slot] *= collapsed[index][slot] * inverse;
    store_vector(normed + channel, pack_bf16(weights));
  }
}

template <int kTiles>
Status launch_mix(HyperConnectionPreParams const& params, int mixes, Split const& split, float* partials,
                  cudaStream_t stream) {
  constexpr size_t kBytes = 2UL * kTiles * 8 * kSlicePitch * sizeof(__nv_bfloat16);
  REDKNOT_CUDA(cudaFuncSetAttribute(mix_kernel<kTiles>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  int64_t const tiles = (params.rows + kTileRows - 1) / kTileRows;
  int64_t const columns = std::clamp<int64_t>(kResidentBlocks / split.splits, 1, tiles);
  dim3 const grid(static_cast<unsigned>(columns), static_cast<unsigned>(split.splits));
  mix_kernel<kTiles><<<grid, kThreads, kBytes, stream>>>(params, mixes, split, partials);
  REDKNOT_LAUNCHED();
  return Status::kSuccess;
}

template <int kStreams, int kVectors>
Status launch(HyperConnectionPreParams const& params, cudaStream_t stream) {
  Split const split = split_of(static_cast<int64_t>(kStreams) * params.hidden);
  auto* const weights = static_cast<float*>(params.workspace);  // [rows, kPre], then [splits, rows, kPartial]
  float* const partials = weights + params.rows * kPre;
  int const mixes = mix_count(params);
  REDKNOT_TRY(mixes <= 8 ? launch_mix<1>(params, mixes, split, partials, stream)
                         : launch_mix<kMixTiles>(params, mixes, split, partials, stream));
  auto const weigh_blocks = static_cast<unsigned>((params.rows * kRowLanes + kWeighThreads - 1) / kWeighThreads);
  weigh_kernel<kStreams><<<weigh_blocks, kWeighThreads, 0, stream>>>(params, split, partials, weights);
  REDKNOT_LAUNCHED();
  collapse_kernel<kStreams, kVectors><<<static_cast<unsigned>(params.rows), kThreads, 0, stream>>>(params, weights);
  REDKNOT_LAUNCHED();
  return Status::kSuccess;
}

template <int kStreams>
Status launch_streams(HyperConnectionPreParams const& params, cudaStream_t stream) {
  if (params.hidden <= kThreads * kVector) return launch<kStreams, 1>(params, stream);
  if (params.hidden <= 2 * kThreads * kVector) return launch<kStreams, 2>(params, stream);
  return launch<kStreams, 4>(params, stream);
}

}  // namespace

size_t hyper_connection_pre_workspace(int64_t rows, int32_t stream_count, int32_t hidden) {
  if (rows <= 0 || stream_count <= 0 || hidden <= 0) return 0;
  int64_t const splits = split_of(static_cast<int64_t>(stream_count) * hidden).splits;
  return static_cast<size_t>(rows) * static_cast<size_t>(kPre + splits * kPartial) * sizeof(float);
}

Status hyper_connection_pre(HyperConnectionPreParams const& params, cudaStream_t stream) {
  REDKNOT_VALID(params.rows >= 0 && params.hidden > 0 && (params.head || params.iterations > 0));
  REDKNOT_SUPPORTED(params.stream_count == 2 || params.stream_count == 4);
  REDKNOT_SUPPORTED(params.hidden <= 4 * kThreads * kVector && params.rows <= INT32_MAX);
  REDKNOT_SUPPORTED(params.hidden % kVector == 0 && params.stream_count * params.hidden % 32 == 0);
  if (params.rows == 0) return Status::kSuccess;
  REDKNOT_VALID(params.streams != nullptr && params.fn != nullptr && params.base != nullptr && params.scale != nullptr);
  REDKNOT_VALID(params.norm != nullptr && params.normed != nullptr && params.workspace != nullptr);
  REDKNOT_VALID(params.head || (params.post != nullptr && params.comb != nullptr));
  REDKNOT_REQUIRE(aligned(params.streams, 16) && aligned(params.fn, 16) && aligned(params.norm, 16) &&
                      aligned(params.normed, 16) && aligned(params.workspace, 16) &&
                      (params.head || (aligned(params.post, 16) && aligned(params.comb, 16))),
                  Status::kMisaligned);
  size_t const needed = hyper_connection_pre_workspace(params.rows, params.stream_count, params.hidden);
  REDKNOT_REQUIRE(params.workspace_bytes >= needed, Status::kWorkspaceTooSmall);
  Status const few = hyper_connection_few_rows(params, stream);
  REDKNOT_REQUIRE(few == Status::kUnsupported, few);
  Status const one_pass = hyper_connection_one_pass(params, stream);
  REDKNOT_REQUIRE(one_pass == Status::kUnsupported, one_pass);
  return params.stream_count == 4 ? launch_streams<4>(params, stream) : launch_streams<2>(params, stream);
}

}  // namespace redknot
