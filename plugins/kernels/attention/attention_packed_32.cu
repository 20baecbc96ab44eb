#include "kernels/attention/kernel.cuh"

namespace redknot::attention {

template Status launch_attention<32, true>(Launch const&, cudaStream_t);

}  // namespace redknot::attention
