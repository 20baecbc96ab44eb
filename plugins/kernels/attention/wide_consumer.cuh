#pragma once

// Scores, probabilities and outputs of 64 heads of a row.
//
// Two warpgroups. The first computes the scores of a tile and its probabilities; each sums the output of half of the
// channels. Fragments: g = lane / 4, t = lane % 4; a thread has heads 16 warp + g and + 8, and of every 8 keys or
// channels 2t and 2t + 1. A warp of either group has the same heads, so that probabilities are the register operand of
// the first group; the second reads them from shared memory, with the factors of the sums so far.

#include "common/turn.cuh"
#include "kernels/attention/wide_shared.cuh"

namespace redknot::attention::wide {

// What both warpgroups do with their half of the channels.
template <int kHalf>
class Half {
 public:
  __device__ Half(SegLatentAttentionParams const& op, Shared& shared)
      : op_(op), shared_(shared), warp_(threadIdx.x / 32 % 4), lane_(threadIdx.x % 32), g_(lane_ / 4), t_(lane_ % 4) {}

 protected:
  static constexpr int kQuarter = kHalfChannels / 16;  // tiles of 8 channels that a product sums

  SegLatentAttentionParams const& op_;
  Shared& shared_;
  int const warp_, lane_, g_, t_;
  Turn stage_, exchange_;
  float o_[2][kQuarter][4];  // of 128 channels each

  __device__ __forceinline__ void open(Unit const&) const {}
  __device__ __forceinline__ void announce(Unit const&) const {}

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int n = 0; n < 2 * kQuarter; ++n) {
      auto& sums = tile(n);
      sums[0] = sums[1] = sums[2] = sums[3] = 0;
    }
  }

  // The sums of 8 channels.
  __device__ __forceinline__ float (&tile(int n))[4] { return o_[n / kQuarter][n % kQuarter]; }

  __device__ __forceinline__ void scale(float low, float high) {
#pragma unroll
    for (int n = 0; n < 2 * kQuarter; ++n) {
      auto& sums = tile(n);
      sums[0] *= low, sums[1] *= low;
      sums[2] *= high, sums[3] *= high;
    }
  }

  // The outputs of this warp's heads leave in lines of 64 channels.
  __device__ __forceinline__ void end(Unit const& unit) {
    if constexpr (kHalf == 1) turn_back(narrow(__ldg(op_.positions + unit.row)));
    Rows const rows(op_, unit, static_cast<__nv_bfloat16*>(op_.out_global), static_cast<__nv_bfloat16*>(op_.out_local));
    uint8_t* const lines = shared_.output[4 * kHalf + warp_];
    uint32_t const to = ptx::shared_address(lines);
#pragma unroll
    for (int part = 0; part < kHalfParts; ++part) {
#pragma unroll
      for (int n = 0; n < 8; n += 2) {
        auto const &first = tile(8 * part + n), &second = tile(8 * part + n + 1);
        ptx::store_matrices(to + wgmma::swizzled(lane_ % 16, n + lane_ / 16), ptx::pack_bf16(first[0], first[1]),
                            ptx::pack_bf16(first[2], first[3]), ptx::pack_bf16(second[0], second[1]),
                            ptx::pack_bf16(second[2], second[3]));
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kWarpHeads; i += 4) {
        int const own = i + lane_ / 8, head = kWarpHeads * warp_ + own;
        uint4 const chunk = *reinterpret_cast<uint4 const*>(lines + wgmma::swizzled(own, lane_ % 8));
        auto* const out = rows.at(head) + kHalf * kHalfChannels + part * kPartChannels + 8 * (lane_ % 8);
        if (head < unit.heads) *reinterpret_cast<uint4*>(out) = chunk;
      }
      __syncwarp();
    }
  }

  // Waits for the stage, for the matrix units as well.
  __device__ __forceinline__ void await() const {
    wait(shared_.full[stage_.index], stage_.parity);
    wgmma::publish();
  }

  __device__ __forceinline__ uint64_t values() const {
    return wgmma::transposed_descriptor(
        ptx::shared_address(shared_.keys[stage_.index]) + kHalf * kHalfParts * kPartBytes, kPartBytes);
  }

 private:
  __device__ __forceinline__ void turn_back(int position) {
    constexpr int kFirst = (kHalfChannels - kRopeDim) / 8;
    float2 const* angles = rope_at(op_, position) + t_;
#pragma unroll
    for (int n = kFirst; n < kHalfChannels / 8; ++n) {
      float2 const cs = __ldg(angles + 4 * (n - kFirst));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float const x = tile(n)[2 * h], y = tile(n)[2 * h + 1];
        tile(n)[2 * h] = x * cs.x + y * cs.y;
        tile(n)[2 * h + 1] = y * cs.x - x * cs.y;
      }
    }
  }
};

class Scorer : Half<0> {
  using Base = Half<0>;
  using Base::await, Base::exchange_, Base::g_, Base::lane_, Base::o_, Base::op_, Base::scale, Base::shared_,
      Base::stage_, Base::t_, Base::warp_;

 public:
  using Base::Base, Base::announce, Base::open;

  __device__ __forceinline__ void work(Unit const& unit) {
    base_[0] = base_[1] = kNone;
    total_[0] = total_[1] = 0;
    this->begin();
    wait(shared_.turned, turned_);
    turned_ ^= 1;
    await();
    float s[kKeys / 8][4];
    wgmma::fence();
    score(s);
    wgmma::commit();
    wgmma::wait<0>();
    wgmma::hold(s);
    while (true) {
      bool const last = shared_.last[stage_.index] != 0;
      if (last) arrive(shared_.answered);
      uint32_t p[kKeys / 16][4];
      soften(s, p);
      uint64_t const values = this->values();
      wgmma::fence();
#pragma unroll
      for (int step = 0; step < kKeys / 16; ++step) {
        wgmma::sum_of_registers(o_[0], p[step], wgmma::moved(values, step * 2048));
        wgmma::sum_of_registers(o_[1], p[step], wgmma::moved(values, step * 2048 + 2 * kPartBytes));
      }
      wgmma::commit();
      wgmma::wait<0>();
      wgmma::hold(o_[0]);
      wgmma::hold(o_[1]);
      arrive(shared_.empty[stage_.index]);
      stage_.step();
      if (last) break;
      await();
      wgmma::fence();
      score(s);
      wgmma::commit();
      wgmma::wait<0>();
      wgmma::hold(s);
    }
    finish(unit);
    this->end(unit);
  }

 private:
  int turned_ = 0;            // parity of the next q
  float base_[2], total_[2];  // log2 of what probabilities are relative to; sums of this thread's keys

  // In log2 units.
  __device__ __forceinline__ float sink(Unit const& unit, int i) const {
    return sink_of(op_, unit.head + min(16 * warp_ + 8 * i + g_, unit.heads - 1));
  }

  __device__ __forceinline__ void score(float (&s)[kKeys / 8][4]) const {
    uint64_t const query = wgmma::descriptor(ptx::shared_address(shared_.query));
    uint64_t const keys = wgmma::descriptor(ptx::shared_address(shared_.keys[stage_.index]));
    wgmma::first_scores(s, query, keys);
#pragma unroll
    for (int step = 1; step < kHeadDim / 16; ++step) {
      int const by = step / 4 * kPartBytes + step % 4 * 32;
      wgmma::Product<kKeys, true>::multiply(s, wgmma::moved(query, by), wgmma::moved(keys, by), true);
    }
  }

  // Hides keys that do not exist.
  __device__ __forceinline__ void mask(float (&s)[kKeys / 8][4], uint2 absent) const {
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
      uint32_t const bits = (n < 4 ? absent.x : absent.y) >> (n % 4 * 8 + 2 * t_);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (bits >> i & 1) s[n][i] = s[n][i + 2] = kNone;
      }
    }
  }

  // Where some score is far above its head's base, bases are found anew; whether any was, and factors of the sums.
  __device__ __forceinline__ bool rebase(float const (&s)[kKeys / 8][4], float (&factor)[2]) {
    float most[2] = {kNone, kNone};
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) most[i] = fmaxf(most[i], fmaxf(s[n][2 * i], s[n][2 * i + 1]));
    }
    bool const grown = most[0] * kScoreScale > base_[0] + kPeakSlack || most[1] * kScoreScale > base_[1] + kPeakSlack;
    if (!__any_sync(~0u, grown)) return false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], 1));
      most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], 2));
      float const base = fmaxf(base_[i], most[i] * kScoreScale);
      factor[i] = base == kNone ? 1.0f : ptx::exp2_fast(base_[i] - base);
      base_[i] = base;
      total_[i] *= factor[i];
    }
    return true;
  }

  // Scores to probabilities, for this group and, through shared memory, for the other.
  __device__ __forceinline__ void soften(float (&s)[kKeys / 8][4], uint32_t (&p)[kKeys / 16][4]) {
    uint2 const absent = *reinterpret_cast<uint2 const*>(shared_.absent[stage_.index]);
    if ((absent.x | absent.y) != 0) mask(s, absent);
    float factor[2] = {1, 1};
    bool const shrinks = rebase(s, factor);
    if (shrinks) scale(factor[0], factor[1]);
    float const less[2] = {base_[0] == kNone ? 0.0f : base_[0], base_[1] == kNone ? 0.0f : base_[1]};
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] = ptx::exp2_fast(fmaf(s[n][i], kScoreScale, -less[i / 2]));
      total_[0] += s[n][0] + s[n][1];
      total_[1] += s[n][2] + s[n][3];
      p[n / 2][n % 2 * 2] = ptx::pack_bf16(s[n][0], s[n][1]);
      p[n / 2][n % 2 * 2 + 1] = ptx::pack_bf16(s[n][2], s[n][3]);
    }
    uint32_t const to = ptx::shared_address(shared_.probabilities[exchange_.index]);
    wait(shared_.summed[exchange_.index], exchange_.parity ^ 1);
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      ptx::store_matrices(to + wgmma::swizzled(16 * warp_ + lane_ % 16, 2 * step + lane_ / 16), p[step][0], p[step][1],
                          p[step][2], p[step][3]);
    }
    give(factor, shrinks);
  }

  __device__ __forceinline__ void give(float const (&factor)[2], bool shrinks) {
    if (shrinks && t_ == 0) {
      shared_.factor[exchange_.index][16 * warp_ + g_] = factor[0];
      shared_.factor[exchange_.index][16 * warp_ + 8 + g_] = factor[1];
    }
    if (lane_ == 0) shared_.shrinks[exchange_.index][warp_] = shrinks;
    wgmma::publish();
    arrive(shared_.scored[exchange_.index]);
    exchange_.step();
  }

  // What the sums are multiplied by at the end; the sink enters the denominator here.
  __device__ __forceinline__ void finish(Unit const& unit) {
    float const sinks[2] = {sink(unit, 0), sink(unit, 1)};
    float factor[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float total = total_[i];
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      float const peak = fmaxf(base_[i], sinks[i]), shrink = ptx::exp2_fast(base_[i] - peak);
      factor[i] = base_[i] == kNone ? 0.0f : shrink / (total * shrink + ptx::exp2_fast(sinks[i] - peak));
    }
    wait(shared_.summed[exchange_.index], exchange_.parity ^ 1);
    give(factor, true);
    scale(factor[0], factor[1]);
  }
};

class Summer : Half<1> {
  using Base = Half<1>;
  using Base::await, Base::exchange_, Base::g_, Base::o_, Base::op_, Base::scale, Base::shared_, Base::stage_,
      Base::warp_;

 public:
  using Base::Base, Base::announce, Base::open;

  __device__ __forceinline__ void work(Unit const& unit) {
    this->begin();
    turn_query(narrow(__ldg(op_.positions + unit.row)));
    bool last = false;
    while (!last) {
      await();
      last = shared_.last[stage_.index] != 0;
      take();
      uint64_t const values = this->values();
      uint64_t const p = wgmma::descriptor(ptx::shared_address(shared_.probabilities[exchange_.index]));
      wgmma::fence();
#pragma unroll
      for (int step = 0; step < kKeys / 16; ++step) {
        wgmma::sum_of_shared(o_[0], wgmma::moved(p, step * 32), wgmma::moved(values, step * 2048));
        wgmma::sum_of_shared(o_[1], wgmma::moved(p, step * 32), wgmma::moved(values, step * 2048 + 2 * kPartBytes));
      }
      wgmma::commit();
      wgmma::wait<0>();
      wgmma::hold(o_[0]);
      wgmma::hold(o_[1]);
      arrive(shared_.summed[exchange_.index]);
      arrive(shared_.empty[stage_.index]);
      exchange_.step();
      stage_.step();
    }
    take();
    arrive(shared_.summed[exchange_.index]);
    exchange_.step();
    this->end(unit);
  }

 private:
  int queried_ = 0;  // parity of the next q

  // Turns the rope channels of q by the row's position; two threads a head.
  __device__ __forceinline__ void turn_query(int position) {
    int const head = threadIdx.x % kGroupThreads / 2, half = threadIdx.x % 2;
    auto const* const angles = reinterpret_cast<float4 const*>(rope_at(op_, position)) + 8 * half;
    uint8_t* const part = shared_.query + (kParts - 1) * kPartBytes;
    float4 pairs[4][2];
#pragma unroll
    for (int i = 0; i < 8; ++i) pairs[i / 2][i % 2] = __ldg(angles + i);
    wait(shared_.queried, queried_);
    queried_ ^= 1;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      auto* const at = reinterpret_cast<uint4*>(part + wgmma::swizzled(head, 4 * half + i));
      *at = turned(*at, pairs[i], 1.0f);
    }
    wgmma::publish();
    arrive(shared_.turned);
  }

  // Waits for probabilities and multiplies the sums so far by their factors.
  __device__ __forceinline__ void take() {
    wait(shared_.scored[exchange_.index], exchange_.parity);
    if (shared_.shrinks[exchange_.index][warp_] == 0) return;
    float const* factor = shared_.factor[exchange_.index] + 16 * warp_ + g_;
    scale(factor[0], factor[8]);
  }
};

}  // namespace redknot::attention::wide
