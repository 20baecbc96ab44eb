#pragma once

// One persistent kernel: a producer warp copies tiles of codes into a ring of shared memory, two groups of four warps
// multiply them. A block walks tiles of 128 rows of one expert x 256 columns; each group has 128 of the columns.
// Products of 128 channels are summed by the tensor cores, scaled by what the row's block and the weight's block share,
// and added in fp32 (the tensor cores keep too few bits for a whole sum).
//
// Two blocks on neighbouring multiprocessors walk together: they take two row tiles and the same columns, and each
// copies half of the weights for both, so that the L2 cache is read a third less. An expert's last row tile, where it
// has no partner, is taken by both with neighbouring columns; there each copies what it needs. So it is where the last
// tile has no more than 64 rows, which take half as long: a step has two of them.

#include "common/cluster.cuh"
#include "common/ptx.cuh"
#include "common/tensor_map.h"
#include "common/vector.cuh"
#include "common/wgmma.cuh"
#include "kernels/moe/params.h"

namespace redknot::grouped {

inline constexpr int kBlock = kScaleBlock;  // channels that share a scale, rows of a tile, columns of a group
inline constexpr int kGroups = 2;           // that multiply
inline constexpr int kGroupThreads = 128;
inline constexpr int kThreads = (1 + kGroups) * kGroupThreads;
inline constexpr int kPair = 2;  // blocks that walk together, 1 or 2
inline constexpr int kStages = 4;
inline constexpr int kHalf = 64;  // rows of one product
// Pairs of row tiles that are walked before the next columns: their codes and the expert's weights fit the L2 cache
// together.
inline constexpr int kRowPairs = 16 / kPair;
inline constexpr int kPanel = kBlock * kPanelBytes;
inline constexpr int kHalfPanel = kHalf * kPanelBytes;

struct Stage {
  uint8_t rows[kPanel];
  uint8_t weights[kGroups][kPanel];
};

struct Shared {
  Stage stages[kStages];
  uint64_t full[kStages];
  uint64_t empty[kStages];
};

// What the kernel reads besides the two matrices of codes.
struct Operands {
  float const* row_scales;     // [depth / 128, scale_stride]
  float const* weight_scales;  // [experts, depth / 128, width / 128]
  int32_t const* ends;         // [experts]
  __nv_bfloat16* out;          // [capacity, width]
  int64_t scale_stride;
  int32_t capacity;
  int32_t experts;
  int32_t depth;
  int32_t width;
};

struct Tile {
  int32_t expert;
  int32_t first;  // row
  int32_t rows;   // 1 to 128
  int32_t column;
  bool together;  // with the other block: its weights are those of this block
};

// The tiles of one block, in an order that all its warps work out alike; that of the other block of the pair takes as
// many steps.
class Walk {
 public:
  __device__ __forceinline__ explicit Walk(Operands const& operands)
      : operands_(operands),
        column_tiles_((operands.width + kGroups * kBlock - 1) / (kGroups * kBlock)),
        index_(static_cast<int32_t>(blockIdx.x) / kPair) {
    end_ = end_of(0);
  }

  __device__ __forceinline__ bool next(Tile& tile) {
    if (again_) {
      again_ = false;
      tile.column = column_of(tile.column / kColumns + kPair);
      return true;
    }
    while (expert_ < operands_.experts) {
      int32_t const rows = end_ - begin_;
      int32_t const rest = rows % kBlock;
      int32_t const shorts = rest > 0 && rest <= kHalf ? 1 : 0;
      int32_t const talls = (rows + kBlock - 1) / kBlock - shorts;
      int32_t const pairs = talls / kPair * column_tiles_;
      int32_t const singles = pairs + talls % kPair * ((column_tiles_ + kPair - 1) / kPair);
      int32_t const all = singles + shorts * ((column_tiles_ + 2 * kPair - 1) / (2 * kPair));
      int32_t const local = index_ - passed_;
      if (local < all) {
        take(tile, talls, local, pairs, singles);
        index_ += static_cast<int32_t>(gridDim.x) / kPair;
        return true;
      }
      passed_ += all;
      begin_ = end_;
      if (++expert_ < operands_.experts) end_ = end_of(expert_);
    }
    return false;
  }

 private:
  static constexpr int kColumns = kGroups * kBlock;

  // The last of an odd number is taken twice.
  __device__ __forceinline__ int32_t column_of(int32_t column_tile) const {
    return min(column_tile, column_tiles_ - 1) * kColumns;
  }

  __device__ __forceinline__ void take(Tile& tile, int32_t talls, int32_t local, int32_t pairs, int32_t singles) {
    int32_t const rank = static_cast<int32_t>(blockIdx.x) % kPair;
    int32_t row_tile = talls;
    if (local < pairs) {
      int32_t const row_group = local / (kRowPairs * column_tiles_);
      int32_t const group_pairs = min(kRowPairs, talls / kPair - row_group * kRowPairs);
      int32_t const rest = local - row_group * kRowPairs * column_tiles_;
      row_tile = (row_group * kRowPairs + rest % group_pairs) * kPair + rank;
      tile.column = rest / group_pairs * kColumns;
    } else if (local < singles) {
      row_tile = talls - 1;
      tile.column = column_of((local - pairs) * kPair + rank);
    } else {
      int32_t const column_tile = (local - singles) * 2 * kPair;
      tile.column = column_of(column_tile + rank);
      again_ = column_tile + kPair < column_tiles_;
    }
    tile.expert = expert_;
    tile.first = begin_ + row_tile * kBlock;
    tile.rows = min(kBlock, end_ - tile.first);
    tile.together = local < pairs;
  }

  // Ends come from the device: whatever they hold, no row outside the tensors is touched.
  __device__ __forceinline__ int32_t end_of(int32_t expert) const {
    return max(begin_, min(__ldg(operands_.ends + expert), operands_.capacity));
  }

  Operands const& operands_;
  int32_t column_tiles_;
  int32_t index_;
  int32_t passed_ = 0;  // steps of the experts before
  int32_t expert_ = 0;
  int32_t begin_ = 0;
  int32_t end_ = 0;
  bool again_ = false;  // the step has another tile: of the same rows, two column tiles further
};

// Place in the ring.
struct Slot {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage < kStages) return;
    stage = 0;
    parity ^= 1;
  }
};

// Starts the copy of the box whose first element is (row, column) of the map's matrix into this block.
__device__ __forceinline__ void copy_box(void* shared, CUtensorMap const* map, int32_t row, int32_t column,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
          "r"(ptx::shared_address(shared)),
      "l"(map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}
// The same into both blocks, at the same place and for the same barrier of each. Other targets have no use for it: the
// launcher refuses them.
__device__ __forceinline__ void copy_box_to_both(void* shared, CUtensorMap const* map, int32_t row, int32_t column,
                                                 uint32_t barrier) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr uint16_t kBoth = (1U << kPair) - 1U;
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%2, %3}], [%4], %5;" ::"r"(ptx::shared_address(shared)),
      "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(kBoth)
      : "memory");
#else
  __trap();
#endif
}

// Waits until the phase of this parity is over. What the phase waits for are copies and reads of the matrix units, so
// the block's scope will do: that of the cluster would empty the L1 cache every time.
__device__ __forceinline__ void wait(uint64_t* barrier, uint32_t parity) {
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}"
        : "=r"(done)
        : "r"(ptx::shared_address(barrier)), "r"(parity)
        : "memory");
  }
}

// A stage is refilled once both blocks have read it, since either fills stages of both.
__device__ __forceinline__ void produce(Shared& shared, Operands const& operands, CUtensorMap const* rows,
                                        CUtensorMap const* weights) {
  Walk walk(operands);
  Tile tile;
  Slot slot;
  int const rank = static_cast<int>(blockIdx.x) % kPair;
  while (walk.next(tile)) {
    int const panels = min(kGroups, (operands.width - tile.column) / kBlock);
    int32_t const weight_row = tile.expert * operands.width + tile.column;
    bool const tall = tile.rows > kHalf;
    for (int32_t channel = 0; channel < operands.depth; channel += kBlock) {
      Stage& stage = shared.stages[slot.stage];
      uint32_t const full = ptx::shared_address(shared.full + slot.stage);
      wait(shared.empty + slot.stage, slot.parity ^ 1);
      cluster::barrier_expect(full, static_cast<uint32_t>(panels * kPanel + (tall ? 2 : 1) * kHalfPanel));
      copy_box(stage.rows, rows, tile.first, channel, full);
      if (tall) copy_box(stage.rows + kHalfPanel, rows, tile.first + kHalf, channel, full);
      for (int panel = 0; panel < panels; ++panel) {
        int32_t const weight = weight_row + panel * kBlock;
        if (kPair == 1 || !tile.together) {
          copy_box(stage.weights[panel], weights, weight, channel, full);
        } else if (panel == rank) {
          copy_box_to_both(stage.weights[panel], weights, weight, channel, full);
        }
      }
      slot.advance();
    }
  }
}

// One arrival at the stage's barrier of each block, from a lane each. What was read of the stage went to the matrix
// units and has arrived: nothing that a fence of the whole cluster would wait for.
__device__ __forceinline__ void release(uint64_t* empty, int lane) {
  if (lane >= kPair) return;
  uint32_t const remote = cluster::address_in(ptx::shared_address(empty), static_cast<uint32_t>(lane));
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(remote) : "memory");
}

// Scales of one block of channels: of the four rows a thread holds sums of, and of the weight.
struct Scales {
  float rows[4];
  float weight;
};

// The low word of a descriptor; the high one is the same for all.
__device__ __forceinline__ uint32_t low_word(void const* shared) {
  return static_cast<uint32_t>(wgmma::descriptor(ptx::shared_address(shared)));
}
__device__ __forceinline__ uint64_t whole(uint32_t low) {
  uint64_t descriptor;
  asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(low), "n"(static_cast<uint32_t>(wgmma::descriptor(0) >> 32)));
  return descriptor;
}

// products = 64 rows x 128 columns over 128 channels, of the panels that these low words describe.
__device__ __forceinline__ void multiply(float (&products)[64], uint32_t rows, uint32_t weights) {
  wgmma::fence();
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    wgmma::multiply_e4m3(products, whole(rows + 2 * step), whole(weights + 2 * step), step > 0);
  }
  wgmma::commit();
  wgmma::wait<0>();
}

__device__ __forceinline__ void add_scaled(float (&sums)[64], float const (&products)[64], float low, float high) {
#pragma unroll
  for (int index = 0; index < 64; index += 4) {
    sums[index] += low * products[index];
    sums[index + 1] += low * products[index + 1];
    sums[index + 2] += high * products[index + 2];
    sums[index + 3] += high * products[index + 3];
  }
}

// Four lanes hold word i of four rows each; afterwards each holds the four words of one.
__device__ __forceinline__ void transpose_quad(uint32_t (&words)[4], int lane) {
  bool const odd = (lane & 1) != 0;
  uint32_t const first = __shfl_xor_sync(kAllLanes, odd ? words[0] : words[1], 1);
  uint32_t const second = __shfl_xor_sync(kAllLanes, odd ? words[2] : words[3], 1);
  (odd ? words[0] : words[1]) = first;
  (odd ? words[2] : words[3]) = second;
  bool const upper = (lane & 2) != 0;
  uint32_t const third = __shfl_xor_sync(kAllLanes, upper ? words[0] : words[2], 2);
  uint32_t const fourth = __shfl_xor_sync(kAllLanes, upper ? words[1] : words[3], 2);
  (upper ? words[0] : words[2]) = third;
  (upper ? words[1] : words[3]) = fourth;
}

// 64 rows x 128 columns of sums, of which `rows` exist; `out` is the first of them.
__device__ __forceinline__ void store(float const (&sums)[64], __nv_bfloat16* out, int64_t width, int rows, int warp,
                                      int lane) {
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    int const row = warp * 16 + side * 8 + lane / 4;
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      uint32_t words[4];
#pragma unroll
      for (int index = 0; index < 4; ++index) {
        int const place = 4 * (4 * part + index) + 2 * side;
        words[index] = ptx::pack_bf16(sums[place], sums[place + 1]);
      }
      transpose_quad(words, lane);
      if (row < rows) {
        *reinterpret_cast<uint4*>(out + row * width + (4 * part + lane % 4) * kVector) = {words[0], words[1], words[2],
                                                                                          words[3]};
      }
    }
  }
}

// Where a thread's next scales lie: of its rows, the last of the tile in place of those that there are not, and of the
// weight.
struct ScaleWalk {
  float const* rows[4];
  float const* weight;
  __device__ __forceinline__ Scales load(int64_t rows_step, int64_t weight_step) {
    Scales scales;
#pragma unroll
    for (int index = 0; index < 4; ++index) {
      scales.rows[index] = __ldg(rows[index]);
      rows[index] += rows_step;
    }
    scales.weight = __ldg(weight);
    weight += weight_step;
    return scales;
  }
};

// Sums of a tile: 128 rows, or 64 of them.
template <bool kTall>
__device__ __forceinline__ void sum_tile(Shared& shared, Operands const& operands, Slot& slot, ScaleWalk walk,
                                         int blocks, int weight_blocks, uint32_t first_rows, uint32_t first_weights,
                                         int lane, float (&sums)[2][64]) {
  Scales next = walk.load(blocks > 1 ? operands.scale_stride : 0, blocks > 1 ? weight_blocks : 0);
#pragma unroll 1
  for (int block = 0; block < blocks; ++block) {
    Scales const scales = next;
    bool const more = block + 2 < blocks;
    next = walk.load(more ? operands.scale_stride : 0, more ? weight_blocks : 0);
    uint32_t const offset = static_cast<uint32_t>(slot.stage) * (sizeof(Stage) >> 4);
    uint32_t const rows = first_rows + offset;
    uint32_t const weights = first_weights + offset;
    wait(shared.full + slot.stage, slot.parity);
    float products[64];
    multiply(products, rows, weights);
    if (!kTall) release(shared.empty + slot.stage, lane);
    add_scaled(sums[0], products, scales.rows[0] * scales.weight, scales.rows[1] * scales.weight);
    if (kTall) {
      multiply(products, rows + (kHalfPanel >> 4), weights);
      release(shared.empty + slot.stage, lane);
      add_scaled(sums[1], products, scales.rows[2] * scales.weight, scales.rows[3] * scales.weight);
    }
    slot.advance();
  }
}

__device__ __forceinline__ void consume(Shared& shared, Operands const& operands, int group, int thread) {
  int const warp = thread / kWarp;
  int const lane = thread % kWarp;
  int const blocks = operands.depth / kBlock;
  int const weight_blocks = operands.width / kBlock;
  uint32_t const first_rows = low_word(shared.stages[0].rows);
  uint32_t const first_weights = low_word(shared.stages[0].weights[group]);
  Walk walk(operands);
  Tile tile;
  Slot slot;
  while (walk.next(tile)) {
    bool const wanted = tile.column + group * kBlock < operands.width;
    if (!wanted) {
      for (int block = 0; block < blocks; ++block) {
        wait(shared.full + slot.stage, slot.parity);
        release(shared.empty + slot.stage, lane);
        slot.advance();
      }
      continue;
    }
    bool const tall = tile.rows > kHalf;
    ScaleWalk scales;
#pragma unroll
    for (int index = 0; index < 4; ++index) {
      int const row = warp * 16 + lane / 4 + index / 2 * kHalf + index % 2 * 8;
      scales.rows[index] = operands.row_scales + tile.first + min(row, tile.rows - 1);
    }
    scales.weight =
        operands.weight_scales + int64_t{tile.expert} * blocks * weight_blocks + tile.column / kBlock + group;
    float sums[2][64] = {};
    if (tall) {
      sum_tile<true>(shared, operands, slot, scales, blocks, weight_blocks, first_rows, first_weights, lane, sums);
    } else {
      sum_tile<false>(shared, operands, slot, scales, blocks, weight_blocks, first_rows, first_weights, lane, sums);
    }
    __nv_bfloat16* const out = operands.out + int64_t{tile.first} * operands.width + tile.column + group * kBlock;
    store(sums[0], out, operands.width, tile.rows, warp, lane);
    if (tall) store(sums[1], out + int64_t{kHalf} * operands.width, operands.width, tile.rows - kHalf, warp, lane);
  }
}

__global__ void __cluster_dims__(kPair, 1, 1) __launch_bounds__(kThreads, 1)
    multiply_kernel(__grid_constant__ CUtensorMap const rows, __grid_constant__ CUtensorMap const weights,
                    __grid_constant__ Operands const operands) {
  extern __shared__ __align__(1024) uint8_t raw[];
  Shared& shared = *reinterpret_cast<Shared*>(raw);
  int const role = static_cast<int>(threadIdx.x) / kGroupThreads;
  int const thread = static_cast<int>(threadIdx.x) % kGroupThreads;
  if (threadIdx.x == 0) {
    constexpr uint32_t kReaders = kPair * kGroups * kGroupThreads / kWarp;
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::barrier_init(ptx::shared_address(shared.full + stage), 1);
      ptx::barrier_init(ptx::shared_address(shared.empty + stage), kReaders);
    }
    cluster::barriers_ready();
  }
  cluster::synchronise();
  cudaGridDependencySynchronize();  // the codes and scales
  if (role == 0) {
    ptx::release_registers<40>();
    if (thread == 0) produce(shared, operands, &rows, &weights);
    __syncwarp();
  } else {
    ptx::claim_registers<232>();
    consume(shared, operands, role - 1, thread);
  }
  // The other block may still write and arrive here.
  cluster::synchronise();
}

}  // namespace redknot::grouped
