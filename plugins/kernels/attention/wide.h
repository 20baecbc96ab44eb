#pragma once

#include "common/status.h"
#include "kernels/attention/units.cuh"

namespace redknot::attention {

// Attention of units of one row and up to 64 heads.
template <bool kPacked>
Status launch_wide(Launch const& launch, cudaStream_t stream);

extern template Status launch_wide<true>(Launch const&, cudaStream_t);
extern template Status launch_wide<false>(Launch const&, cudaStream_t);

}  // namespace redknot::attention
