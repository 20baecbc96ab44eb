#pragma once

// From probabilities and keys to the outputs of a unit.

#include "kernels/attention/worker.cuh"

namespace redknot::attention {

// Codes of this warp's channels of a block, transposed, to its place.
template <typename T, int kGroup>
__device__ __forceinline__ void Worker<T, kGroup>::load_codes(int block, Codes& codes) const {
  uint32_t const at =
      lines(block / 4) + (key_place(lane_, 16 * warp_) ^ (block % 2 * 64)) + block % 4 / 2 * kLineStride;
  ptx::load_matrices_transposed(codes[block % 2][0], at);
  ptx::load_matrices_transposed(codes[block % 2][1], at + 32 * kLineBytes);
}

// The same of the rope channels, which take the place of two blocks.
template <typename T, int kGroup>
__device__ __forceinline__ void Worker<T, kGroup>::load_rope(Codes& codes) const {
  // Chunks 2 warp and 2 warp + 1 of the rope channels.
  int const key = lane_ / 16 * 8 + lane_ % 8, chunk = 2 * (warp_ % 2) + lane_ / 8 % 2;
  uint32_t const at = warp_ < 2 ? lines(1) + kLineStride + wgmma::swizzled(key, 4 + chunk)
                                : tails_ + wgmma::swizzled(key, tail_chunk<T>(team_, cursor_.stage) + chunk);
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    ptx::load_matrices_transposed(codes[step / 2][step % 2], at + 16 * step * kLineBytes);
  }
}

// Adds the probabilities times the latents to this group's blocks of the output. Codes that are loaded ahead begin with
// its first block's.
template <typename T, int kGroup>
__device__ __forceinline__ void Worker<T, kGroup>::accumulate(Codes& codes) {
  if constexpr (T::kGroups == 2) release(1 - kGroup);
  if constexpr (!kPacked) {
    uint64_t const keys[2] = {wgmma::descriptor(lines(0)), wgmma::descriptor(lines(1))};
    uint64_t const p = wgmma::descriptor(ptx::shared_address(shared_.probabilities[0]));
    wgmma::fence();
#pragma unroll
    for (int c = 0; c < T::kOwn; ++c) {
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        WideSum::multiply_transposed(
            o_[c], keys[block_of(c) / 4] + ((block_of(c) % 4 * kLineStride + 16 * step * kLineBytes) >> 4),
            p + step * (32 >> 4), true);
      }
      if (block_of(c) % (kBlocks / 2) == kBlocks / 2 - 1) wgmma::commit();
    }
    if constexpr (T::kGroups == 1) {
      wgmma::wait<1>();
      release(0);
    }
    wgmma::wait<0>();
    release(T::kGroups == 1 ? 1 : kGroup);
  } else {
    uint32_t a[kBuffers][4][4];
#pragma unroll
    for (int c = 0; c < T::kOwn; ++c) {
      int const block = block_of(c);
      uint32_t (&fragments)[4][4] = a[c % kBuffers];
      if (kCodesAhead ? c + 1 < T::kOwn && !is_wide(block + 1) : !is_wide(block)) {
        load_codes(block + (kCodesAhead ? 1 : 0), codes);
      }
      if (!is_wide(block)) {
#pragma unroll
        for (int step = 0; step < 4; ++step) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            // Bytes (key 2t: channel 2g, 2g + 1), (key 2t + 1: the same) become two channels of two keys.
            uint32_t const pair = __byte_perm(codes[block % 2][step / 2][2 * (step % 2) + h], 0, 0x3120);
            ptx::e4m3_to_f16(pair, fragments[step][2 * h], fragments[step][2 * h + 1]);
          }
        }
      }
      if (kRopeAhead ? c + 1 < T::kOwn && is_wide(block + 1) : is_wide(block)) load_rope(codes);
      uint64_t const p = wgmma::descriptor(ptx::shared_address(shared_.probabilities[block]));
      wgmma::fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        if (is_wide(block)) {
          WideSum::multiply_registers(o_[c], codes[step / 2][step % 2], p + step * (32 >> 4), true);
        } else {
          HalfSum::multiply_registers(o_[c], fragments[step], p + step * (32 >> 4), true);
        }
      }
      wgmma::commit();
      if (block % (kBlocks / 2) == kBlocks / 2 - 1) release(block / (kBlocks / 2));
      wgmma::wait<kBuffers - 1>();
    }
    wgmma::wait<0>();
  }
}

template <typename T, int kGroup>
__device__ __forceinline__ void Worker<T, kGroup>::finish() {
  // The sums of all warps; then what the output is multiplied by.
#pragma unroll
  for (int n = 0; n < kO; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float total = sum_[n][i];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) total += __shfl_xor_sync(~0u, total, step);
      if (g_ == 0) shared_.peak[warp_][column_of(n, i)] = total;
    }
  }
  meet();
  float factor[kO][2];
#pragma unroll
  for (int n = 0; n < kO; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const column = column_of(n, i);
      float const total =
          shared_.peak[0][column] + shared_.peak[1][column] + shared_.peak[2][column] + shared_.peak[3][column];
      float const sink = shared_.sink[column], peak = fmaxf(base_[n][i], sink);
      float const scale = ptx::exp2_fast(base_[n][i] - peak);
      bool const any = shared_.column_row[column] >= 0 && base_[n][i] != kNone;
      factor[n][i] = any ? scale / (total * scale + ptx::exp2_fast(sink - peak)) : 0;
    }
  }
  if constexpr (T::kGroups == 2) {
    if (warp_ == 0 && g_ == 0) {
#pragma unroll
      for (int n = 0; n < kO; ++n) {
        *reinterpret_cast<float2*>(&shared_.factor[column_of(n, 0)]) = {factor[n][0], factor[n][1]};
      }
    }
    meet();
  }
  // Outputs as bf16 [column][channel] in the place of q, so that they leave in whole lines.
  static_assert(sizeof(shared_.query) >= T::kColumns * kHeadDim * 2);
  float const power = kPacked ? exp2f(static_cast<float>(largest_ - 127 - kScaleHeadroom)) : 1;
  uint8_t* const staging = shared_.query;
  auto const place = [&](int column, int channel) {
    return staging + column * 2 * kHeadDim + ((channel / 8 ^ (column & 7)) << 4) + channel % 8 * 2;
  };
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    float2 by;
    if constexpr (T::kGroups == 1) {
      by = {factor[n][0], factor[n][1]};
    } else {
      by = *reinterpret_cast<float2 const*>(&shared_.factor[8 * n + 2 * t_]);
    }
#pragma unroll
    for (int c = 0; c < T::kOwn; ++c) {
      int const block = block_of(c), first = block * kBlockChannels + 16 * warp_;
      float v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        v[i] = o_[c][n][i] * (i & 1 ? by.y : by.x) * (is_wide(block) ? 1.0f : power);
      }
      if (!is_wide(block)) {
        // Rows g and g + 8 of the fragment are channels 2g and 2g + 1.
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          *reinterpret_cast<uint32_t*>(place(8 * n + 2 * t_ + i, first + 2 * g_)) = ptx::pack_bf16(v[i], v[i + 2]);
        }
        continue;
      }
      if (block == kBlocks - 1) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          int const row = max(shared_.column_row[8 * n + 2 * t_ + (i & 1)], 0);
          float2 const cs = __ldg(rope_at(op_, shared_.row_position[row]) + (16 * warp_ + 8 * (i / 2) + g_) / 2);
          float const pair = __shfl_xor_sync(~0u, v[i], 4);
          v[i] = v[i] * cs.x + (g_ & 1 ? -pair : pair) * cs.y;
        }
      }
      ptx::store_matrices_transposed(ptx::shared_address(place(8 * n + lane_ % 8, first + lane_ / 8 % 2 * 8)),
                                     ptx::pack_bf16(v[0], v[1]), ptx::pack_bf16(v[2], v[3]));
    }
  }
  meet();
  constexpr int kChunks = kHeadDim / 8;
#pragma unroll 4
  for (int index = thread_; index < T::kColumns * kChunks; index += T::kWorkers) {
    int const column = index / kChunks, chunk = index % kChunks;
    int const row = shared_.column_row[column];
    if (row < 0) continue;
    auto* const out = column_pointer(op_, unit_, row, column, static_cast<__nv_bfloat16*>(op_.out_global),
                                     static_cast<__nv_bfloat16*>(op_.out_local));
    __stcs(reinterpret_cast<uint4*>(out + 8 * chunk), *reinterpret_cast<uint4 const*>(place(column, 8 * chunk)));
  }
}

}  // namespace redknot::attention
