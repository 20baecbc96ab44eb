#pragma once

#include <cstddef>

#include "common/status.h"
#include "kernels/attention/units.cuh"

namespace redknot::attention {

// Bytes that hold the packed pools of a call as bf16.
inline size_t unpacked_bytes(SegLatentAttentionParams const& op) {
  return static_cast<size_t>(op.latent_rows + op.entry_rows) * 2 * kHeadDim;
}

// Writes what the launch's rows may read of packed pools into `workspace` (unpacked_bytes, 16-byte aligned) as bf16,
// each row in its place, and lets the launch read it there. The rest of the workspace stays as it is.
Status unpack_seen(Launch& launch, void* workspace, cudaStream_t stream);

}  // namespace redknot::attention
