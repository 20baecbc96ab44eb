#pragma once

// Channels of a packed latent as bf16, each its code times its block's scale, rounded once.

#include "common/dtype.h"
#include "common/packing.cuh"

namespace redknot {

// What a lane of a warp reads of a packed latent: two chunks of eight channels, kWarp chunks apart.
class LatentChunks {
 public:
  static constexpr int kCount = 2;

  __device__ __forceinline__ void load(uint8_t const* row, int lane) {
    auto const* const words = reinterpret_cast<uint2 const*>(row);
    bool const rope = has_rope(lane);
    int const second = kWarp + lane;  // whose rope channels take two words each
    scales_ = __ldg(words + kLatentScaleOffset / 8);
    low_[0] = __ldg(words + lane);
    low_[1] = __ldg(words + second + (rope ? second - kRopeChunk : 0));
    high_ = rope ? __ldg(words + 2 * second - kRopeChunk + 1) : uint2{};
  }

  // Chunk kWarp * `i` + `lane`.
  __device__ __forceinline__ uint4 chunk(int i, int lane) const {
    if (i == 1 && has_rope(lane)) return {low_[1].x, low_[1].y, high_.x, high_.y};
    constexpr int kBlockChunks = kLatentBlock / kVector;
    static_assert(kWarp == 4 * kBlockChunks, "a word holds the scales of the warp's chunks");
    uint32_t const exponent = (i == 0 ? scales_.x : scales_.y) >> (8 * (lane / kBlockChunks)) & 0xffU;
    float values[kVector];
    // ue8m0 has no infinity: its last code is no number.
    decode_e4m3(low_[i], __uint_as_float(exponent == 0xffU ? 0x7fc00000U : exponent << 23), values);
    return pack_bf16(values);
  }

 private:
  static constexpr int kRopeChunk = kNopeDim / kVector;
  static_assert(kCount * kWarp * kVector == kHeadDim && kRopeChunk >= kWarp && kLatentScaleOffset % 8 == 0);

  static __device__ __forceinline__ bool has_rope(int lane) { return kWarp + lane >= kRopeChunk; }

  uint2 low_[kCount], high_;
  uint2 scales_;
};

}  // namespace redknot
