// hyper_connection_pre with the streams read once. A cluster of 16 blocks takes groups of rows; each block holds a
// sixteenth of the channels (of all four streams) of some groups in shared memory, and its part of fn, as two bf16
// terms, in registers. Every warp does one thing, group after group, and waits only for what that needs:
//   mix           up to eight warps: partial sums of streams x fn, on tensor cores
//   send mixes    the warps' sums, to the block that weighs the row
//   weigh         a row of every group: its sums over the blocks make its weights, which go to all blocks
//   balance       post and comb of weighed rows, eight at a time
//   collapse      up to eight warps: the weighted sum of the streams and its squares; then norm and output of the group
//                 before, whose squares have come from all blocks meanwhile
//   send squares  to all blocks; starts copies of later groups
// Nobody waits for room in another block. A block that sends for group k holds that group, so it has collapsed group
// k - kStages, and finished the one before that: weights and squares of these came from every block, so every block is
// through with what the slots held that many groups before, and one or two more.

#include <algorithm>
#include <atomic>
#include <climits>

#include "common/check.h"
#include "common/cluster.cuh"
#include "common/cluster_launch.h"
#include "common/ptx.cuh"
#include "common/tensor_map.h"
#include "common/vector.cuh"
#include "kernels/hyper_connection/one_pass.h"
#include "kernels/hyper_connection/weights.cuh"

namespace redknot {
namespace {

constexpr int kCluster = 16;
constexpr int kStreams = 4;
constexpr int kMixes = (2 + kStreams) * kStreams;
constexpr int kMixRows = kMixes / 8;  // mixes of one lane of a product
constexpr int kSquares = kMixes;      // value after the mixes: squares of the streams
constexpr int kSent = kMixes + 1;     // values of a row that are summed by its owner
constexpr int kLine = 28;             // floats of a row of partial sums, and of one source in a receive slot
// Named barriers of a block, at which many warps only say that they were there; two, for odd and even groups.
constexpr int kMixed = 1;      // partial mixes are there
constexpr int kCollapsed = 3;  // squares of the collapse are there, and the streams are done with
// Rows that wait for their Sinkhorn.
constexpr int kPendingFull = 5;
constexpr int kPendingTaken = 6;
constexpr int kUnits = 2;  // parts of a warp's work on a group, each of 8 rows x 32 channels
constexpr int kUnitChannels = 32;
constexpr int kTeamThreads = 256;                      // of the warps that mix, and of those that collapse
constexpr int kTerms = 3;                              // tiles of 16 terms: 24 high and 24 low ones
constexpr int kSteps = kStreams * kUnitChannels / 16;  // products along a warp's channels of one half, for each tile
constexpr int kKeptQuads = kTerms * kSteps;            // operands of products that a lane keeps in registers
constexpr int kQuadBytes = 16 * kWarp;                 // of an operand in shared memory
constexpr int kPanelChannels = kPanelBytes / 2;
constexpr int kPanelChunks = kPanelBytes / 16;
constexpr int kStageAlignment = 1024;  // of swizzled panels
constexpr int kMaxSharedBytes = 227 * 1024;
constexpr int kPending = 8;  // rows that wait for their Sinkhorn, one a lane
constexpr int kPendingPitch = kMixes - kStreams + 1;
constexpr int kEarlyGroups = 2;  // copied beside fn
constexpr int kMaxDevices = 64;
#ifdef REDKNOT_FOR_TOOLS
constexpr int kMostClusters = 1;  // few rows fill its buffers more than once
#else
constexpr int kMostClusters = INT_MAX;
#endif
// Of a thread, by what its warp does.
constexpr int kMixRegisters = 144;
constexpr int kCollapseRegisters = 64;
constexpr int kOtherRegisters = 64;

// One geometry: hidden channels, rows of a group in tiles of eight, and groups in shared memory. A warp owns 32
// channels of two tiles, or 64 of one; then there are too many channels for all terms of fn in registers, and half of
// them lie in shared memory. Offsets are bytes of shared memory.
template <int kHiddenChannels, int kRowTiles, int kStageCount>
struct Shape {
  static constexpr int kHidden = kHiddenChannels;
  static constexpr int kTiles = kRowTiles;
  static constexpr int kHalves = kUnits / kTiles;  // of a warp's channels
  static constexpr int kStages = kStageCount;
  // Groups between two uses of a receive slot of mixes and weights, and of squares.
  static constexpr int kSlots = kStages + 1;
  static constexpr int kSquareSlots = kStages + 2;
  static constexpr int kRows = 8 * kTiles;
  static constexpr int kRowQuads = kRows / 4;
  static constexpr int kSourcePitch = kRows == 8 ? 8 : 24;  // floats between the squares of two sources: banks differ
  static constexpr int kOwn = kHidden / kCluster;           // channels of a block
  static constexpr int kWarpChannels = kHalves * kUnitChannels;
  static constexpr int kWarps = kOwn / kWarpChannels;
  static constexpr int kTeam = kWarps * kWarp;  // threads that mix, and as many that collapse
  static constexpr int kThreads = 2 * kTeamThreads + 4 * kWarp;
  // A stage: panels of 64 channels; in each, rows of 128 swizzled bytes, stream after stream.
  static constexpr int kPanels = kOwn / kPanelChannels;
  static constexpr int kPanelSize = kStreams * kRows * kPanelBytes;
  static constexpr int kStageBytes = kPanels * kPanelSize;
  static constexpr int kPartialFloats = kWarps * kRows * kLine;
  static constexpr int kSharedQuads = (kHalves - 1) * kKeptQuads;
  static constexpr int kTermsAt = kStages * kStageBytes;  // [warps][kSharedQuads] of kQuadBytes
  static constexpr int kPartials = kTermsAt + kWarps * kSharedQuads * kQuadBytes;
  static constexpr int kReceived = kPartials + 2 * kPartialFloats * 4;        // after [2][warps][rows][kLine]
  static constexpr int kWeights = kReceived + kSlots * kCluster * kLine * 4;  // after [kSlots][kCluster][kLine]
  static constexpr int kSquareSums = kWeights + kSlots * kRows * 16;          // after [kSlots][rows][4]
  static constexpr int kOwnSquares = kSquareSums + kSquareSlots * kCluster * kSourcePitch * 4;
  static constexpr int kBarriers = kOwnSquares + 2 * kWarps * kRows * 4;  // after [2][warps][rows]
  static constexpr int kBarrierCount = 2 * kStages + 2 * kSlots + kSquareSlots + 4;
  static constexpr int kWaiting = kBarriers + 8 * kBarrierCount;  // [kPending][kPendingPitch]
  static constexpr int kBytes = kWaiting + kPending * kPendingPitch * 4;
  static_assert(kOwn % kPanelChannels == 0 && kOwn % kWarpChannels == 0 && kTeam <= kTeamThreads);
  static_assert(kPanelSize % kStageAlignment == 0 && kRows <= kCluster && kBytes <= kMaxSharedBytes);
  static_assert(kWarps * kRowQuads <= kWarp);
};
using Flash = Shape<4096, 2, 5>;
using Pro = Shape<7168, 1, 4>;

template <class S>
struct Block {
  HyperConnectionPreParams const& params;
  uint8_t* const shared;
  int const rank;
  int const cluster;
  int const clusters;
  int const count;  // groups of this cluster

  __device__ Block(HyperConnectionPreParams const& all, uint8_t* memory, int groups)
      : params(all),
        shared(memory),
        rank(static_cast<int>(cluster::rank())),
        cluster(static_cast<int>(blockIdx.x) / kCluster),
        clusters(static_cast<int>(gridDim.x) / kCluster),
        count((groups - cluster + clusters - 1) / clusters) {}

  __device__ __forceinline__ uint32_t address(int offset) const { return ptx::shared_address(shared + offset); }
  __device__ __forceinline__ uint32_t loaded(int group) const {
    return address(S::kBarriers + 8 * (group % S::kStages));
  }
  __device__ __forceinline__ uint32_t mixed(int group) const {
    return address(S::kBarriers + 8 * (S::kStages + group % S::kStages));
  }
  __device__ __forceinline__ uint32_t slot_barrier(int kind, int group) const {
    return address(S::kBarriers + 8 * (2 * S::kStages + kind * S::kSlots + group % S::kSlots));
  }
  __device__ __forceinline__ uint32_t mixes_here(int group) const { return slot_barrier(0, group); }
  __device__ __forceinline__ uint32_t weights_here(int group) const { return slot_barrier(1, group); }
  __device__ __forceinline__ uint32_t squares_here(int group) const {
    return address(S::kBarriers + 8 * (2 * S::kStages + 2 * S::kSlots + group % S::kSquareSlots));
  }
  // The sender has read the partial sums of odd or even groups.
  __device__ __forceinline__ uint32_t mixes_taken(int group) const {
    return address(S::kBarriers + 8 * (S::kBarrierCount - 4 + group % 2));
  }
  __device__ __forceinline__ uint32_t squares_taken(int group) const {
    return address(S::kBarriers + 8 * (S::kBarrierCount - 2 + group % 2));
  }
  __device__ __forceinline__ void expect_mixes(int group) const {
    cluster::barrier_expect(mixes_here(group), kCluster * kLine * 4);
  }
  __device__ __forceinline__ void expect_weights(int group) const {
    cluster::barrier_expect(weights_here(group), S::kRows * 16);
  }
  __device__ __forceinline__ void expect_squares(int group) const {
    cluster::barrier_expect(squares_here(group), kCluster * S::kRows * 4);
  }
  static __device__ __forceinline__ uint32_t stage_parity(int group) { return group / S::kStages & 1; }
  static __device__ __forceinline__ uint32_t taken_parity(int group) { return group / 2 & 1; }
  static __device__ __forceinline__ uint32_t slot_parity(int group) { return group / S::kSlots & 1; }
  static __device__ __forceinline__ uint32_t square_parity(int group) { return group / S::kSquareSlots & 1; }

  __device__ __forceinline__ int64_t first_row(int group) const {
    return (cluster + static_cast<int64_t>(group) * clusters) * S::kRows;
  }
  __device__ __forceinline__ uint8_t* stage(int group) const { return shared + group % S::kStages * S::kStageBytes; }
  __device__ __forceinline__ float* partials(int step) const {
    return reinterpret_cast<float*>(shared + S::kPartials) + (step & 1) * S::kPartialFloats;
  }
  __device__ __forceinline__ float* received(int group) const {
    return reinterpret_cast<float*>(shared + S::kReceived) + group % S::kSlots * kCluster * kLine;
  }
  __device__ __forceinline__ float4* weights(int group) const {
    return reinterpret_cast<float4*>(shared + S::kWeights) + group % S::kSlots * S::kRows;
  }
  __device__ __forceinline__ float* squares(int group) const {
    return reinterpret_cast<float*>(shared + S::kSquareSums) + group % S::kSquareSlots * kCluster * S::kSourcePitch;
  }
  __device__ __forceinline__ float* own_squares(int group) const {
    return reinterpret_cast<float*>(shared + S::kOwnSquares) + (group & 1) * S::kWarps * S::kRows;
  }
  // Groups before the first one that would make their number a multiple of those that wait together: the last ones then
  // do so, and nothing delays them.
  __device__ __forceinline__ int missing() const { return (kPending - count % kPending) % kPending; }
  // One thread; the cluster meets after it.
  __device__ void prepare() const {
    for (int index = 0; index < S::kBarrierCount; ++index) {
      bool const of_warp = (index >= S::kStages && index < 2 * S::kStages) || index >= S::kBarrierCount - 4;
      cluster::barrier_init(address(S::kBarriers + 8 * index), of_warp ? kWarp : 1);
    }
    cluster::barriers_ready();
    for (int slot = 0; slot < S::kSlots; ++slot) {
      expect_mixes(slot);
      expect_weights(slot);
    }
    for (int slot = 0; slot < S::kSquareSlots; ++slot) expect_squares(slot);
  }

  // One lane starts the copies of a group. Rows past the last come as zeros.
  __device__ __forceinline__ void load(int group, CUtensorMap const* streams) const {
    cluster::barrier_expect(loaded(group), S::kStageBytes);
    uint32_t const target = address(group % S::kStages * S::kStageBytes);
#pragma unroll
    for (int panel = 0; panel < S::kPanels; ++panel) {
      cluster::box_load(target + panel * S::kPanelSize, streams, rank * S::kOwn + panel * kPanelChannels,
                        static_cast<int32_t>(first_row(group)), 0, loaded(group));
    }
  }
};

// The warp that sums the warps' partial mixes and sends them, a quad of floats a lane, to the blocks that weigh them.
template <class S>
__device__ void send_mixes(Block<S> const& block, int lane) {
  constexpr int kQuads = kLine / 4;
  constexpr int kItems = S::kRows * kQuads;
  for (int group = 0; group < block.count; ++group) {
    cluster::meet<S::kTeam + kWarp>(kMixed + (group & 1));
    auto const* const source = reinterpret_cast<float4 const*>(block.partials(group));
    constexpr int kRounds = (kItems + kWarp - 1) / kWarp;
    float4 sums[kRounds];
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      int const item = min(round * kWarp + lane, kItems - 1);
      float4 sum{0, 0, 0, 0};
#pragma unroll
      for (int warp = 0; warp < S::kWarps; ++warp) {
        float4 const part = source[warp * kItems + item];
        sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
      }
      sums[round] = sum;
    }
    ptx::barrier_arrive(block.mixes_taken(group));
    ptx::barrier_arrive(block.mixed(group));
    uint32_t const target = ptx::shared_address(block.received(group) + block.rank * kLine);
    uint32_t const barrier = block.mixes_here(group);
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      int const item = round * kWarp + lane;
      if (item >= kItems) break;
      int const row = item / kQuads;
      cluster::store(cluster::address_in(target + item % kQuads * 16, row), sums[round],
                     cluster::address_in(barrier, row));
    }
  }
}

// The warp that starts copies of later groups, and sends squares of the collapse to all blocks.
template <class S>
__device__ void send_squares(Block<S> const& block, CUtensorMap const* streams, int lane) {
  for (int group = 0; group < block.count; ++group) {
    cluster::meet<S::kTeam + kWarp>(kCollapsed + (group & 1));
    if (group + S::kStages < block.count) {
      cluster::barrier_wait(block.mixed(group), block.stage_parity(group));
      if (lane == 0) block.load(group + S::kStages, streams);
      __syncwarp();
    }
    float4 sum{0, 0, 0, 0};
    if (lane < S::kWarps * S::kRowQuads) sum = reinterpret_cast<float4 const*>(block.own_squares(group))[lane];
    ptx::barrier_arrive(block.squares_taken(group));
#pragma unroll
    for (int offset = S::kRowQuads; offset < kWarp; offset *= 2) {
      sum.x += __shfl_xor_sync(kAllLanes, sum.x, offset);
      sum.y += __shfl_xor_sync(kAllLanes, sum.y, offset);
      sum.z += __shfl_xor_sync(kAllLanes, sum.z, offset);
      sum.w += __shfl_xor_sync(kAllLanes, sum.w, offset);
    }
    uint32_t const target = ptx::shared_address(block.squares(group) + block.rank * S::kSourcePitch);
    uint32_t const barrier = block.squares_here(group);
#pragma unroll
    for (int item = lane; item < kCluster * S::kRowQuads; item += kWarp) {
      int const peer = item / S::kRowQuads;
      cluster::store(cluster::address_in(target + item % S::kRowQuads * 16, peer), sum,
                     cluster::address_in(barrier, peer));
    }
    if (lane == 0) block.expect_weights(group);
    __syncwarp();
  }
}

__device__ __forceinline__ void store_weights(float* target, float const (&weights)[kStreams]) {
  store_vector(target, {__float_as_uint(weights[0]), __float_as_uint(weights[1]), __float_as_uint(weights[2]),
                        __float_as_uint(weights[3])});
}

// The warp that works out post and comb of weighed rows, one a lane, when as many as are balanced together wait.
template <class S>
__device__ void balance_rows(Block<S> const& block, int lane) {
  if (block.rank >= S::kRows) return;
  HyperConnectionPreParams const& params = block.params;
  for (int first = -block.missing(); first < block.count; first += kPending) {
    __syncwarp();
    cluster::meet<2 * kWarp>(kPendingFull);
    float const* const source =
        reinterpret_cast<float const*>(block.shared + S::kWaiting) + lane % kPending * kPendingPitch;
    float mix[kMixes];
#pragma unroll
    for (int value = kStreams; value < kMixes; ++value) mix[value] = source[value - kStreams];
    __syncwarp();
    if (first + kPending < block.count) cluster::arrive<2 * kWarp>(kPendingTaken);
    int64_t const row = block.first_row(first + lane) + block.rank;
    if (lane >= kPending || first + lane < 0 || row >= params.rows) continue;
    float post[kStreams];
#pragma unroll
    for (int stream = 0; stream < kStreams; ++stream) {
      float const logit = mix[kStreams + stream] * params.scale[1] + params.base[kStreams + stream];
      post[stream] = 2.0F * sigmoid(logit);
    }
    store_weights(params.post + row * kStreams, post);
    float comb[kStreams][kStreams];
    balance<kStreams>(params, mix, 1.0F, comb);
#pragma unroll
    for (int line = 0; line < kStreams; ++line) {
      store_weights(params.comb + (row * kStreams + line) * kStreams, comb[line]);
    }
  }
}

// The warp that weighs row `rank` of every group.
template <class S>
__device__ void weigh_rows(Block<S> const& block, int lane) {
  if (block.rank >= S::kRows) return;
  HyperConnectionPreParams const& params = block.params;
  float const scale = params.scale[0];
  float const base = lane < kStreams ? params.base[lane] : 0.0F;
  float const inverse_depth = 1.0F / static_cast<float>(kStreams * S::kHidden);
  float* const pending = reinterpret_cast<float*>(block.shared + S::kWaiting);
  for (int group = 0; group < block.count; ++group) {
    cluster::barrier_wait(block.mixes_here(group), block.slot_parity(group));
    if (lane == 0) block.expect_mixes(group);
    float sum = 0.0F;
    if (lane < kSent) {
      float const* const source = block.received(group) + lane;
#pragma unroll
      for (int part = 0; part < kCluster; ++part) sum += source[part * kLine];
    }
    float const inverse = rsqrtf(__shfl_sync(kAllLanes, sum, kSquares) * inverse_depth + params.norm_eps);
    float const weight = sigmoid(sum * inverse * scale + base) + params.eps;
    float4 const pre{__shfl_sync(kAllLanes, weight, 0), __shfl_sync(kAllLanes, weight, 1),
                     __shfl_sync(kAllLanes, weight, 2), __shfl_sync(kAllLanes, weight, 3)};
    if (lane < kCluster) {
      uint32_t const target = ptx::shared_address(block.weights(group) + block.rank);
      cluster::store(cluster::address_in(target, lane), pre, cluster::address_in(block.weights_here(group), lane));
    }
    int const waiting = (group + block.missing()) % kPending;
    if (waiting == 0 && group > 0) cluster::meet<2 * kWarp>(kPendingTaken);
    if (lane >= kStreams && lane < kMixes) pending[waiting * kPendingPitch + lane - kStreams] = sum * inverse;
    __syncwarp();
    if (waiting + 1 == kPending) cluster::arrive<2 * kWarp>(kPendingFull);
  }
}

// Terms of fn as operands of products, a quad of words a lane. An operand has 16 terms (lane / 4 and that plus eight)
// of eight of the lane's channels of one stream. Tile 0: high terms of the first 16 mixes; tile 1: both terms of the
// last eight; tile 2: low terms of the first 16. Two bf16 terms have 16 bits of mantissa.
struct Terms {
  uint4 quads[kKeptQuads];
};
// Where tile `tile` of a half, stream and pair of words is: the first kKeptQuads are in registers, others in shared
// memory.
template <class S>
__device__ __forceinline__ constexpr int quad_index(int tile, int half, int stream, int at) {
  return (tile * S::kHalves + half) * kSteps + stream * (kVector / 4) + at / 2;
}

// Both terms of eight channels of a mix.
__device__ __forceinline__ void split_terms(float const* fn, uint32_t (&high)[kVector / 2],
                                            uint32_t (&low)[kVector / 2]) {
  float values[kVector];
  load_floats(fn, values);
#pragma unroll
  for (int pair = 0; pair < kVector / 2; ++pair) {
    high[pair] = pack_pair(values[2 * pair], values[2 * pair + 1]);
    float2 const whole = ptx::unpack_bf16(high[pair]);
    low[pair] = pack_pair(values[2 * pair] - whole.x, values[2 * pair + 1] - whole.y);
  }
}

// The channels of one warp. A lane has eight (chunk lane % 4) of one row in eight of each unit.
template <class S>
struct Slice {
  Block<S> const& block;
  int const warp;
  int const lane;
  int const quad;
  int const row;      // of a tile; lanes that read shared memory together hold rows four apart, whose banks differ
  int const channel;  // first of the lane's in the first half

  __device__ Slice(Block<S> const& of, int lane_of_warp)
      : block(of),
        warp(static_cast<int>(threadIdx.x) / kWarp % (kTeamThreads / kWarp)),
        lane(lane_of_warp),
        quad(lane % 4),
        row(row_of(lane / 4)),
        channel((block.rank * S::kWarps + warp) * S::kWarpChannels + quad * kVector) {}

  // The row of a tile that is column `column` of a product.
  static __device__ __forceinline__ int row_of(int column) { return column % 2 * 4 + column / 2; }
  static __device__ __forceinline__ constexpr int tile_of(int unit) { return unit / S::kHalves; }
  static __device__ __forceinline__ constexpr int half_of(int unit) { return unit % S::kHalves; }

  __device__ __forceinline__ uint4 streams(int of, int unit, int stream) const {
    int const first = warp * S::kWarpChannels / kVector + half_of(unit) * (kUnitChannels / kVector);  // chunk
    int const offset = first / kPanelChunks * S::kPanelSize +
                       (stream * S::kRows + tile_of(unit) * 8 + row) * kPanelBytes +
                       ((first % kPanelChunks + quad) ^ row) * 16;
    return *reinterpret_cast<uint4 const*>(block.stage(of) + offset);
  }
  // Where the lane keeps an operand that is not in registers.
  __device__ __forceinline__ uint4* shared_quad(int index) const {
    return reinterpret_cast<uint4*>(block.shared + S::kTermsAt +
                                    (warp * S::kSharedQuads + index - kKeptQuads) * kQuadBytes) +
           lane;
  }

  // Brings fn into the L2 cache, whatever the kernel before this one still writes.
  __device__ __forceinline__ void prefetch_terms() const {
    for (int line = lane; line < kMixes * kStreams * S::kHalves; line += kWarp) {
      prefetch_line(block.params.fn + static_cast<int64_t>(line / S::kHalves) * S::kHidden +
                    (block.rank * S::kWarps + warp) * S::kWarpChannels + line % S::kHalves * kUnitChannels);
    }
  }

  __device__ __forceinline__ void load_terms(Terms& kept) const {
#pragma unroll
    for (int half = 0; half < S::kHalves; ++half) {
#pragma unroll
      for (int stream = 0; stream < kStreams; ++stream) {
        uint32_t high[kMixRows][kVector / 2], low[kMixRows][kVector / 2];
#pragma unroll
        for (int part = 0; part < kMixRows; ++part) {
          int64_t const line = static_cast<int64_t>(lane / 4 + 8 * part) * kStreams + stream;
          split_terms(block.params.fn + line * S::kHidden + channel + half * kUnitChannels, high[part], low[part]);
        }
#pragma unroll
        for (int at = 0; at < kVector / 2; at += 2) {
          uint4 const quads[kTerms] = {{high[0][at], high[1][at], high[0][at + 1], high[1][at + 1]},
                                       {high[2][at], low[2][at], high[2][at + 1], low[2][at + 1]},
                                       {low[0][at], low[1][at], low[0][at + 1], low[1][at + 1]}};
#pragma unroll
          for (int tile = 0; tile < kTerms; ++tile) {
            int const index = quad_index<S>(tile, half, stream, at);
            if (index < kKeptQuads) {
              kept.quads[index] = quads[tile];
            } else {
              *shared_quad(index) = quads[tile];
            }
          }
        }
      }
    }
  }

  // Sums of one tile of rows: fn is the A operand, rows are the columns of B.
  struct Sums {
    float mixes[kTerms][4] = {};
    // Rows times rows: their squares are the diagonals of the upper half of `even` and the lower one of `odd`.
    float even[4] = {};
    float odd[4] = {};
  };

  __device__ __forceinline__ void mix_unit(int of, int unit, Terms const& kept, Sums& sums) const {
#pragma unroll
    for (int stream = 0; stream < kStreams; ++stream) {
      uint4 const raw = streams(of, unit, stream);
      uint32_t const words[kVector / 2] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
      for (int at = 0; at < kVector / 2; at += 2) {
#pragma unroll
        for (int tile = 0; tile < kTerms; ++tile) {
          int const index = quad_index<S>(tile, half_of(unit), stream, at);
          uint4 const quad = index < kKeptQuads ? kept.quads[index < kKeptQuads ? index : 0] : *shared_quad(index);
          ptx::mma_bf16(sums.mixes[tile], quad.x, quad.y, quad.z, quad.w, words[at], words[at + 1]);
        }
        ptx::mma_bf16_short(sums.even, words[at], words[at + 1], words[at]);
        ptx::mma_bf16_short(sums.odd, words[at], words[at + 1], words[at + 1]);
      }
    }
  }

  __device__ __forceinline__ void store_sums(int of, int tile, Sums const& sums) const {
    int const group = lane / 4;
    float* const target = block.partials(of) + (warp * S::kRows + tile * 8 + row_of(2 * quad)) * kLine;
    constexpr int kNext = 4 * kLine;  // from column 2 q to the next
    float const(&mixes)[kTerms][4] = sums.mixes;
    float const both[kMixRows][2] = {{mixes[0][0] + mixes[2][0], mixes[0][1] + mixes[2][1]},
                                     {mixes[0][2] + mixes[2][2], mixes[0][3] + mixes[2][3]},
                                     {mixes[1][0] + mixes[1][2], mixes[1][1] + mixes[1][3]}};
#pragma unroll
    for (int part = 0; part < kMixRows; ++part) {
      target[part * 8 + group] = both[part][0];
      target[kNext + part * 8 + group] = both[part][1];
    }
    if (quad == group / 2) {
      target[group % 2 * kNext + kSquares] = group % 2 == 0 ? sums.even[0] + sums.odd[2] : sums.even[1] + sums.odd[3];
    }
  }

  __device__ __forceinline__ void mix(int of, Terms const& kept) const {
    cluster::barrier_wait(block.loaded(of), block.stage_parity(of));
#pragma unroll
    for (int tile = 0; tile < S::kTiles; ++tile) {
      Sums sums;
#pragma unroll
      for (int half = 0; half < S::kHalves; ++half) mix_unit(of, tile * S::kHalves + half, kept, sums);
      if (tile == 0 && of >= 2) cluster::barrier_wait(block.mixes_taken(of), block.taken_parity(of - 2));
      store_sums(of, tile, sums);
    }
    cluster::arrive<S::kTeam + kWarp>(kMixed + (of & 1));
  }

  // The weighted sum of the streams of each unit, as bf16, and the squares of what it gives.
  __device__ __forceinline__ void collapse(int of, uint4 (&rounded)[kUnits]) const {
    cluster::barrier_wait(block.loaded(of), block.stage_parity(of));
    cluster::barrier_wait(block.weights_here(of), block.slot_parity(of));
    float squares[S::kTiles] = {};
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      float4 const weight = block.weights(of)[tile_of(unit) * 8 + row];
      float const weights[kStreams] = {weight.x, weight.y, weight.z, weight.w};
      float sums[kVector] = {};
#pragma unroll
      for (int stream = 0; stream < kStreams; ++stream) {
        float values[kVector];
        unpack_bf16(streams(of, unit, stream), values);
#pragma unroll
        for (int at = 0; at < kVector; ++at) sums[at] = fmaf(weights[stream], values[at], sums[at]);
      }
      rounded[unit] = pack_bf16(sums);
#pragma unroll
      for (float const value : sums) squares[tile_of(unit)] = fmaf(value, value, squares[tile_of(unit)]);
    }
#pragma unroll
    for (float& square : squares) square = lane_sum<4>(square);
    if (of >= 2) cluster::barrier_wait(block.squares_taken(of), block.taken_parity(of - 2));
    float* const partial = block.own_squares(of) + warp * S::kRows + row;
#pragma unroll
    for (int tile = 0; tile < S::kTiles; ++tile) {
      if (quad == tile) partial[tile * 8] = squares[tile];
    }
    cluster::arrive<S::kTeam + kWarp>(kCollapsed + (of & 1));
  }

  __device__ __forceinline__ void finish(int of, uint4 const (&rounded)[kUnits],
                                         float const (&norm)[S::kHalves][kVector]) const {
    HyperConnectionPreParams const& params = block.params;
    cluster::barrier_wait(block.squares_here(of), block.square_parity(of));
    if (warp == 0 && lane == 0) block.expect_squares(of);
#pragma unroll
    for (int tile = 0; tile < S::kTiles; ++tile) {
      float const* const source = block.squares(of) + quad * S::kSourcePitch + tile * 8 + row;
      float square = 0.0F;
#pragma unroll
      for (int part = 0; part < kCluster; part += 4) square += source[part * S::kSourcePitch];
      float const inverse = rsqrtf(lane_sum<4>(square) / static_cast<float>(S::kHidden) + params.norm_eps);
      int64_t const at = block.first_row(of) + tile * 8 + row;
      auto* const out = static_cast<__nv_bfloat16*>(params.normed) + at * S::kHidden + channel;
#pragma unroll
      for (int half = 0; half < S::kHalves; ++half) {
        float values[kVector];
        unpack_bf16(rounded[tile * S::kHalves + half], values);
#pragma unroll
        for (int slot = 0; slot < kVector; ++slot) values[slot] = norm[half][slot] * (values[slot] * inverse);
        if (at < params.rows) store_vector(out + half * kUnitChannels, pack_bf16(values));
      }
    }
  }
};

// fn is asked for before the cluster meets, and most of the streams after that: it would have to wait for them.
template <class S>
__device__ void mix_groups(Block<S> const& block, int lane) {
  Slice<S> const slice(block, lane);
  Terms kept;
  bool const works = slice.warp < S::kWarps;
  if (works) slice.prefetch_terms();
  cudaGridDependencySynchronize();
  if (works) slice.load_terms(kept);
  cluster::meet_all();
  if (!works) return;
  for (int group = 0; group < block.count; ++group) slice.mix(group, kept);
}

// A group's norm needs its squares of all blocks: until they are there, the next group is collapsed.
template <class S>
__device__ void collapse_groups(Block<S> const& block, int lane) {
  Slice<S> const slice(block, lane);
  float norm[S::kHalves][kVector];
  bool const works = slice.warp < S::kWarps;
  cudaGridDependencySynchronize();
  if (works) {
#pragma unroll
    for (int half = 0; half < S::kHalves; ++half) {
      load_weights(block.params.norm, block.params.norm_is_float, slice.channel + half * kUnitChannels, norm[half]);
    }
  }
  cluster::meet_all();
  if (!works) return;
  uint4 before[kUnits] = {};
  for (int group = 0; group <= block.count; ++group) {
    uint4 rounded[kUnits] = {};
    if (group < block.count) slice.collapse(group, rounded);
    if (group > 0) slice.finish(group - 1, before, norm);
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) before[unit] = rounded[unit];
  }
}

template <class S>
__global__ void __launch_bounds__(S::kThreads, 1)
    one_pass_kernel(__grid_constant__ HyperConnectionPreParams const params,
                    __grid_constant__ CUtensorMap const streams, int groups) {
  extern __shared__ __align__(kStageAlignment) uint8_t one_pass_memory[];
  Block<S> const block(params, one_pass_memory, groups);
  int const lane = static_cast<int>(threadIdx.x) % kWarp;
  if (threadIdx.x < kTeamThreads) {
    ptx::claim_registers<kMixRegisters>();
    mix_groups(block, lane);
  } else if (threadIdx.x < 2 * kTeamThreads) {
    ptx::release_registers<kCollapseRegisters>();
    collapse_groups(block, lane);
  } else {
    ptx::release_registers<kOtherRegisters>();
    int const role = static_cast<int>(threadIdx.x - 2 * kTeamThreads) / kWarp;
    if (role == 0 && lane == 0) block.prepare();
    cudaGridDependencySynchronize();
    if (role == 0 && lane == 0) {
      for (int group = 0; group < min(kEarlyGroups, block.count); ++group) block.load(group, &streams);
    }
    __syncwarp();
    cluster::meet_all();
    if (role == 0 && lane == 0) {
      for (int group = kEarlyGroups; group < min(S::kStages, block.count); ++group) block.load(group, &streams);
    }
    __syncwarp();
    if (role == 0) {
      send_squares(block, &streams, lane);
    } else if (role == 1) {
      send_mixes(block, lane);
    } else if (role == 2) {
      weigh_rows(block, lane);
    } else {
      balance_rows(block, lane);
    }
    __syncwarp();
  }
  cluster::meet_all();  // no block may go while another writes to it
}

template <class S>
ClusterShape shape_of(int64_t clusters) {
  return {.cluster = kCluster,
          .grid = static_cast<unsigned>(kCluster * clusters),
          .block = S::kThreads,
          .shared = S::kBytes,
          .after = true};
}

// Clusters that run at once: asked of the driver once a device; 0 where such clusters do not exist.
template <class S>
int clusters_of_device() {
  static std::atomic<int> known[kMaxDevices];  // one more than the number
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kMaxDevices) return 0;
  int const cached = known[device].load(std::memory_order_relaxed);
  if (cached > 0) return cached - 1;
  int const clusters = std::min(kMostClusters, resident_clusters(one_pass_kernel<S>, shape_of<S>(1)));
  known[device].store(clusters + 1, std::memory_order_relaxed);
  return clusters;
}

// The streams as [stream, row, channel], copied in boxes of 64 channels of all streams of a group's rows.
template <class S>
Status encode_streams(CUtensorMap& map, HyperConnectionPreParams const& params) {
  auto const encode = tensor_map_encoder();
  REDKNOT_REQUIRE(encode != nullptr, Status::kCudaError);
  constexpr cuuint64_t kStreamBytes = S::kHidden * 2;
  cuuint64_t const sizes[] = {S::kHidden, static_cast<cuuint64_t>(params.rows), kStreams};
  cuuint64_t const strides[] = {kStreams * kStreamBytes, kStreamBytes};
  cuuint32_t const box[] = {kPanelChannels, S::kRows, kStreams};
  cuuint32_t const steps[] = {1, 1, 1};
  CUresult const result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(params.streams), sizes,
                                 strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  REDKNOT_REQUIRE(result == CUDA_SUCCESS, Status::kCudaError);
  return Status::kSuccess;
}

template <class S>
Status launch(HyperConnectionPreParams const& params, cudaStream_t stream) {
  int64_t const groups = (params.rows + S::kRows - 1) / S::kRows;
  Status const allowed = allow_clusters(one_pass_kernel<S>, S::kBytes);
  REDKNOT_REQUIRE(allowed == Status::kSuccess, allowed);
  int const clusters = clusters_of_device<S>();
  REDKNOT_SUPPORTED(clusters > 0);
  CUtensorMap streams;
  Status const encoded = encode_streams<S>(streams, params);
  REDKNOT_REQUIRE(encoded == Status::kSuccess, encoded);
  return launch_clusters(one_pass_kernel<S>, shape_of<S>(std::min<int64_t>(clusters, groups)), stream, params, streams,
                         static_cast<int>(groups));
}

}  // namespace

Status hyper_connection_one_pass(HyperConnectionPreParams const& params, cudaStream_t stream) {
  REDKNOT_SUPPORTED(!params.head && params.stream_count == kStreams);
  if (params.hidden == Flash::kHidden) return launch<Flash>(params, stream);
  if (params.hidden == Pro::kHidden) return launch<Pro>(params, stream);
  return Status::kUnsupported;
}

}  // namespace redknot
