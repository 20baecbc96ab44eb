#pragma once

#include "operator.h"

namespace redknot::trt {

OperatorKind const& restore_replace_kind();
OperatorKind const& norm_rope_pack_kind();
OperatorKind const& compress_kind();
OperatorKind const& hyper_connection_pre_kind();
OperatorKind const& hyper_connection_post_kind();
OperatorKind const& hyper_head_kind();
OperatorKind const& moe_route_learned_kind();
OperatorKind const& moe_route_hash_kind();
OperatorKind const& moe_permute_kind();
OperatorKind const& moe_activation_kind();
OperatorKind const& moe_grouped_gemm_kind();
OperatorKind const& moe_combine_kind();
OperatorKind const& collective_kind();
OperatorKind const& seg_latent_attention_kind();
OperatorKind const& lightning_indexer_kind();

}  // namespace redknot::trt
