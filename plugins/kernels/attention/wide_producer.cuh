#pragma once

// Fills the stages with keys.

#include "kernels/attention/wide_shared.cuh"

namespace redknot::attention::wide {

// A warp that fills 8 rows of every stage. Lanes look for keys, then all lanes copy one.
class Producer {
 public:
  __device__ Producer(Launch const& launch, Shared& shared)
      : op_(launch.op),
        shared_(shared),
        keys_(launch.op, shared.table, 2 * kHeadDim),
        warp_(ptx::found_anew(threadIdx.x / 32 % kProducerWarps)),
        lane_(ptx::found_anew(threadIdx.x % 32)) {}

  // Finds the keys of a unit.
  __device__ __forceinline__ void open(Unit const& unit) {
    row_ = unit.row;
    ptx::sync_threads(kProducersMeet, kProducers);  // the table is used no more
    if (warp_ == 0) enter();
    ptx::sync_threads(kProducersMeet, kProducers);
    window_tiles_ = shared_.tiles.windows;
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

  __device__ __forceinline__ void work(Unit const& unit) {
    int const tiles = shared_.tiles.all;
    if (tiles == 0) {
      fill_nothing();
      copy_query(unit);
    } else {
      copy_tiles(unit, tiles);
    }
  }

 private:
  static constexpr int kRopePart = kParts - 1;

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
  int row_ = 0;
  int window_tiles_ = 0;
  Turn turn_;
  int parity_ = 0;  // of the copies of q

  __device__ __forceinline__ void enter() {
    auto const segment = [&](int which) { return segment_bound(op_, row_, which); };
    keys_.enter(0, 1, narrow(__ldg(op_.positions + row_)), narrow(__ldg(op_.visible + row_)), segment(0), segment(1),
                lane_);
    if (lane_ == 0) shared_.tiles = keys_.tiles(kKeys);
  }

  __device__ __forceinline__ int place() const { return warp_ * kWarpKeys + lane_ % kWarpKeys; }
  __device__ __forceinline__ static int thread() { return threadIdx.x % kProducers; }

  // The selected entry that `look` will need.
  __device__ __forceinline__ int announce(int tile) const {
    return keys_.announce(row_, (tile - window_tiles_) * kKeys + place());
  }

  __device__ __forceinline__ Found look(int tile, int selected) const {
    int const number = (tile - window_tiles_) * kKeys + place();
    Key const key = tile < window_tiles_ ? keys_.in_window(tile * kKeys + place()) : keys_.entry(number, selected);
    return {reinterpret_cast<uint64_t>(key.latent), key.frame, __ballot_sync(~0u, key.x == kNoKey)};
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

  // Where chunk `chunk` of 8 channels of part `part` lies in a stage.
  static __device__ __forceinline__ int at(int part, int key, int chunk) {
    return part * kPartBytes + static_cast<int>(wgmma::swizzled(key, chunk));
  }
  // Turns the rope channels of this warp's keys by their frames; half a warp a key, four channels a lane.
  __device__ __forceinline__ void turn(int frames, uint32_t stage) const {
    __syncwarp();
    float const inverse = 1.0f / __ldg(op_.rope);  // a constant factor of the table must not count twice
#pragma unroll
    for (int keys = 0; keys < kWarpKeys; keys += 2) {
      int const own = keys + lane_ / 16, frame = __shfl_sync(~0u, frames, own);
      uint32_t const at = stage + this->at(kRopePart, warp_ * kWarpKeys + own, lane_ % 16 / 2) + lane_ % 2 * 8;
      float4 const angles = __ldg(reinterpret_cast<float4 const*>(rope_at(op_, frame)) + lane_ % 16);
      uint2 const rope = ptx::load_shared_8(at);
      float2 const x = ptx::unpack_bf16(rope.x), y = ptx::unpack_bf16(rope.y);
      float const c[2] = {angles.x * inverse, angles.z * inverse}, s[2] = {angles.y * inverse, angles.w * inverse};
      uint2 const turned{ptx::pack_bf16(x.x * c[0] - x.y * s[0], x.y * c[0] + x.x * s[0]),
                         ptx::pack_bf16(y.x * c[1] - y.y * s[1], y.y * c[1] + y.x * s[1])};
      if (frame != 0) ptx::store_8(at, turned);
    }
  }

  __device__ __forceinline__ void copy_tiles(Unit const& unit, int tiles) {
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
      if (tile == 0) copy_query(unit);
    }
  }

  // q of the unit, once the scores of the one before are made. Heads past the last repeat it: nothing of them is
  // written.
  __device__ __forceinline__ void copy_query(Unit const& unit) {
    Rows const rows(op_, unit, static_cast<__nv_bfloat16 const*>(op_.q_global),
                    static_cast<__nv_bfloat16 const*>(op_.q_local));
    uint32_t const query = ptx::shared_address(shared_.query);
    wait(shared_.answered, parity_ ^ 1);
    parity_ ^= 1;
#pragma unroll 4
    for (int i = 0; i < kHeads / kProducerWarps; ++i) {
      int const head = warp_ * (kHeads / kProducerWarps) + i;
      auto const* from = rows.at(min(head, unit.heads - 1)) + 8 * lane_;
      uint32_t const to = query + at(lane_ / 8, head, lane_ % 8);
      ptx::copy_async_16(to, from);
      ptx::copy_async_16(to + kHalfParts * kPartBytes, from + kHalfChannels);
    }
    ptx::barrier_arrive_after_copies(ptx::shared_address(&shared_.queried));
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
