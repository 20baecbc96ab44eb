#pragma once

// Scores of four rows against a stretch of entries. Keys are the M dimension of the matrix product, (row, head) the N
// dimension: q of the rows stays in shared memory, keys stream past it. Two warpgroups work on tiles of their own: one
// sums its products over the heads while the other multiplies. In fp8 the sum over the heads is a product as well: what
// leaves the matrix units, as fp16 without its negative half, is the left operand of the next one, the weights of the
// heads are the right one.

#include <cuda_fp16.h>

#include <type_traits>

#include "common/ptx.cuh"
#include "common/segments.h"
#include "common/wgmma.cuh"
#include "kernels/indexer/prepare.cuh"

namespace redknot::indexer {

inline constexpr int kRows = 4;
inline constexpr int kTileKeys = 64;
inline constexpr int kStages = 4;
inline constexpr int kMostStretch = 16384;  // entries of the pool that one block scores
inline constexpr int kLeastStretch = 4 * kTileKeys;
inline constexpr int kHalfRope = 32;  // rotated pairs
// 1 / sqrt(heads) / sqrt(dim). Applied to whole sums: sums that are exact stay so, and equal scores stay equal.
inline constexpr float kFactor = 0.125f * 0.08838834764831845f;
// Codes of q are at most 448 / 512, so that products with 128 codes of up to 448 fit fp16. What e4m3 then loses is
// below a thousandth of the head's largest channel.
inline constexpr float kQueryShrink = 1.0f / 512;

struct Scoring {
  IndexScoreParams op;
  uint8_t const* keys;      // fp8: [entries, 128] codes; else bf16 [entries, 128]
  float const* key_scales;  // [entries]; null for bf16
  float* scores;            // [rows of this launch, entries]: entry e of a row's sequence at column e
  int32_t first_row;
  int32_t rows;
  int32_t stretch;  // entries of the pool that one block scores
};

template <bool kFp8>
struct ScoreShared {
  static constexpr int kPanels = kFp8 ? 1 : 2;  // 128-byte wide parts of a 128-channel row
  alignas(1024) uint8_t q[kPanels][kRows * kIndexHeads * 128];
  alignas(1024) uint8_t tiles[2][kStages][kPanels][kTileKeys * 128];
  float scales[2][kStages][kTileKeys];
  float weights[kRows][kIndexHeads];
  __half halves[kRows][kIndexHeads];  // the same over the row's scale, a power of two
  float row_scales[kRows];
  float peaks[kRows][2];
};

// Rotates q of one (row, head) to a segment's frame and stores it as the matrix units read it.
template <bool kFp8>
__device__ __forceinline__ void store_query(ScoreShared<kFp8>& shared, Scoring const& s, int row, int head,
                                            int64_t frame) {
  int const column = row * kIndexHeads + head;
  bool const present = frame >= 0;
  int64_t const at = int64_t{s.first_row} + min(blockIdx.x * kRows + row, static_cast<unsigned>(s.rows - 1));
  auto const* q = static_cast<__nv_bfloat16 const*>(s.op.q) + (at * kIndexHeads + head) * kIndexDim;
  auto const* turn =
      reinterpret_cast<float2 const*>(s.op.rope) + min(max(frame, int64_t{0}), s.op.rope_positions - 1) * kHalfRope;
  auto channels = [&](int chunk, float (&x)[8]) {
    uint4 const raw = __ldg(reinterpret_cast<uint4 const*>(q) + chunk);
    uint32_t const words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float2 v = ptx::unpack_bf16(words[i]);
      if (chunk >= 8) {
        float2 const cs = __ldg(turn + (chunk - 8) * 4 + i);
        v = {v.x * cs.x - v.y * cs.y, v.y * cs.x + v.x * cs.y};
      }
      x[2 * i] = present ? v.x : 0;
      x[2 * i + 1] = present ? v.y : 0;
    }
  };
  auto const* weights = static_cast<__nv_bfloat16 const*>(s.op.weights);
  float weight = present ? __bfloat162float(weights[at * kIndexHeads + head]) : 0;
  float x[8];
  if constexpr (kFp8) {
    float peak = 0;
#pragma unroll
    for (int chunk = 0; chunk < 16; ++chunk) {
      channels(chunk, x);
#pragma unroll
      for (float value : x) peak = fmaxf(peak, fabsf(value));
    }
    float const scale = block_scale(peak) / kQueryShrink, inverse = 1 / scale;
    weight *= scale;
#pragma unroll
    for (int chunk = 0; chunk < 16; chunk += 2) {
      uint4 codes;
      channels(chunk, x);
      codes.x = to_e4m3({x[0] * inverse, x[1] * inverse, x[2] * inverse, x[3] * inverse});
      codes.y = to_e4m3({x[4] * inverse, x[5] * inverse, x[6] * inverse, x[7] * inverse});
      channels(chunk + 1, x);
      codes.z = to_e4m3({x[0] * inverse, x[1] * inverse, x[2] * inverse, x[3] * inverse});
      codes.w = to_e4m3({x[4] * inverse, x[5] * inverse, x[6] * inverse, x[7] * inverse});
      *reinterpret_cast<uint4*>(shared.q[0] + wgmma::swizzled(column, chunk / 2)) = codes;
    }
  } else {
#pragma unroll
    for (int chunk = 0; chunk < 16; ++chunk) {
      channels(chunk, x);
      *reinterpret_cast<uint4*>(shared.q[chunk / 8] + wgmma::swizzled(column, chunk % 8)) = {
          ptx::pack_bf16(x[0], x[1]), ptx::pack_bf16(x[2], x[3]), ptx::pack_bf16(x[4], x[5]),
          ptx::pack_bf16(x[6], x[7])};
    }
  }
  shared.weights[row][head] = weight;
}

// Starts the copy of one tile of keys [first, first + 64) of [first, end) by one warpgroup.
template <bool kFp8>
__device__ __forceinline__ void load_tile(ScoreShared<kFp8>& shared, Scoring const& s, int group, int stage,
                                          int64_t first, int64_t end, int thread) {
  constexpr int kChunks = ScoreShared<kFp8>::kPanels * 8;
#pragma unroll
  for (int i = 0; i < kTileKeys * kChunks / 128; ++i) {
    int const index = i * 128 + thread, key = index / kChunks, chunk = index % kChunks;
    uint8_t const* from = s.keys + min(first + key, end - 1) * (kChunks * 16) + chunk * 16;
    ptx::copy_async_16(ptx::shared_address(shared.tiles[group][stage][chunk / 8]) + wgmma::swizzled(key, chunk % 8),
                       from);
  }
  if (kFp8 && thread < kTileKeys) {
    float const* from = s.key_scales + min(first + thread, end - 1);
    ptx::copy_async_4(ptx::shared_address(&shared.scales[group][stage][thread]), from);
  }
}

// Weights of a block's rows as the matrix units read them: the lane's heads of row g / 2, 16 heads a pair of words.
using HeadWeights = uint32_t[kIndexHeads / 8];

__device__ __forceinline__ void load_weights(ScoreShared<true> const& shared, int g, int t, HeadWeights& weights) {
#pragma unroll
  for (int i = 0; i < kIndexHeads / 8; ++i) {
    weights[i] = *reinterpret_cast<uint32_t const*>(&shared.halves[g / 2][8 * i + 2 * t]);
  }
}

// Sums of relu(products) times weights over the heads of two rows. Of a row's sums, those of its own weights count:
// lane t of four has its keys g and g + 8 of row t at 0 and 2.
__device__ __forceinline__ void sum_heads(float const (&products)[64], HeadWeights const& weights, float (&first)[4],
                                          float (&second)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) first[i] = second[i] = 0;
#pragma unroll
  for (int step = 0; step < kIndexHeads / 16; ++step) {
    uint32_t a[2][4];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float const* x = &products[row * 32 + 8 * step];
#pragma unroll
      for (int i = 0; i < 4; ++i) a[row][i] = ptx::pack_f16_relu(x[2 * i], x[2 * i + 1]);
    }
    ptx::mma_f16(first, a[0], weights[2 * step], weights[2 * step + 1]);
    ptx::mma_f16(second, a[1], weights[2 * step], weights[2 * step + 1]);
  }
}

// The same in fp32, of four rows, relu(x) as (x + |x|) / 2: lane t ends with row t.
__device__ __forceinline__ void sum_heads(float const (&products)[2][64], float const (&weights)[kRows][kIndexHeads],
                                          int t, float (&own)[2]) {
  float sums[kRows][2];
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    float a[2] = {0, 0}, b[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float2 const w = *reinterpret_cast<float2 const*>(&weights[row][8 * j + 2 * t]);
      float const* x = &products[row / 2][row % 2 * 32 + 4 * j];
#pragma unroll
      for (int key = 0; key < 2; ++key) {
        a[key] += w.x * x[2 * key];
        b[key] += w.x * fabsf(x[2 * key]);
        a[key] += w.y * x[2 * key + 1];
        b[key] += w.y * fabsf(x[2 * key + 1]);
      }
    }
    sums[row][0] = (a[0] + b[0]) * 0.5f;
    sums[row][1] = (a[1] + b[1]) * 0.5f;
  }
  float half[2][2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int key = 0; key < 2; ++key) {
      float const keep = t & 1 ? sums[2 * i + 1][key] : sums[2 * i][key];
      float const give = t & 1 ? sums[2 * i][key] : sums[2 * i + 1][key];
      half[i][key] = keep + __shfl_xor_sync(~0u, give, 1);
    }
  }
#pragma unroll
  for (int key = 0; key < 2; ++key) {
    float const keep = t & 2 ? half[1][key] : half[0][key], give = t & 2 ? half[0][key] : half[1][key];
    own[key] = keep + __shfl_xor_sync(~0u, give, 2);
  }
}

// One scale a row for its weights, which fp16 then holds.
__device__ __forceinline__ void halve_weights(ScoreShared<true>& shared, int row, int head) {
  float const peak = lane_max<kWarp>(fabsf(shared.weights[row][head]));
  if (head % 32 == 0) shared.peaks[row][head / 32] = peak;
  __syncthreads();
  float const scale = block_scale(fmaxf(shared.peaks[row][0], shared.peaks[row][1]));
  shared.halves[row][head] = __float2half_rn(shared.weights[row][head] / scale);
  if (head == 0) shared.row_scales[row] = scale;
}

template <bool kFp8>
__global__ void __launch_bounds__(256, 1) score_kernel(__grid_constant__ Scoring const s) {
  extern __shared__ __align__(1024) uint8_t score_raw[];
  auto& shared = *reinterpret_cast<ScoreShared<kFp8>*>(score_raw);
  int const thread = threadIdx.x % 128, group = threadIdx.x / 128, lane = threadIdx.x % 32, warp = thread / 32;
  int const g = lane / 4, t = lane % 4;
  int const block_row = blockIdx.x * kRows, rows = min(kRows, s.rows - block_row);
  int64_t const low = int64_t{blockIdx.y} * s.stretch, high = min(low + s.stretch, s.op.entries);
  int64_t const* spans = s.op.row_segments + 2 * (int64_t{s.first_row} + block_row);
  int64_t first_segment = s.op.segment_count, last_segment = 0;
  for (int row = 0; row < rows; ++row) {
    first_segment = min(first_segment, max(int64_t{0}, __ldg(spans + 2 * row)));
    last_segment = max(last_segment, min(int64_t{s.op.segment_count}, __ldg(spans + 2 * row + 1)));
  }
  // From the first to the last of them that has entries in this stretch, found 32 at a time: one by one, a short
  // stretch would wait for their numbers longer than it works.
  int64_t first_met = last_segment, last_met = first_segment;
  for (int64_t first = first_segment; first < last_segment; first += 32) {
    bool meets = false;
    if (first + lane < last_segment) {
      int64_t const* columns = s.op.segments + segment::kColumnCount * (first + lane);
      int64_t const offset = __ldg(columns + segment::kEntry);
      meets = max(low, offset) < min(high, offset + __ldg(columns + segment::kEntries));
    }
    unsigned const met = __ballot_sync(~0u, meets);
    if (met == 0) continue;
    first_met = min(first_met, first + __ffs(static_cast<int>(met)) - 1);
    last_met = first + 32 - __clz(static_cast<int>(met));
  }
  for (int64_t segment = first_met; segment < last_met; ++segment) {
    int64_t const* columns = s.op.segments + segment::kColumnCount * segment;
    int64_t const start = __ldg(columns + segment::kStart), offset = __ldg(columns + segment::kEntry);
    int64_t const count = __ldg(columns + segment::kEntries);
    int64_t const begin = max(low, offset);
    int64_t end = min(high, offset + count);
    if (begin >= end) continue;
    // No row sees beyond the furthest-sighted one. Rows of one sequence share its first entry.
    int64_t seen = 0;
    for (int row = 0; row < rows; ++row) {
      int64_t const from = max(int64_t{0}, __ldg(spans + 2 * row));
      if (from <= segment && segment < __ldg(spans + 2 * row + 1)) {
        int64_t const first_entry = __ldg(s.op.segments + segment::kColumnCount * from + segment::kEntry);
        seen = max(seen, first_entry + __ldg(s.op.visible + s.first_row + block_row + row));
      }
    }
    end = min(end, seen);
    if (begin >= end) continue;
    __syncthreads();
    {
      int const row = threadIdx.x / kIndexHeads;
      bool const inside = row < rows && __ldg(spans + 2 * row) <= segment && segment < __ldg(spans + 2 * row + 1);
      // Rows before the segment see none of it; their frame is clamped only to stay inside the table.
      int64_t const frame =
          inside ? max(int64_t{0}, __ldg(s.op.positions + s.first_row + block_row + row) - start) : -1;
      store_query(shared, s, row, threadIdx.x % kIndexHeads, frame);
      if constexpr (kFp8) halve_weights(shared, row, threadIdx.x % kIndexHeads);
    }
    wgmma::publish();
    __syncthreads();
    // The row whose scores this lane writes, and where its sequence begins: never after the segment's entries.
    bool writes =
        t < rows && __ldg(spans + 2 * min(t, rows - 1)) <= segment && segment < __ldg(spans + 2 * min(t, rows - 1) + 1);
    float* out = nullptr;
    if (writes) {
      int64_t const from = max(int64_t{0}, __ldg(spans + 2 * t));
      int64_t const first_entry = __ldg(s.op.segments + segment::kColumnCount * from + segment::kEntry);
      writes = first_entry >= 0 && first_entry <= begin;
      out = s.scores + (int64_t{block_row} + t) * s.op.entries - first_entry;
    }
    int const tiles = static_cast<int>((end - begin + kTileKeys - 1) / kTileKeys);
    int const own = (tiles - group + 1) / 2;
    auto first_key = [&](int index) { return begin + int64_t{2 * index + group} * kTileKeys; };
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) {
      if (stage < own) load_tile(shared, s, group, stage, first_key(stage), end, thread);
      ptx::copy_commit();
    }
    HeadWeights weights;
    float row_scale = 1;
    if constexpr (kFp8) {
      load_weights(shared, g, t, weights);
      row_scale = shared.row_scales[t];
    }
    uint64_t const q[2] = {wgmma::descriptor(ptx::shared_address(shared.q[0])),
                           wgmma::descriptor(ptx::shared_address(shared.q[0]) + 2 * kIndexHeads * 128)};
    for (int index = 0; index < own; ++index) {
      int const stage = index % kStages;
      ptx::copy_wait<kStages - 2>();
      wgmma::publish();
      ptx::sync_threads(group + 1, 128);
      float products[2][64];
      uint64_t const keys = wgmma::descriptor(ptx::shared_address(shared.tiles[group][stage][0]));
      wgmma::fence();
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
#pragma unroll
        for (int panel = 0; panel < ScoreShared<kFp8>::kPanels; ++panel) {
#pragma unroll
          for (int step = 0; step < 4; ++step) {
            uint64_t const a = keys + panel * (kTileKeys * 128 / 16) + step * 2;
            uint64_t const b = q[pair] + panel * (kRows * kIndexHeads * 128 / 16) + step * 2;
            if constexpr (kFp8) {
              wgmma::multiply_e4m3(products[pair], a, b, panel + step > 0);
            } else {
              wgmma::multiply_bf16(products[pair], a, b, panel + step > 0);
            }
          }
        }
        wgmma::commit();
      }
      if (index + kStages - 1 < own) {
        load_tile(shared, s, group, (index + kStages - 1) % kStages, first_key(index + kStages - 1), end, thread);
      }
      ptx::copy_commit();
      // Row t of keys g and g + 8 of the warp's 16.
      float sums[2];
      if constexpr (kFp8) {
        float rows_sums[kRows][4];
        wgmma::wait<1>();
        sum_heads(products[0], weights, rows_sums[0], rows_sums[1]);
        wgmma::wait<0>();
        sum_heads(products[1], weights, rows_sums[2], rows_sums[3]);
#pragma unroll
        for (int key = 0; key < 2; ++key) {
          float const low = t & 1 ? rows_sums[1][2 * key] : rows_sums[0][2 * key];
          float const high = t & 1 ? rows_sums[3][2 * key] : rows_sums[2][2 * key];
          sums[key] = t & 2 ? high : low;
        }
      } else {
        wgmma::wait<0>();
        sum_heads(products, shared.weights, t, sums);
      }
      int64_t const first = first_key(index) + 16 * warp + g;
#pragma unroll
      for (int key = 0; key < 2; ++key) {
        float total = sums[key] * kFactor;
        if constexpr (kFp8) total *= row_scale * shared.scales[group][stage][16 * warp + g + 8 * key];
        if (writes && first + 8 * key < end) out[first + 8 * key] = total;
      }
    }
    ptx::copy_wait<0>();
  }
}

}  // namespace redknot::indexer
