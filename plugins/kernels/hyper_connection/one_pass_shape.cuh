#pragma once

// How hyper_connection_pre of one launch uses shared memory, its barriers, and the channels of a warp.

#include "common/cluster.cuh"
#include "common/ptx.cuh"
#include "common/tensor_map.h"
#include "common/vector.cuh"
#include "kernels/hyper_connection/params.h"

namespace redknot::one_pass {

constexpr int kCluster = 16;
constexpr int kStreams = 4;
constexpr int kMixes = (2 + kStreams) * kStreams;
constexpr int kMixRows = kMixes / 8;  // mixes of one lane of a product
constexpr int kSquares = kMixes;      // value after the mixes: squares of the streams
constexpr int kSent = kMixes + 1;     // values of a row that are summed by its owner
constexpr int kLine = 28;             // floats of a row of partial sums, and of one source in a receive slot
constexpr int kUnits = 2;             // parts of a warp's work on a group, each of 8 rows x 32 channels
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
constexpr int kEarlyGroups = 2;     // copied beside fn
constexpr int kBornRegisters = 96;  // of each thread, which are shared out anew

// Registers of a thread, by what its warp does. Where one too few is left, a warp waits for what it reloads.
struct Registers {
  int mix;
  int collapse;
  int others;
};

// One geometry: hidden channels, rows of a group in tiles of eight, and groups in shared memory. A warp owns 32
// channels of two tiles, or 64 of one; then there are too many channels for all terms of fn in registers, and half of
// them lie in shared memory. Offsets are bytes of shared memory.
template <int kHiddenChannels, int kRowTiles, int kStageCount, Registers kOfThreads>
struct Shape {
  static constexpr int kHidden = kHiddenChannels;
  static constexpr int kTiles = kRowTiles;
  static constexpr int kHalves = kUnits / kTiles;  // of a warp's channels
  static constexpr int kStages = kStageCount;
  static constexpr Registers kRegisters = kOfThreads;
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
  // Barriers at which other blocks or copies arrive, then those of all lanes of a warp, of a team, of a warp.
  static constexpr int kWarpBarriers = 2 * kStages + 2 * kSlots + kSquareSlots;
  static constexpr int kTeamBarriers = kWarpBarriers + 4;
  static constexpr int kPendingBarriers = kTeamBarriers + 4;
  static constexpr int kBarrierCount = kPendingBarriers + 2;
  static constexpr int kWaiting = kBarriers + 8 * kBarrierCount;  // [kPending][kPendingPitch]
  static constexpr int kBytes = kWaiting + kPending * kPendingPitch * 4;
  static_assert(kOwn % kPanelChannels == 0 && kOwn % kWarpChannels == 0 && kTeam <= kTeamThreads);
  static_assert(kPanelSize % kStageAlignment == 0 && kRows <= kCluster && kBytes <= kMaxSharedBytes);
  static_assert(kWarps * kRowQuads <= kWarp);
  static_assert((kRegisters.mix + kRegisters.collapse) * kTeamThreads + kRegisters.others * 4 * kWarp <=
                kBornRegisters * kThreads);
};
using Flash = Shape<4096, 2, 5, Registers{.mix = 136, .collapse = 72, .others = 64}>;
using Pro = Shape<7168, 1, 4, Registers{.mix = 144, .collapse = 72, .others = 48}>;

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
    return address(S::kBarriers + 8 * (S::kWarpBarriers + group % 2));
  }
  __device__ __forceinline__ uint32_t squares_taken(int group) const {
    return address(S::kBarriers + 8 * (S::kWarpBarriers + 2 + group % 2));
  }
  // Partial mixes, or squares of the collapse, of odd or even groups are there; after the latter, streams are done
  // with.
  __device__ __forceinline__ uint32_t partials_here(int group) const {
    return address(S::kBarriers + 8 * (S::kTeamBarriers + group % 2));
  }
  __device__ __forceinline__ uint32_t collapsed(int group) const {
    return address(S::kBarriers + 8 * (S::kTeamBarriers + 2 + group % 2));
  }
  // Rows that wait for their Sinkhorn are there, and have been read.
  __device__ __forceinline__ uint32_t pending_full() const { return address(S::kBarriers + 8 * (S::kPendingBarriers)); }
  __device__ __forceinline__ uint32_t pending_taken() const {
    return address(S::kBarriers + 8 * (S::kPendingBarriers + 1));
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
      bool const of_warp = (index >= S::kStages && index < 2 * S::kStages) || index >= S::kWarpBarriers;
      bool const of_team = index >= S::kTeamBarriers && index < S::kPendingBarriers;
      ptx::barrier_init(address(S::kBarriers + 8 * index), of_team ? S::kTeam : of_warp ? kWarp : 1);
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
};

}  // namespace redknot::one_pass
