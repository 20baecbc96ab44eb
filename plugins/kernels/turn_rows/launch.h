#pragma once

#include "common/export.h"
#include "common/status.h"
#include "kernels/turn_rows/params.h"

namespace redknot {

REDKNOT_API Status turn_rows(TurnRowsParams const& params, cudaStream_t stream);

}  // namespace redknot
