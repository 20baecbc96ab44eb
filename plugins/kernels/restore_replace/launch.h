#pragma once

#include "common/export.h"
#include "common/status.h"
#include "kernels/restore_replace/params.h"

namespace redknot {

REDKNOT_API Status restore_replace(RestoreReplaceParams const& params, cudaStream_t stream);

}  // namespace redknot
