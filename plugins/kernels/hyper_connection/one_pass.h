#pragma once

#include "common/status.h"
#include "kernels/hyper_connection/params.h"

namespace redknot {

// hyper_connection_pre in one launch that reads the streams once, for the shapes where that is faster. kUnsupported:
// not on this device, or not for this shape; the caller has checked everything else.
Status hyper_connection_one_pass(HyperConnectionPreParams const& params, cudaStream_t stream);

}  // namespace redknot
