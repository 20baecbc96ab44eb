#pragma once

#include "common/export.h"
#include "common/status.h"
#include "kernels/hyper_connection/params.h"

namespace redknot {

REDKNOT_API size_t hyper_connection_pre_workspace(int64_t rows, int32_t stream_count, int32_t hidden);
REDKNOT_API Status hyper_connection_pre(HyperConnectionPreParams const& params, cudaStream_t stream);
REDKNOT_API Status hyper_connection_post(HyperConnectionPostParams const& params, cudaStream_t stream);

}  // namespace redknot
