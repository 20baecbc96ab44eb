"""The keys of a DeepSeek-V4 `config.json`, with their types and the defaults transformers gives them.

Both styles are listed: the released one (`compress_ratios`, `num_hash_layers`, `qk_rope_head_dim`, flat
`rope_scaling`) and the one transformers writes (`layer_types`, `mlp_layer_types`, `compress_rates`, nested
`rope_parameters`). What the keys mean together is decided in :mod:`trt_redknot.config.parse`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

LayerType = Literal["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
MlpLayerType = Literal["hash_moe", "moe"]

Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]


def _as_list(value: Any) -> Any:
    """One id, several or none: a list."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


class Keys(BaseModel):
    """Strict: no unknown keys, no silent conversions (a bool is not a number, 4096.0 is not a count)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class RopeKeys(Keys):
    """One rope dictionary: flat, or the `main` or `compress` part of a nested one. `type` is the old `rope_type`."""

    rope_type: Literal["default", "yarn"] | None = None
    type: Literal["default", "yarn"] | None = None
    rope_theta: Annotated[float, Field(gt=1)] | None = None
    partial_rotary_factor: Positive | None = None
    factor: Annotated[float, Field(ge=1)] | None = None
    original_max_position_embeddings: Count | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    attention_factor: Positive | None = None
    mscale: Positive | None = None
    mscale_all_dim: Positive | None = None
    # transformers reads `truncate` beside `main` and `compress`, where it drops it: the ramp is always truncated.
    truncate: Literal[True] | None = None


class NestedRopeKeys(RopeKeys):
    """`rope_parameters` as transformers writes it; the flat keys beside `main` and `compress` are leftovers."""

    main: RopeKeys
    compress: RopeKeys


class CompressRates(Keys):
    """Tokens per compressed entry of each layer type."""

    compressed_sparse_attention: Annotated[int, Field(ge=2)] = 4
    heavily_compressed_attention: Annotated[int, Field(ge=2)] = 128


class QuantizationKeys(Keys):
    """How the weights are stored. The checkpoint's own dtypes decide; these must not contradict what can be read."""

    quant_method: Literal["fp8"]
    fmt: Literal["e4m3"] = "e4m3"
    scale_fmt: Literal["ue8m0", "float"] = "float"
    weight_block_size: list[Literal[128]] = Field(default=[128, 128], min_length=2, max_length=2)
    activation_scheme: Literal["dynamic"] = "dynamic"
    expert_dtype: Literal["fp4", "fp8"] | None = None
    dequantize: bool = False
    modules_to_not_convert: list[str] | None = None
    modules_to_convert: list[str] | None = None


class CheckpointKeys(Keys):
    """Every key a DeepSeek-V4 `config.json` may have."""

    model_type: Literal["deepseek_v4"] | None = None
    vocab_size: Count = 129280
    hidden_size: Count = 4096
    num_hidden_layers: Count = 43
    num_attention_heads: Count = 64
    num_key_value_heads: Literal[1] = 1
    head_dim: Count = 512
    q_lora_rank: Count = 1024
    o_groups: Count = 8
    o_lora_rank: Count = 1024
    sliding_window: Count = 128
    max_position_embeddings: Count = 1048576

    layer_types: list[LayerType] | None = None
    compress_rates: CompressRates | None = None
    compress_ratios: list[Natural] | None = None
    compress_rate_csa: Annotated[int, Field(ge=2)] | None = None
    compress_rate_hca: Annotated[int, Field(ge=2)] | None = None
    mlp_layer_types: list[MlpLayerType] | None = None
    num_hash_layers: Natural | None = None
    num_nextn_predict_layers: Natural = 1

    index_n_heads: Count = 64
    index_head_dim: Count = 128
    index_topk: Count = 512

    n_routed_experts: Count | None = None
    num_local_experts: Count | None = None
    n_shared_experts: Literal[1] = 1
    num_experts_per_tok: Count = 6
    moe_intermediate_size: Count | None = None
    intermediate_size: Count | None = None
    routed_scaling_factor: Positive = 1.5
    scoring_func: Literal["sqrtsoftplus", "sigmoid"] = "sqrtsoftplus"
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    norm_topk_prob: Literal[True] = True
    n_group: Literal[1] | None = None
    topk_group: Literal[1] | None = None
    hidden_act: Literal["silu"] = "silu"
    swiglu_limit: Positive = 10.0
    mlp_bias: Literal[False] = False
    attention_bias: Literal[False] = False

    hc_mult: Count = 4
    hc_sinkhorn_iters: Count = 20
    hc_eps: Positive = 1e-6
    rms_norm_eps: Positive = 1e-6

    rope_theta: Annotated[float, Field(gt=1)] = 10000.0
    compress_rope_theta: Annotated[float, Field(gt=1)] = 160000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: Positive | None = None
    qk_rope_head_dim: Count | None = None

    bos_token_id: Natural | None = 0
    eos_token_id: Annotated[list[Natural], BeforeValidator(_as_list)] = Field(default=[1])
    tie_word_embeddings: Literal[False] = False
    quantization_config: QuantizationKeys | None = None
    expert_dtype: Literal["fp4", "fp8"] | None = None

    # Known, and without a meaning for inference: training, bookkeeping and generation defaults.
    architectures: list[str] | None = None
    attention_dropout: float = 0.0
    chunk_size_feed_forward: int = 0
    dtype: str | None = None
    id2label: dict[str, str] | None = None
    initializer_range: float = 0.02
    is_encoder_decoder: Literal[False] = False
    label2id: dict[str, int] | None = None
    output_attentions: bool | None = None
    output_hidden_states: bool | None = None
    output_router_logits: bool = False
    pad_token_id: int | None = None
    problem_type: str | None = None
    return_dict: bool | None = None
    router_aux_loss_coef: float = 0.001
    router_jitter_noise: float = 0.0
    torch_dtype: str | None = None
    transformers_version: str | None = None
    use_cache: bool = True
    name_or_path: str | None = Field(default=None, alias="_name_or_path")
