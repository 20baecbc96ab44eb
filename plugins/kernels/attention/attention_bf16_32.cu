#include "kernels/attention/kernel.cuh"

namespace redknot::attention {

template Status launch_attention<32, false>(Launch const&, cudaStream_t);

}  // namespace redknot::attention
