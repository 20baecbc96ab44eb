#pragma once

// Fills the stages with keys as bf16: packed ones are decoded on the way.

#include "kernels/attention/wide_shared.cuh"

namespace redknot::attention::wide {

// Exponents and mantissas of two codes, in their places in bf16: 2^-120 of their values, subnormal ones included.
inline constexpr uint32_t kMagnitudes = 0x07f007f0u;
inline constexpr uint32_t kSigns = 0x80008000u;
inline constexpr int kCodeBias = 120;

// Eight codes times 2^120 and their block's scale, exactly. The two inner channels of every four change places
// (`exchange_inner` does the same to q and to the output). `most` collects the largest magnitudes.
__device__ __forceinline__ void decode_four(uint32_t codes, uint32_t scale, uint32_t& even, uint32_t& odd,
                                            uint32_t& most) {
  uint32_t const low = codes << 4 & kMagnitudes, high = codes >> 4 & kMagnitudes;
  most = __vimax3_u16x2(most, low, high);
  even = ptx::multiply_bf16((codes << 8 & kSigns) | low, scale);
  odd = ptx::multiply_bf16((codes & kSigns) | high, scale);
}

__device__ __forceinline__ uint4 decode(uint2 codes, uint32_t scale, uint32_t& most) {
  uint4 channels;
  decode_four(codes.x, scale, channels.x, channels.y, most);
  decode_four(codes.y, scale, channels.z, channels.w, most);
  return channels;
}

// A warp that fills 8 rows of every stage. Lanes look for keys, then half a warp takes a key.
template <bool kPacked>
class Producer {
 public:
  __device__ Producer(Launch const& launch, Shared& shared)
      : op_(launch.op),
        shared_(shared),
        keys_(launch.op, shared.table, kPacked ? kPackedLatentBytes : 2 * kHeadDim),
        warp_(ptx::found_anew(threadIdx.x / 32 % kProducerWarps)),
        lane_(ptx::found_anew(threadIdx.x % 32)),
        codes_(at(lane_ / 8 % 2, warp_ * kWarpKeys + lane_ / 16, lane_ % 8)),
        mixed_(at(kRopePart - 1, warp_ * kWarpKeys + lane_ / 8 % 2 * 2 + lane_ / 16, lane_ % 8)),
        rope_(at(kRopePart, warp_ * kWarpKeys + lane_ / 16, lane_ % 16 / 2) + lane_ % 2 * 8) {}

  // Finds the keys of a unit.
  __device__ __forceinline__ void open(Unit const& unit) {
    row_ = unit.row;
    ptx::sync_threads(kProducersMeet, kProducers);  // the table is used no more
    if (warp_ == 0) enter();
    ptx::sync_threads(kProducersMeet, kProducers);
    window_tiles_ = shared_.window_tiles;
  }

  // The unit after this one: its q comes nearer.
  __device__ __forceinline__ void announce(Unit const& unit) const {
    int const head = thread() / 4;
    if (head >= unit.heads) return;
    Rows const rows(op_, unit, static_cast<__nv_bfloat16 const*>(op_.q_global),
                    static_cast<__nv_bfloat16 const*>(op_.q_local));
#pragma unroll
    for (int line = 0; line < 2; ++line) ptx::prefetch(rows.at(head) + (thread() % 4 * 2 + line) * 64);
  }

  __device__ __forceinline__ void work(Unit const&) {
    int const tiles = shared_.tiles;
    if (tiles == 0) {
      fill_nothing();
    } else if constexpr (kPacked) {
      decode_tiles(tiles);
    } else {
      copy_tiles(tiles);
    }
  }

 private:
  static constexpr int kQuads = kWarpKeys / 4;  // of keys
  static constexpr int kQuadLoads = 9;          // of 8 bytes a lane
  static constexpr int kRopePart = kParts - 1;
  static constexpr uint32_t kNanMagnitude = 0x07f0;
  // The largest exponent that a scale times 2^120 may have; `mend` adds the rest.
  static constexpr int kMostExponent = 254 - kCodeBias;

  // This lane's key of a tile; lanes from 8 on know the same keys as lanes 0 to 7.
  struct Found {
    uint64_t latent;
    int frame;
    uint32_t absent;  // of the warp's keys
  };

  SegLatentAttentionParams const& op_;
  Shared& shared_;
  Keys<KeyTable<1, 32>> keys_;
  int const warp_, lane_;
  // Where this lane's codes, its codes of word 6 and its rope channels of a warp's first keys lie in a stage.
  int const codes_, mixed_, rope_;
  int row_ = 0;
  int window_tiles_ = 0;
  Turn turn_;

  __device__ __forceinline__ void enter() {
    int64_t const segments = op_.segment_count;
    auto const segment = [&](int which) {
      return static_cast<int>(max(int64_t{0}, min(segments, __ldg(op_.row_segments + 2 * int64_t{row_} + which))));
    };
    keys_.enter(0, 1, narrow(__ldg(op_.positions + row_)), narrow(__ldg(op_.visible + row_)), segment(0), segment(1),
                lane_);
    if (lane_ != 0) return;
    Group const& group = shared_.table.group;
    bool const empty = op_.latent_rows == 0 || group.segments == 0;
    int const entries = op_.entries == nullptr || op_.entry_rows == 0 ? 0
                        : op_.selected != nullptr                     ? op_.top_k
                                                                      : group.most_visible;
    int const window_tiles = (group.window_slots + kKeys - 1) / kKeys;
    shared_.window_tiles = window_tiles;
    shared_.tiles = empty ? 0 : window_tiles + (entries + kKeys - 1) / kKeys;
  }

  __device__ __forceinline__ int place() const { return warp_ * kWarpKeys + lane_ % kWarpKeys; }
  __device__ __forceinline__ static int thread() { return threadIdx.x % kProducers; }

  // The selected entry that `look` will need, -1 for none.
  __device__ __forceinline__ int announce(int tile) const {
    int const number = (tile - window_tiles_) * kKeys + place();
    if (op_.selected == nullptr || number < 0 || number >= op_.top_k) return -1;
    int64_t const entry = __ldg(op_.selected + int64_t{row_} * op_.top_k + number);
    return static_cast<int>(max(int64_t{-1}, min(entry, int64_t{INT32_MAX})));
  }

  __device__ __forceinline__ Key resolve(int tile, int selected) const {
    Group const& group = shared_.table.group;
    if (tile < window_tiles_) return keys_.in_window(tile * kKeys + place());
    if (op_.selected != nullptr) {
      // Entries that the row does not see yet are dropped.
      int64_t const limit = int64_t{group.first_entry} + group.most_visible;
      if (selected < group.first_entry || selected >= limit) return keys_.none();
      return keys_.at_entry(selected, 0);
    }
    int const x = (tile - window_tiles_) * kKeys + place();
    return x < group.most_visible ? keys_.at_entry(group.first_entry + x, x) : keys_.none();
  }

  __device__ __forceinline__ Found look(int tile, int selected) const {
    Key const key = resolve(tile, selected);
    return {reinterpret_cast<uint64_t>(key.latent), key.frame, __ballot_sync(~0u, key.x == kNoKey)};
  }

  // Turns exponents of scales to those times 2^120, cut off at kMostExponent; whether that changed some key's.
  __device__ __forceinline__ static bool bias(uint2& exponents) {
    constexpr uint32_t kEven = 0x00ff00ffu, kAll = 0x01010101u;
    uint32_t const x = exponents.x, y = exponents.y & 0x00ffffffu;
    uint32_t const most = __vimax3_u16x2(__vmaxu2(x & kEven, x >> 8 & kEven), y & kEven, y >> 8 & kEven);
    bool const large = __any_sync(~0u, max(most & 0xffff, most >> 16) > kMostExponent);
    exponents = large ? uint2{__vminu4(x, kMostExponent * kAll), __vminu4(y, kMostExponent * kAll)} : uint2{x, y};
    exponents.x += kCodeBias * kAll;
    exponents.y += kCodeBias * kAll;
    return large;
  }

  // Waits for a stage and says what will be in it.
  __device__ __forceinline__ void open(uint32_t absent, bool last) {
    wait(shared_.empty[turn_.index], turn_.parity ^ 1);
    if (lane_ == 0) shared_.absent[turn_.index][warp_] = static_cast<uint8_t>(absent);  // of lanes 0 to 7
    if (thread() == 0) shared_.last[turn_.index] = last;
  }
  __device__ __forceinline__ void close() {
    wgmma::publish();
    arrive(shared_.full[turn_.index]);
    turn_.step();
  }

  __device__ __forceinline__ void fill_nothing() {
    open(~0u, true);
    auto* const to = reinterpret_cast<uint4*>(shared_.keys[turn_.index]);
    for (int i = thread(); i < kParts * kPartBytes / 16; i += kProducers) to[i] = uint4{};
    close();
  }

  // A quad of a tile, as a lane reads it. The first half of a warp takes the first key of either pair, the second the
  // second. Words 0 to 2 and 3 to 5 are 8 codes of the pairs' keys, 128 bytes apart; word 6 is 8 of the last 64 codes,
  // of the first pair in the lanes with own < 8, else of the second pair; words 7 and 8 are four rope channels.
  struct Quad {
    uint64_t latent;  // of this lane's key
    int first;        // key of the quad
  };
  __device__ __forceinline__ uint8_t const* of_pair(Quad const& quad, int pair) const {
    int const lane = ptx::found_anew(lane_);  // registers are few: nothing is held that is soon made
    uint64_t const latent = __shfl_sync(~0u, quad.latent, quad.first + 2 * pair + lane / 16);
    return reinterpret_cast<uint8_t const*>(latent) + lane % 16 * 8;
  }
  __device__ __forceinline__ uint8_t const* of_both(Quad const& quad) const {
    int const lane = ptx::found_anew(lane_);
    uint64_t const latent = __shfl_sync(~0u, quad.latent, quad.first + lane / 8 % 2 * 2 + lane / 16);
    return reinterpret_cast<uint8_t const*>(latent) + kNopeDim - kLatentBlock + lane % 8 * 8;
  }

  __device__ __forceinline__ void decode_tiles(int tiles) {
    auto const exponents_of = [](Found const& key) {
      return ptx::load_8(reinterpret_cast<uint8_t const*>(key.latent) + kLatentScaleOffset);
    };
    uint2 words[kQuadLoads];
    Found next = look(0, announce(0));
    int selected = announce(1);
    Quad const first{next.latent, 0};
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      uint8_t const* from = of_pair(first, pair);
#pragma unroll
      for (int i = 0; i < 3; ++i) words[3 * pair + i] = ptx::load_8(from + 128 * i);
      words[7 + pair] = ptx::load_8(from + kNopeDim);
    }
    words[6] = ptx::load_8(of_both(first));
    uint2 exponents = exponents_of(next);  // of this lane's key: biased, of the block scales
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      Found const found = next;
      bool const more = tile + 1 < tiles;
      if (more) {
        next = look(tile + 1, selected);
        selected = announce(tile + 2);
      }
      uint2 scales = exponents;
      bool const large = bias(scales), turned = __any_sync(~0u, found.frame != 0);
      open(found.absent, !more);
      uint32_t const stage = ptx::shared_address(shared_.keys[turn_.index]);
      uint32_t most = 0;
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        bool const inside = quad + 1 < kQuads;
        Quad const coming{inside ? found.latent : next.latent, inside ? 4 * (quad + 1) : 0};
        store_quad(scales, quad, words, coming, inside || more, stage, most);
      }
      bool const nan = __any_sync(~0u, max(most & 0xffff, most >> 16) == kNanMagnitude);
      if (turned) turn(found.frame, stage);
      if (large || nan) mend(exponents, shared_.keys[turn_.index]);
      close();
      if (more) exponents = exponents_of(next);
    }
  }

  // Where chunk `chunk` of 8 channels of part `part` lies in a stage.
  static __device__ __forceinline__ int at(int part, int key, int chunk) {
    return part * kPartBytes + static_cast<int>(wgmma::swizzled(key, chunk));
  }
  // The same chunk of a key `keys` further on, among eight, where the sum of both has no carry.
  static __device__ __forceinline__ uint32_t further(uint32_t place, int keys) {
    return (place ^ keys << 4) + keys * 128;
  }

  // A block's scale, the lowest byte of `exponents`, as a pair of bf16.
  static __device__ __forceinline__ uint32_t scale_at(uint32_t exponents) { return (exponents & 0xff) * 0x00800080u; }

  // Decodes the words of a quad; as each is done, that of the quad that comes next is asked for.
  __device__ __forceinline__ void store_quad(uint2 exponents, int quad, uint2 (&words)[kQuadLoads], Quad const& coming,
                                             bool comes, uint32_t stage, uint32_t& most) const {
    uint32_t last[2];
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      int const lane = ptx::found_anew(lane_), keys = 4 * quad + 2 * pair, key = keys + lane / 16, shift = lane & 8;
      uint32_t const low = __shfl_sync(~0u, exponents.x, key) >> shift;
      uint32_t const high = __shfl_sync(~0u, exponents.y, key);
      last[pair] = high >> 16;
      uint32_t const scales[3] = {scale_at(low), scale_at(low >> 16), scale_at(high >> shift)};
      uint32_t const to = further(stage + codes_, keys);
      uint8_t const* from = of_pair(coming, pair);
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        int const word = 3 * pair + i;
        ptx::store_16(to + 2 * i * kPartBytes, decode(words[word], scales[i], most));
        ptx::load_8_if(comes, words[word], from + 128 * i);
      }
      ptx::store_8(further(stage + rope_, keys), words[7 + pair]);
      ptx::load_8_if(comes, words[7 + pair], from + kNopeDim);
    }
    uint32_t const scale = scale_at((ptx::found_anew(lane_) & 8) == 0 ? last[0] : last[1]);
    ptx::store_16(further(stage + mixed_, 4 * quad), decode(words[6], scale, most));
    ptx::load_8_if(comes, words[6], of_both(coming));
  }

  // What is rare is set right afterwards: NaN codes were taken for 480, which no other code is; scales were cut off.
  __device__ __forceinline__ void mend(uint2 exponents, uint8_t* stage) const {
    __syncwarp();
#pragma unroll 1
    for (int index = 0; index < kWarpKeys * (kNopeDim / 8); index += 32) {
      int const key = (index + lane_) / (kNopeDim / 8), chunk = (index + lane_) % (kNopeDim / 8), block = chunk / 8;
      uint32_t const x = __shfl_sync(~0u, exponents.x, key), y = __shfl_sync(~0u, exponents.y, key);
      int const exponent = static_cast<int>((block < 4 ? x : y) >> (8 * (block % 4)) & 0xff);
      int const cut = min(exponent, kMostExponent);
      float const nan = 480 * exp2f(static_cast<float>(cut - 127)), more = exp2f(static_cast<float>(exponent - cut));
      auto* const words = reinterpret_cast<uint32_t*>(stage + at(block, warp_ * kWarpKeys + key, chunk % 8));
#pragma unroll 1
      for (int i = 0; i < 4; ++i) {
        float2 x2 = ptx::unpack_bf16(words[i]);
        x2.x = fabsf(x2.x) == nan ? NAN : x2.x * more;
        x2.y = fabsf(x2.y) == nan ? NAN : x2.y * more;
        words[i] = ptx::pack_bf16(x2.x, x2.y);
      }
    }
  }

  // Turns the rope channels of this warp's keys by their frames; half a warp a key, four channels a lane.
  __device__ __forceinline__ void turn(int frames, uint32_t stage) const {
    __syncwarp();
    float const inverse = 1.0f / __ldg(op_.rope);  // a constant factor of the table must not count twice
#pragma unroll
    for (int keys = 0; keys < kWarpKeys; keys += 2) {
      int const lane = ptx::found_anew(lane_), frame = __shfl_sync(~0u, frames, keys + lane / 16);
      uint32_t const at = further(stage + rope_, keys);
      float4 const angles = __ldg(reinterpret_cast<float4 const*>(rope_at(op_, frame)) + lane % 16);
      uint2 const rope = ptx::load_shared_8(at);
      float2 const x = ptx::unpack_bf16(rope.x), y = ptx::unpack_bf16(rope.y);
      float const c[2] = {angles.x * inverse, angles.z * inverse}, s[2] = {angles.y * inverse, angles.w * inverse};
      uint2 const turned{ptx::pack_bf16(x.x * c[0] - x.y * s[0], x.y * c[0] + x.x * s[0]),
                         ptx::pack_bf16(y.x * c[1] - y.y * s[1], y.y * c[1] + y.x * s[1])};
      if (frame != 0) ptx::store_8(at, turned);
    }
  }

  __device__ __forceinline__ void copy_tiles(int tiles) {
    int selected = announce(0);
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      Found const found = look(tile, selected);
      selected = announce(tile + 1);
      bool const turned = __any_sync(~0u, found.frame != 0);
      open(found.absent, tile + 1 == tiles);
      uint32_t const stage = ptx::shared_address(shared_.keys[turn_.index]);
      copy(found, stage);
      ptx::barrier_arrive_after_copies(ptx::shared_address(&shared_.full[turn_.index]));
      if (turned) {
        ptx::copy_commit();
        ptx::copy_wait<0>();
        turn(found.frame, stage);
      }
      close();
    }
  }

  // A warp a key, 16 bytes a lane.
  __device__ __forceinline__ void copy(Found const& found, uint32_t stage) const {
#pragma unroll 4
    for (int i = 0; i < kWarpKeys; ++i) {
      int const key = warp_ * kWarpKeys + i;
      auto const* from = reinterpret_cast<uint8_t const*>(__shfl_sync(~0u, found.latent, i)) + 16 * lane_;
      uint32_t const to = stage + at(lane_ / 8, key, lane_ % 8);
      ptx::copy_async_16(to, from);
      ptx::copy_async_16(to + kHalfParts * kPartBytes, from + 512);
    }
  }
};

}  // namespace redknot::attention::wide
