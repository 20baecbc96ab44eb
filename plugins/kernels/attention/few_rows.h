#pragma once

#include "common/status.h"
#include "kernels/attention/units.cuh"

namespace redknot::attention {

// Heads of a unit, and units of a launch up to which its keys are spread over the GPU.
inline constexpr int kFewHeads = 8;
inline constexpr int64_t kFewUnits = 16;

// Attention of few rows, as in decoding: sixteen blocks share the keys of a unit, of one row and up to kFewHeads heads.
// kUnsupported: not on this device; the caller has checked everything else.
Status attend_few_rows(Launch const& launch, bool packed, cudaStream_t stream);

}  // namespace redknot::attention
