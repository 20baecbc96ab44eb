#pragma once

#include "common/export.h"
#include "common/status.h"
#include "kernels/compress/params.h"

namespace redknot {

REDKNOT_API Status compress(CompressParams const& params, cudaStream_t stream);

}  // namespace redknot
