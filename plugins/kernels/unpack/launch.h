#pragma once

#include "common/export.h"
#include "common/status.h"
#include "kernels/unpack/params.h"

namespace redknot {

REDKNOT_API Status unpack(UnpackParams const& params, cudaStream_t stream);

}  // namespace redknot
