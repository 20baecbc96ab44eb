#pragma once

#include "common/status.h"
#include "kernels/hyper_connection/params.h"

namespace redknot {

// hyper_connection_pre of few rows, as in decoding, in one launch. kUnsupported: not on this device, or not for this
// shape; the caller has checked everything else.
Status hyper_connection_few_rows(HyperConnectionPreParams const& params, cudaStream_t stream);

}  // namespace redknot
