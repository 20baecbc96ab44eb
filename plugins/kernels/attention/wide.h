#pragma once

#include "common/status.h"
#include "kernels/attention/units.cuh"

namespace redknot::attention {

// Attention of units of one row and up to 64 heads, bf16 pools. Blocks may start while the kernel before on the stream
// still runs, if that lets them, and wait for it.
Status launch_wide(Launch const& launch, cudaStream_t stream);

}  // namespace redknot::attention
