#pragma once

#include "common/export.h"
#include "common/status.h"
#include "kernels/moe/params.h"

namespace redknot {

REDKNOT_API Status moe_route_learned(RouteLearnedParams const& params, cudaStream_t stream);
REDKNOT_API Status moe_route_hash(RouteHashParams const& params, cudaStream_t stream);
// Fewer rows never need more.
REDKNOT_API size_t moe_permute_workspace(int64_t rows, int32_t top_k, int32_t experts);
REDKNOT_API Status moe_permute(MoePermuteParams const& params, cudaStream_t stream);
REDKNOT_API size_t moe_grouped_gemm_workspace(int64_t capacity, int32_t experts, int32_t depth, int32_t width);
// kUnsupported on a GPU that is no Hopper.
REDKNOT_API Status moe_grouped_gemm(MoeGroupedGemmParams const& params, cudaStream_t stream);
REDKNOT_API Status moe_activation(MoeActivationParams const& params, cudaStream_t stream);
REDKNOT_API Status moe_combine(MoeCombineParams const& params, cudaStream_t stream);

}  // namespace redknot
