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
#include "common/cluster_launch.h"
#include "kernels/hyper_connection/one_pass.h"
#include "kernels/hyper_connection/one_pass_collapse.cuh"
#include "kernels/hyper_connection/one_pass_exchange.cuh"
#include "kernels/hyper_connection/one_pass_mix.cuh"

namespace redknot {
namespace {

using namespace one_pass;

constexpr int kMaxDevices = 64;
#ifdef REDKNOT_FOR_TOOLS
constexpr int kMostClusters = 1;  // few rows fill its buffers more than once
#else
constexpr int kMostClusters = INT_MAX;
#endif

template <class S>
__global__ void __launch_bounds__(S::kThreads, 1)
    one_pass_kernel(__grid_constant__ HyperConnectionPreParams const params,
                    __grid_constant__ CUtensorMap const streams, int groups) {
  extern __shared__ __align__(kStageAlignment) uint8_t one_pass_memory[];
  int const lane = static_cast<int>(threadIdx.x) % kWarp;
  // Each kind of warp works out where it is: what they shared would have to fit the registers of all.
  if (threadIdx.x < kTeamThreads) {
    ptx::claim_registers<S::kRegisters.mix>();
    mix_groups(Block<S>(params, one_pass_memory, groups), lane);
  } else if (threadIdx.x < 2 * kTeamThreads) {
    ptx::release_registers<S::kRegisters.collapse>();
    collapse_groups(Block<S>(params, one_pass_memory, groups), lane);
  } else {
    ptx::release_registers<S::kRegisters.others>();
    Block<S> const block(params, one_pass_memory, groups);
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
  constexpr cuuint64_t kStreamBytes = S::kHidden * 2;
  return encode_boxes<3>(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, params.streams,
                         {S::kHidden, static_cast<cuuint64_t>(params.rows), kStreams},
                         {kStreams * kStreamBytes, kStreamBytes}, {kPanelChannels, S::kRows, kStreams});
}

template <class S>
Status launch(HyperConnectionPreParams const& params, cudaStream_t stream) {
  int64_t const groups = (params.rows + S::kRows - 1) / S::kRows;
  REDKNOT_TRY(allow_clusters(one_pass_kernel<S>, S::kBytes));
  int const clusters = clusters_of_device<S>();
  REDKNOT_SUPPORTED(clusters > 0);
  CUtensorMap streams;
  REDKNOT_TRY(encode_streams<S>(streams, params));
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
