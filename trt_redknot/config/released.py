"""The released networks as configs, for dry runs without weights."""

from __future__ import annotations

from typing import Any, Literal, get_args

from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.config.parse import geometry_from_config
from trt_redknot.errors import ConfigError

ReleasedName = Literal["flash", "pro"]


def released_config(name: str) -> dict[str, Any]:
    """`config.json` of a released checkpoint, with the keys and key style it is published with.

    Args:
        name: `flash` or `pro`.

    Raises:
        ConfigError: no released network has that name.
    """
    if name == "flash":
        config: dict[str, Any] = {
            "compress_ratios": [0, 0, *_alternating(41), 0],
            "hidden_size": 4096,
            "index_topk": 512,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "num_attention_heads": 64,
            "num_hidden_layers": 43,
            "o_groups": 8,
            "q_lora_rank": 1024,
            "routed_scaling_factor": 1.5,
        }
    elif name == "pro":
        config = {
            "compress_ratios": [128, 128, *_alternating(59), 0],
            "hidden_size": 7168,
            "index_topk": 1024,
            "moe_intermediate_size": 3072,
            "n_routed_experts": 384,
            "num_attention_heads": 128,
            "num_hidden_layers": 61,
            "o_groups": 16,
            "q_lora_rank": 1536,
            "routed_scaling_factor": 2.5,
        }
    else:
        raise ConfigError("no released network has this name", expected=" or ".join(get_args(ReleasedName)), found=name)
    return _common() | config


def released_geometry(name: str) -> ModelGeometry:
    """Geometry of the released network `flash` or `pro`. Raises ConfigError for another name."""
    return geometry_from_config(released_config(name), source=f"released {name}")


def _alternating(layers: int) -> list[int]:
    return [4 if layer % 2 == 0 else 128 for layer in range(layers)]


def _common() -> dict[str, Any]:
    """Keys that both releases share."""
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "compress_rope_theta": 160000,
        "eos_token_id": 1,
        "expert_dtype": "fp4",
        "hc_eps": 1e-06,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "head_dim": 512,
        "hidden_act": "silu",
        "index_head_dim": 128,
        "index_n_heads": 64,
        "initializer_range": 0.02,
        "max_position_embeddings": 1048576,
        "model_type": "deepseek_v4",
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 6,
        "num_hash_layers": 3,
        "num_key_value_heads": 1,
        "num_nextn_predict_layers": 1,
        "o_lora_rank": 1024,
        "qk_rope_head_dim": 64,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        },
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "scoring_func": "sqrtsoftplus",
        "sliding_window": 128,
        "swiglu_limit": 10.0,
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 129280,
    }
