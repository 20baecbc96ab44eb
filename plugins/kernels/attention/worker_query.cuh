#pragma once

// q of a unit: codes and rope channels, or bf16.

#include "common/turn.cuh"
#include "kernels/attention/worker.cuh"

namespace redknot::attention {

// q of every column, turned by the row's position. Columns past the last repeat it: nothing of them is written.
template <typename T, int kGroup>
__device__ __forceinline__ void Worker<T, kGroup>::load_queries() {
  constexpr int kChunks = kHeadDim / 8;
  constexpr int kAtOnce = 4;  // columns of a warp whose loads are on their way together
  constexpr int kWarps = T::kWorkers / 32;
  constexpr int kOwnColumns = T::kColumns / kWarps, kTogether = kOwnColumns < kAtOnce ? kOwnColumns : kAtOnce;
  int const last = unit_.rows * unit_.heads - 1;
  int const warp = thread_ / 32;
#pragma unroll 1
  for (int first = 0; first < kOwnColumns; first += kTogether) {
    uint4 chunks[kTogether][2];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      int const shown = min(warp * kOwnColumns + first + i, last), row = shared_.column_row[shown];
      auto const* q = column_pointer(op_, unit_, row, shown, static_cast<__nv_bfloat16 const*>(op_.q_global),
                                     static_cast<__nv_bfloat16 const*>(op_.q_local));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        chunks[i][half] = __ldg(reinterpret_cast<uint4 const*>(q) + half * kChunks / 2 + lane_);
      }
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      int const column = warp * kOwnColumns + first + i, row = shared_.column_row[min(column, last)];
      store_query(column, shared_.row_position[row], chunks[i]);
    }
  }
  wgmma::publish();
}

// Chunks `lane` and `lane` + 32 of 8 channels of a column's q.
template <typename T, int kGroup>
__device__ __forceinline__ void Worker<T, kGroup>::store_query(int column, int position, uint4 const (&chunks)[2]) {
  constexpr int kLine = T::kColumns * kLineBytes;
  constexpr int kRopeLane = 32 - kRopeDim / 8;
  float x[2][8];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t const words[4] = {chunks[half].x, chunks[half].y, chunks[half].z, chunks[half].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float2 const pair = ptx::unpack_bf16(words[i]);
      x[half][2 * i] = pair.x, x[half][2 * i + 1] = pair.y;
    }
  }
  uint4 wide[2] = {chunks[0], chunks[1]};
  bool const rope = lane_ >= kRopeLane;  // of the second chunk
  if (rope) {
    float4 const* angles = reinterpret_cast<float4 const*>(rope_at(op_, position)) + 2 * (lane_ - kRopeLane);
    float4 const two[2] = {__ldg(angles), __ldg(angles + 1)};
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float const c = i % 2 ? two[i / 2].z : two[i / 2].x, s = i % 2 ? two[i / 2].w : two[i / 2].y;
      words[i] = turned({x[1][2 * i], x[1][2 * i + 1]}, c, s);
    }
    wide[1] = {words[0], words[1], words[2], words[3]};
  }
  if constexpr (!kPacked) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int const chunk = 32 * half + lane_;
      *reinterpret_cast<uint4*>(shared_.query + chunk / 8 * kLine + wgmma::swizzled(column, chunk % 8)) = wide[half];
    }
  } else {
    float most = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) most = fmaxf(most, fmaxf(fabsf(x[0][i]), rope ? 0.0f : fabsf(x[1][i])));
    // The largest channel becomes less than 2^8.
    int const exponent = max(16, min(240, static_cast<int>(__reduce_max_sync(~0u, __float_as_uint(most)) >> 23)));
    float const scale = __int_as_float((2 * 127 + 7 - exponent) << 23);
    if (lane_ == 0) shared_.query_scale[column] = __int_as_float((exponent - 7) << 23);
    // Rows of a line: the first terms of a warpgroup's columns, their second terms, then those of the next.
    int const at = column + column / (8 * kO) * 8 * kO;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half == 1 && rope) continue;
      uint2 terms[2];
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        float rest[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) rest[i] = x[half][4 * w + i] * scale;
        uint32_t const first = ptx::pack_e4m3(rest[0], rest[1], rest[2], rest[3]);
        uint32_t low, high;
        ptx::e4m3_to_f16(first, low, high);
        float2 const a = ptx::unpack_f16(low), b = ptx::unpack_f16(high);
        uint32_t const second = ptx::pack_e4m3((rest[0] - a.x) / kSecondTerm, (rest[1] - a.y) / kSecondTerm,
                                               (rest[2] - b.x) / kSecondTerm, (rest[3] - b.y) / kSecondTerm);
        (w == 0 ? terms[0].x : terms[0].y) = first;
        (w == 0 ? terms[1].x : terms[1].y) = second;
      }
      int const chunk = 32 * half + lane_;
#pragma unroll
      for (int term = 0; term < 2; ++term) {
        *reinterpret_cast<uint2*>(shared_.query + chunk / 16 * 2 * kLine +
                                  wgmma::swizzled(at + term * 8 * kO, chunk % 16 / 2) + chunk % 2 * 8) = terms[term];
      }
    }
    if (rope) {
      // Beside the last codes: half of the channels with the first terms, half with the second ones.
      int const chunk = lane_ - kRopeLane;
      *reinterpret_cast<uint4*>(shared_.query + 3 * 2 * kLine +
                                wgmma::swizzled(at + chunk / 4 * 8 * kO, 4 + chunk % 4)) = wide[1];
    }
  }
}

}  // namespace redknot::attention
