#pragma once

// Barriers in shared memory, bulk copies that report to them, and the shared memory of the other blocks of a cluster.
// Addresses are those of ptx::shared_address. Needs sm_90.

#include <cstdint>

#include "common/ptx.cuh"

namespace redknot::cluster {

__device__ __forceinline__ uint32_t rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Every thread of every block of the cluster: writes before arrive() are seen after await().
__device__ __forceinline__ void arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void await() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
__device__ __forceinline__ void synchronise() {
  arrive();
  await();
}

// The same without the writes: every block has come here. Enough after barriers_ready(), and for blocks that have seen
// all that is written to them.
__device__ __forceinline__ void meet_all() {
  asm volatile("barrier.cluster.arrive.relaxed;\n\tbarrier.cluster.wait;" ::: "memory");
}

// Where `address` of this block lies in block `rank` of the cluster.
__device__ __forceinline__ uint32_t address_in(uint32_t address, uint32_t rank) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

// Makes initialised barriers known to the cluster, which must meet after it, and to copies that this thread starts.
__device__ __forceinline__ void barriers_ready() {
  asm volatile("fence.mbarrier_init.release.cluster;\n\tfence.proxy.async.shared::cta;" ::: "memory");
}

// One arrival at the open phase, which then also waits for `bytes` to be written.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits until the phase of this parity is over. The scope is the block: what barriers guard lies in its own shared
// memory, and a wider one would empty the L1 cache at every wait.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  ptx::barrier_wait(barrier, static_cast<int>(parity));
}

// `own` as block `rank` has it in its place.
__device__ __forceinline__ float load(float const* own, int rank) {
  float value;
  asm volatile("ld.shared::cluster.f32 %0, [%1];"
               : "=f"(value)
               : "r"(address_in(ptx::shared_address(own), static_cast<uint32_t>(rank)))
               : "memory");
  return value;
}

// A store into another block that counts as written bytes of a barrier of that block. Each is a packet.
__device__ __forceinline__ void store(uint32_t remote, float4 value, uint32_t remote_barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(remote),
      "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(remote_barrier)
      : "memory");
}

// Copies the box of a tensor map of three dimensions that begins at (x, y, z) into this block.
__device__ __forceinline__ void box_load(uint32_t shared, void const* map, int32_t x, int32_t y, int32_t z,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}

}  // namespace redknot::cluster
