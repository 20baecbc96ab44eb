#include "kernels/attention/wide_kernel.cuh"

namespace redknot::attention {

template Status launch_wide<false>(Launch const&, cudaStream_t);

}  // namespace redknot::attention
