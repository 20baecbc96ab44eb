// hyper_connection_pre with the streams read once. A cluster of 16 blocks takes groups of rows; each block holds a
// sixteenth of the channels (of all four streams) of some groups in shared memory, and its part of fn, as two bf16
// terms, in registers. A warp owns 32 channels. In step k:
//   mix        group k: partial sums of streams x fn, on tensor cores
//   collapse   group k - kLag, whose weights have come back meanwhile
//   reduce     the warps' sums: mixes of group k for the block that weighs the row, squares of the collapse for all
//   finish     the group before that: norm and output
// Two more warps a block: one sends what was reduced and starts copies of later groups, the other weighs one row of
// every group. Nobody waits for room in another block: a block that sends for group k has got weights of group k - kLag
// from everyone, so everyone is done with what the slots held kSlots groups before.

#include <algorithm>
#include <atomic>

#include "common/check.h"
#include "common/cluster.cuh"
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
constexpr int kCollapsed = kSent;     // the value after them: squares of the collapse
constexpr int kValues = kSent + 1;
constexpr int kMeet = 1;          // barriers of a block
constexpr int kReduced = 2;       // and kLag more: so many steps may be on their way to be sent
constexpr int kLine = 28;         // floats of one source in a receive slot
constexpr int kOwnChannels = 32;  // of a warp
constexpr int kChunks = kOwnChannels / kVector;
constexpr int kPanelChannels = kPanelBytes / 2;
constexpr int kPanelChunks = kPanelBytes / 16;
constexpr int kStageAlignment = 1024;  // of swizzled panels
constexpr int kKeptBytes = 8 * kOwnChannels * 2;
constexpr int kMaxSharedBytes = 227 * 1024;
constexpr int kPending = 32;  // rows that wait for their Sinkhorn, one a lane
constexpr int kPendingPitch = kMixes + 1;
constexpr int kMaxDevices = 64;

// One geometry: hidden channels, rows of a group in tiles of eight, groups in shared memory, and groups between mix and
// collapse. Offsets are bytes of shared memory.
template <int kHiddenChannels, int kRowTiles, int kStageCount, int kCollapseLag>
struct Shape {
  static constexpr int kHidden = kHiddenChannels;
  static constexpr int kTiles = kRowTiles;
  static constexpr int kStages = kStageCount;
  static constexpr int kLag = kCollapseLag;
  static constexpr int kFinishLag = kLag + 1;             // groups between mix and norm
  static constexpr int kKeepers = 2;                      // collapsed groups that a warp keeps
  static constexpr int kSlots = kFinishLag <= 3 ? 4 : 8;  // groups between two uses of a receive slot
  static_assert(kLag >= 2 && kSlots > kFinishLag && kStages > kLag);
  static constexpr int kRows = 8 * kTiles;
  static constexpr int kOwn = kHidden / kCluster;  // channels of a block
  static constexpr int kWarps = kOwn / kOwnChannels;
  static constexpr int kMixThreads = kWarps * kWarp;
  static constexpr int kThreads = kMixThreads + 2 * kWarp;
  // A stage: panels of 64 channels; in each, rows of 128 swizzled bytes, stream after stream.
  static constexpr int kPanels = kOwn / kPanelChannels;
  static constexpr int kPanelSize = kStreams * kRows * kPanelBytes;
  static constexpr int kStageBytes = kPanels * kPanelSize;
  static_assert(kOwn % kPanelChannels == 0 && kPanelSize % kStageAlignment == 0);
  static constexpr int kPartialFloats = kWarps * kValues * kRows;
  static constexpr int kPartials = kStages * kStageBytes;           // [2][warps][kValues][rows]
  static constexpr int kKept = kPartials + 2 * kPartialFloats * 4;  // [kKeepers][warps][tiles] of 512 bytes
  static constexpr int kReceived = kKept + kKeepers * kWarps * kTiles * kKeptBytes;  // [kSlots][kCluster][kLine]
  static constexpr int kWeights = kReceived + kSlots * kCluster * kLine * 4;         // [kSlots][rows][4]
  static constexpr int kSquareSums = kWeights + kSlots * kRows * 16;                 // [kSlots][kCluster][rows]
  static constexpr int kMixBox = kSquareSums + kSlots * kCluster * kRows * 4;        // to send: [kLag][rows][kLine]
  static constexpr int kSquareBox = kMixBox + kLag * kRows * kLine * 4;              // to send: [kSlots][rows]
  static constexpr int kBarriers = kSquareBox + kSlots * kRows * 4;
  static constexpr int kBarrierCount = kStages + 3 * kSlots;
  static constexpr int kWaiting = kBarriers + 8 * kBarrierCount;  // [kPending][kPendingPitch]
  static constexpr int kBytes = kWaiting + kPending * kPendingPitch * 4;
  static_assert(kHidden % (kCluster * kOwnChannels) == 0 && kRows <= kCluster && kBytes <= kMaxSharedBytes);
};
using Flash = Shape<4096, 2, 5, 2>;

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
  __device__ __forceinline__ uint32_t slot_barrier(int kind, int group) const {
    return address(S::kBarriers + 8 * (S::kStages + kind * S::kSlots + group % S::kSlots));
  }
  __device__ __forceinline__ uint32_t mixes_here(int group) const { return slot_barrier(0, group); }
  __device__ __forceinline__ uint32_t weights_here(int group) const { return slot_barrier(1, group); }
  __device__ __forceinline__ uint32_t squares_here(int group) const { return slot_barrier(2, group); }
  __device__ __forceinline__ void expect_mixes(int group) const {
    cluster::barrier_expect(mixes_here(group), kCluster * kLine * 4);
  }
  __device__ __forceinline__ void expect_weights(int group) const {
    cluster::barrier_expect(weights_here(group), S::kRows * 16);
  }
  __device__ __forceinline__ void expect_squares(int group) const {
    cluster::barrier_expect(squares_here(group), kCluster * S::kRows * 4);
  }
  static __device__ __forceinline__ uint32_t slot_parity(int group) { return group / S::kSlots & 1; }

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
    return reinterpret_cast<float*>(shared + S::kSquareSums) + group % S::kSlots * kCluster * S::kRows;
  }
  // Where eight channels (`chunk`) of a row of a warp's collapsed tile lie. Chunks are swizzled: neither eight rows of
  // a chunk nor two whole rows share a bank.
  __device__ __forceinline__ uint8_t* kept(int group, int warp, int tile, int row, int chunk) const {
    return shared + S::kKept + ((group % S::kKeepers * S::kWarps + warp) * S::kTiles + tile) * kKeptBytes + row * 64 +
           (chunk ^ row / 2) * 16;
  }

  __device__ void prepare() const {
    if (threadIdx.x == 0) {
      for (int index = 0; index < S::kStages + 3 * S::kSlots; ++index) {
        cluster::barrier_init(address(S::kBarriers + 8 * index), 1);
      }
      cluster::barriers_ready();
      for (int slot = 0; slot < S::kSlots; ++slot) {
        expect_mixes(slot);
        expect_weights(slot);
        expect_squares(slot);
      }
    }
    cluster::synchronise();
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

  __device__ __forceinline__ float* mix_box(int step) const {
    return reinterpret_cast<float*>(shared + S::kMixBox) + step % S::kLag * S::kRows * kLine;
  }
  __device__ __forceinline__ float* square_box(int step) const {
    return reinterpret_cast<float*>(shared + S::kSquareBox) + step % S::kSlots * S::kRows;
  }
  __device__ __forceinline__ bool mixes(int step) const { return step < count; }
  __device__ __forceinline__ bool collapses(int step) const { return step >= S::kLag && step < count + S::kLag; }

  // Sums the partials of a step over the warps, four rows a thread, into what is sent. What the step did not compute
  // is summed too, and not sent.
  __device__ __forceinline__ void reduce(int step) const {
    constexpr int kQuads = S::kRows / 4;
    static_assert(kValues * kQuads <= S::kMixThreads);
    int const item = static_cast<int>(threadIdx.x);
    if (item < kValues * kQuads) {
      auto const* const source = reinterpret_cast<float4 const*>(partials(step)) + item;
      float4 sum{0, 0, 0, 0};
#pragma unroll
      for (int warp = 0; warp < S::kWarps; ++warp) {
        float4 const part = source[warp * kValues * kQuads];
        sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
      }
      int const value = item / kQuads;
      int const row = item % kQuads * 4;
      if (value == kCollapsed) {
        *reinterpret_cast<float4*>(square_box(step) + row) = sum;
      } else {
        float* const target = mix_box(step) + row * kLine + value;
        target[0] = sum.x, target[kLine] = sum.y, target[2 * kLine] = sum.z, target[3 * kLine] = sum.w;
      }
    }
    cluster::arrive<S::kMixThreads + kWarp>(kReduced + step % S::kLag);
  }
};

// The warp that sends: mixes of a row to the block that weighs it, squares of the collapse to all blocks, a quad of
// floats a lane.
template <class S>
__device__ void send_sums(Block<S> const& block, CUtensorMap const* streams, int lane) {
  if (lane == 0) {
    for (int group = 0; group < min(S::kStages, block.count); ++group) block.load(group, streams);
  }
  __syncwarp();
  constexpr int kQuads = kLine / 4;
  constexpr int kMixItems = S::kRows * kQuads;
  constexpr int kRowQuads = S::kRows / 4;
  for (int step = 0; step < block.count + S::kLag; ++step) {
    cluster::meet<S::kMixThreads + kWarp>(kReduced + step % S::kLag);
    // All warps are through with the streams that were collapsed.
    int const next = step - S::kLag + S::kStages;
    if (lane == 0 && step >= S::kLag && next < block.count) block.load(next, streams);
    __syncwarp();
    if (block.mixes(step)) {
      auto const* const source = reinterpret_cast<float4 const*>(block.mix_box(step));
      uint32_t const target = ptx::shared_address(block.received(step) + block.rank * kLine);
      uint32_t const barrier = block.mixes_here(step);
#pragma unroll
      for (int first = 0; first < kMixItems; first += kWarp) {
        int const item = first + lane;
        if (kMixItems % kWarp != 0 && item >= kMixItems) break;
        int const row = item / kQuads;
        cluster::store(cluster::address_in(target + item % kQuads * 16, row), source[item],
                       cluster::address_in(barrier, row));
      }
    }
    if (block.collapses(step)) {
      int const of = step - S::kLag;
      auto const* const source = reinterpret_cast<float4 const*>(block.square_box(step));
      uint32_t const target = ptx::shared_address(block.squares(of) + block.rank * S::kRows);
      uint32_t const barrier = block.squares_here(of);
#pragma unroll
      for (int item = lane; item < kCluster * kRowQuads; item += kWarp) {
        int const peer = item % kCluster;
        int const quad = item / kCluster;
        cluster::store(cluster::address_in(target + quad * 16, peer), source[quad], cluster::address_in(barrier, peer));
      }
    }
  }
}

// Post and comb of the pending rows, one a lane.
template <class S>
__device__ void balance_pending(Block<S> const& block, int first_group, int pending, int lane) {
  if (lane >= pending) return;
  HyperConnectionPreParams const& params = block.params;
  int64_t const row = block.first_row(first_group + lane) + block.rank;
  if (row >= params.rows) return;
  float const* const source = reinterpret_cast<float const*>(block.shared + S::kWaiting) + lane * kPendingPitch;
  float mix[kMixes];
#pragma unroll
  for (int value = 0; value < kMixes; ++value) mix[value] = source[value];
#pragma unroll
  for (int stream = 0; stream < kStreams; ++stream) {
    float const logit = mix[kStreams + stream] * params.scale[1] + params.base[kStreams + stream];
    params.post[row * kStreams + stream] = 2.0F * sigmoid(logit);
  }
  float comb[kStreams][kStreams];
  balance<kStreams>(params, mix, 1.0F, comb);
#pragma unroll
  for (int cell = 0; cell < kStreams * kStreams; ++cell) {
    params.comb[row * kStreams * kStreams + cell] = comb[cell / kStreams][cell % kStreams];
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
  int waiting = 0;
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
    if (lane < kMixes) pending[waiting * kPendingPitch + lane] = sum * inverse;
    __syncwarp();
    if (++waiting == kPending || group + 1 == block.count) {
      balance_pending(block, group + 1 - waiting, waiting, lane);
      waiting = 0;
      __syncwarp();
    }
  }
}

// fn of the lane's channels 2 q and 2 q + 1 of four chunks of eight, of each stream, for mixes lane / 4 + 8 k, as two
// bf16 terms (16 bits of mantissa).
template <int kHidden>
struct Weights {
  uint32_t high[kMixRows][kStreams][kChunks];
  uint32_t low[kMixRows][kStreams][kChunks];

  __device__ __forceinline__ void load(float const* fn, int channel, int mix) {
#pragma unroll
    for (int part = 0; part < kMixRows; ++part) {
#pragma unroll
      for (int stream = 0; stream < kStreams; ++stream) {
        float const* const source = fn + (static_cast<int64_t>(mix + 8 * part) * kStreams + stream) * kHidden + channel;
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          float2 const pair = __ldg(reinterpret_cast<float2 const*>(source + chunk * kVector));
          high[part][stream][chunk] = pack_pair(pair.x, pair.y);
          low[part][stream][chunk] = pack_pair(pair.x - round_bf16(pair.x), pair.y - round_bf16(pair.y));
        }
      }
    }
  }
};

// The 32 channels of one warp. Lane (g, q) of a fragment: row g, or mix g + 8 k, and elements 2 q and 2 q + 1.
template <class S>
struct Slice {
  Block<S> const& block;
  int const warp;
  int const lane;
  int const group;
  int const quad;
  int const first;  // channel of the warp
  Weights<S::kHidden> weights;

  __device__ Slice(Block<S> const& of)
      : block(of),
        warp(static_cast<int>(threadIdx.x) / kWarp),
        lane(static_cast<int>(threadIdx.x) % kWarp),
        group(lane / 4),
        quad(lane % 4),
        first((block.rank * S::kWarps + warp) * kOwnChannels) {}

  // Address of eight channels of one stream in row lane % 8 of a tile: what a lane gives to load matrices.
  __device__ __forceinline__ uint32_t source(int of, int tile, int stream, int chunk) const {
    int const panel = warp * kChunks / kPanelChunks;
    int const own = warp * kChunks % kPanelChunks + chunk;
    return ptx::shared_address(block.stage(of)) + panel * S::kPanelSize +
           (stream * S::kRows + tile * 8 + lane % 8) * kPanelBytes + (own ^ lane % 8) * 16;
  }

  // fn is the A operand: 24 high and 24 low terms are three tiles of 16; rows are the eight columns of B.
  __device__ __forceinline__ void mix(int step) const {
    float* const partial = block.partials(step) + warp * kValues * S::kRows;
    uint32_t const(&high)[kMixRows][kStreams][kChunks] = weights.high;
    uint32_t const(&low)[kMixRows][kStreams][kChunks] = weights.low;
#pragma unroll
    for (int tile = 0; tile < S::kTiles; ++tile) {
      float sums[3][4] = {};
      float squares[4] = {};
#pragma unroll
      for (int stream = 0; stream < kStreams; ++stream) {
        uint32_t words[kChunks];
        ptx::load_matrices(words, source(step, tile, stream, lane / 8));
#pragma unroll
        for (int at = 0; at < kChunks; at += 2) {
          ptx::mma_bf16(sums[0], high[0][stream][at], high[1][stream][at], high[0][stream][at + 1],
                        high[1][stream][at + 1], words[at], words[at + 1]);
          ptx::mma_bf16(sums[1], high[2][stream][at], low[0][stream][at], high[2][stream][at + 1],
                        low[0][stream][at + 1], words[at], words[at + 1]);
          ptx::mma_bf16(sums[2], low[1][stream][at], low[2][stream][at], low[1][stream][at + 1], low[2][stream][at + 1],
                        words[at], words[at + 1]);
          // Rows times rows: their squares are the diagonal.
          ptx::mma_bf16(squares, words[at], 0, words[at + 1], 0, words[at], words[at + 1]);
        }
      }
      float* const target = partial + group * S::kRows + tile * 8 + quad * 2;
      *reinterpret_cast<float2*>(target) = {sums[0][0] + sums[1][2], sums[0][1] + sums[1][3]};
      *reinterpret_cast<float2*>(target + 8 * S::kRows) = {sums[0][2] + sums[2][0], sums[0][3] + sums[2][1]};
      *reinterpret_cast<float2*>(target + 16 * S::kRows) = {sums[1][0] + sums[2][2], sums[1][1] + sums[2][3]};
      if (quad == group / 2) {
        partial[kSquares * S::kRows + tile * 8 + group] = group % 2 == 0 ? squares[0] : squares[1];
      }
    }
  }

  // Weights of the eight rows of a tile as B operands of the collapse, one a stream: depth is the row that a channel is
  // taken from, columns are rows, so only the diagonal is filled. Two bf16 terms, as fn. `keep` clears what a lane
  // reads of rows with NaN weights: NaN times the zeros beside the diagonal would spread to other rows.
  struct Diagonal {
    uint32_t high[kStreams];
    uint32_t low[kStreams];
    uint32_t keep;
  };

  __device__ __forceinline__ Diagonal diagonal(int of, int tile) const {
    float4 const* const rows = block.weights(of) + tile * 8;
    float4 const row = rows[group];
    float const pre[kStreams] = {row.x, row.y, row.z, row.w};
    bool const own = group / 2 == quad;
    bool const odd = group % 2 != 0;
    Diagonal result;
    bool lost = false;
#pragma unroll
    for (int stream = 0; stream < kStreams; ++stream) {
      float const rest = pre[stream] - round_bf16(pre[stream]);
      lost = lost || isnan(pre[stream]);
      result.high[stream] = own ? pack_pair(odd ? 0.0F : pre[stream], odd ? pre[stream] : 0.0F) : 0U;
      result.low[stream] = own ? pack_pair(odd ? 0.0F : rest, odd ? rest : 0.0F) : 0U;
    }
    result.keep = ~0U;
    unsigned const rows_lost = __ballot_sync(kAllLanes, lost);  // four lanes a row
    if (rows_lost != 0) {
      result.keep =
          (rows_lost >> (8 * quad) & 1U ? 0U : 0xffffU) | (rows_lost >> (8 * quad + 4) & 1U ? 0U : 0xffff0000U);
    }
    return result;
  }

  // Channels of the streams, transposed, are the A operand: a product sums two streams of eight rows.
  __device__ __forceinline__ void collapse(int step) const {
    int const of = step - S::kLag;
    float* const partial = block.partials(step) + (warp * kValues + kCollapsed) * S::kRows;
    cluster::barrier_wait(block.weights_here(of), block.slot_parity(of));
#pragma unroll
    for (int tile = 0; tile < S::kTiles; ++tile) {
      Diagonal const pre = diagonal(of, tile);
      uint32_t rounded[kChunks];  // channel g of a chunk, rows 2 q and 2 q + 1
      float even = 0.0F, odd = 0.0F;
#pragma unroll
      for (int chunk = 0; chunk < kChunks; chunk += 2) {
        float sums[4] = {};
#pragma unroll
        for (int stream = 0; stream < kStreams; stream += 2) {
          uint32_t a[4];
          ptx::load_matrices_transposed(a, source(of, tile, stream + lane / 16, chunk + lane / 8 % 2));
#pragma unroll
          for (uint32_t& word : a) word &= pre.keep;
          ptx::mma_bf16(sums, a[0], a[1], a[2], a[3], pre.high[stream], pre.high[stream + 1]);
          ptx::mma_bf16(sums, a[0], a[1], a[2], a[3], pre.low[stream], pre.low[stream + 1]);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          rounded[chunk + half] = pack_pair(sums[2 * half], sums[2 * half + 1]);
          float2 const pair = ptx::unpack_bf16(rounded[chunk + half]);
          even += pair.x * pair.x;
          odd += pair.y * pair.y;
        }
      }
      ptx::store_matrices_transposed(ptx::shared_address(block.kept(of, warp, tile, lane % 8, lane / 8)), rounded);
      // Sums over the eight lanes of a channel each; lane g ends with row 2 q + g % 2.
      float square = group % 2 == 0 ? even : odd;
      square += __shfl_xor_sync(kAllLanes, group % 2 == 0 ? odd : even, 4);
      square += __shfl_xor_sync(kAllLanes, square, 8);
      square += __shfl_xor_sync(kAllLanes, square, 16);
      if (group < 2) partial[tile * 8 + quad * 2 + group] = square;
    }
  }

  __device__ __forceinline__ void finish(int of) const {
    HyperConnectionPreParams const& params = block.params;
    float norm[kVector];
    int const channel = first + quad * kVector;
    load_weights(params.norm, params.norm_is_float, channel, norm);
    cluster::barrier_wait(block.squares_here(of), block.slot_parity(of));
#pragma unroll
    for (int tile = 0; tile < S::kTiles; ++tile) {
      float const* const source = block.squares(of) + quad * (kCluster / 4) * S::kRows + tile * 8 + group;
      float square = 0.0F;
#pragma unroll
      for (int part = 0; part < kCluster / 4; ++part) square += source[part * S::kRows];
      float const inverse = rsqrtf(lane_sum<4>(square) / static_cast<float>(S::kHidden) + params.norm_eps);
      float values[kVector];
      unpack_bf16(*reinterpret_cast<uint4 const*>(block.kept(of, warp, tile, group, quad)), values);
#pragma unroll
      for (int slot = 0; slot < kVector; ++slot) values[slot] = norm[slot] * (values[slot] * inverse);
      int64_t const row = block.first_row(of) + tile * 8 + group;
      auto* const out = static_cast<__nv_bfloat16*>(params.normed) + row * S::kHidden + channel;
      if (row < params.rows) *reinterpret_cast<uint4*>(out) = pack_bf16(values);
    }
  }
};

template <class S>
__device__ void walk_groups(Block<S> const& block) {
  Slice<S> slice(block);
  slice.weights.load(block.params.fn, slice.first + slice.quad * 2, slice.group);
  for (int step = 0; step < block.count + S::kFinishLag; ++step) {
    bool const mixes = block.mixes(step);
    bool const collapses = block.collapses(step);
    if (mixes) {
      cluster::barrier_wait(block.loaded(step), step / S::kStages & 1);
      slice.mix(step);
    }
    if (collapses) slice.collapse(step);
    cluster::meet<S::kMixThreads>(kMeet);
    if (threadIdx.x == 0 && collapses) block.expect_weights(step - S::kLag);
    if (step < block.count + S::kLag) block.reduce(step);
    if (step >= S::kFinishLag) {
      slice.finish(step - S::kFinishLag);
      if (threadIdx.x == 0) block.expect_squares(step - S::kFinishLag);
    }
  }
}

template <class S>
__global__ void __launch_bounds__(S::kThreads, 1)
    one_pass_kernel(__grid_constant__ HyperConnectionPreParams const params,
                    __grid_constant__ CUtensorMap const streams, int groups) {
  extern __shared__ __align__(kStageAlignment) uint8_t one_pass_memory[];
  Block<S> const block(params, one_pass_memory, groups);
  block.prepare();
  int const lane = static_cast<int>(threadIdx.x) % kWarp;
  if (threadIdx.x < S::kMixThreads) {
    walk_groups(block);
  } else if (threadIdx.x < S::kMixThreads + kWarp) {
    send_sums(block, &streams, lane);
  } else {
    weigh_rows(block, lane);
  }
  cluster::synchronise();  // no block may go while another writes to it
}

// Clusters that run at once: asked of the driver once a device; 0 where such clusters do not exist.
template <class S>
int resident_clusters(cudaLaunchConfig_t const& config) {
  static std::atomic<int> known[kMaxDevices];  // one more than the number
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kMaxDevices) return 0;
  int const cached = known[device].load(std::memory_order_relaxed);
  if (cached > 0) return cached - 1;
  int clusters = 0;
  if (cudaOccupancyMaxActiveClusters(&clusters, one_pass_kernel<S>, &config) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());  // the query's own error
    clusters = 0;
  }
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
  if (cudaFuncSetAttribute(one_pass_kernel<S>, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kBytes) != cudaSuccess ||
      cudaFuncSetAttribute(one_pass_kernel<S>, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());  // a chip with less shared memory
    return Status::kUnsupported;
  }
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = kCluster;
  cluster.val.clusterDim.y = 1;
  cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(kCluster);
  config.blockDim = dim3(S::kThreads);
  config.dynamicSmemBytes = S::kBytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  int const clusters = resident_clusters<S>(config);
  REDKNOT_SUPPORTED(clusters > 0);
  config.gridDim = dim3(static_cast<unsigned>(kCluster * std::min<int64_t>(clusters, groups)));
  CUtensorMap streams;
  Status const encoded = encode_streams<S>(streams, params);
  REDKNOT_REQUIRE(encoded == Status::kSuccess, encoded);
  REDKNOT_CUDA(cudaLaunchKernelEx(&config, one_pass_kernel<S>, params, streams, static_cast<int>(groups)));
  return Status::kSuccess;
}

}  // namespace

Status hyper_connection_one_pass(HyperConnectionPreParams const& params, cudaStream_t stream) {
  REDKNOT_SUPPORTED(!params.head && params.stream_count == kStreams);
  if (params.hidden == Flash::kHidden) return launch<Flash>(params, stream);
  return Status::kUnsupported;
}

}  // namespace redknot
