#pragma once

#include "common/export.h"
#include "common/status.h"
#include "kernels/norm_rope_pack/params.h"

namespace redknot {

REDKNOT_API Status norm_rope_pack(NormRopePackParams const& params, cudaStream_t stream);

}  // namespace redknot
