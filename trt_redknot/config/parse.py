"""Geometry of a network from its `config.json`, in the released key style, transformers' own, or both mixed.

Where a key is absent the default is transformers' one. Where two keys say the same thing they must agree. Unknown keys,
values of a network this package does not run, and contradictions are a ConfigError that names the keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trt_redknot.config.documents import read_json_object, validated
from trt_redknot.config.geometry import AttentionKind, ModelGeometry
from trt_redknot.config.keys import CheckpointKeys
from trt_redknot.config.layers import LayerPlan, layer_plan
from trt_redknot.config.ropes import RopePlan, rope_plan
from trt_redknot.errors import ConfigError

CONFIG_FILE = "config.json"


def load_geometry(checkpoint_dir: Path) -> ModelGeometry:
    """Geometry of the checkpoint in `checkpoint_dir`, from its `config.json`.

    Raises:
        ConfigError: the directory or file is missing or unreadable, is no DeepSeek-V4 config, or is contradictory.
    """
    directory = Path(checkpoint_dir)
    if not directory.is_dir():
        raise ConfigError(
            "the checkpoint is not a directory",
            path=directory,
            remedy="Name a directory with config.json and safetensors files.",
        )
    path = directory / CONFIG_FILE
    config = read_json_object(path)
    if "model_type" not in config:
        raise ConfigError(
            "key 'model_type' is missing",
            expected="'deepseek_v4'",
            path=path,
            remedy="Name the directory of a DeepSeek-V4 checkpoint.",
        )
    return geometry_from_config(config, source=path)


def geometry_from_config(config: Mapping[str, Any], *, source: Path | str) -> ModelGeometry:
    """Geometry of the network that `config` describes.

    Args:
        config: content of a `config.json`, old or new key style.
        source: where it came from, for error messages.

    Raises:
        ConfigError: an unknown key, a value outside what this package runs, or keys that contradict each other.
    """
    if config.get("model_type", "deepseek_v4") != "deepseek_v4":
        raise ConfigError(
            "key 'model_type' names another network",
            expected="'deepseek_v4'",
            found=repr(config["model_type"]),
            path=source,
            remedy="Name the directory of a DeepSeek-V4 checkpoint.",
        )
    keys = validated(CheckpointKeys, config, source)
    geometry = _assemble(keys, layer_plan(keys, source), rope_plan(keys, source), source)
    _check_sizes(geometry, source)
    return geometry


def _assemble(keys: CheckpointKeys, layers: LayerPlan, ropes: RopePlan, source: Path | str) -> ModelGeometry:
    experts = _either(keys, "n_routed_experts", "num_local_experts", 256, source)
    expert_width = _either(keys, "moe_intermediate_size", "intermediate_size", 2048, source)
    return ModelGeometry(
        vocab=keys.vocab_size,
        hidden=keys.hidden_size,
        heads=keys.num_attention_heads,
        head_dim=keys.head_dim,
        rope_dim=ropes.dim,
        q_lora_rank=keys.q_lora_rank,
        output_groups=keys.o_groups,
        output_lora_rank=keys.o_lora_rank,
        window=keys.sliding_window,
        csa_ratio=layers.csa_ratio,
        hca_ratio=layers.hca_ratio,
        attention_kinds=layers.attention_kinds,
        router_kinds=layers.router_kinds,
        index_heads=keys.index_n_heads,
        index_dim=keys.index_head_dim,
        index_topk=keys.index_topk,
        experts=experts,
        experts_per_token=keys.num_experts_per_tok,
        expert_width=expert_width,
        routed_scale=keys.routed_scaling_factor,
        scoring=keys.scoring_func,
        swiglu_limit=keys.swiglu_limit,
        streams=keys.hc_mult,
        sinkhorn_iterations=keys.hc_sinkhorn_iters,
        hc_eps=keys.hc_eps,
        norm_eps=keys.rms_norm_eps,
        rope_sliding=ropes.sliding,
        rope_compressed=ropes.compressed,
        max_positions=keys.max_position_embeddings,
        bos_token=keys.bos_token_id,
        stop_tokens=tuple(keys.eos_token_id),
    )


def _either(keys: CheckpointKeys, name: str, alias: str, default: int, source: Path | str) -> int:
    value, other = getattr(keys, name), getattr(keys, alias)
    if value is not None and other is not None and value != other:
        raise ConfigError(
            f"keys {name!r} and {alias!r} contradict each other", expected=value, found=other, path=source
        )
    chosen = value if value is not None else other
    return default if chosen is None else int(chosen)


def _check_sizes(geometry: ModelGeometry, source: Path | str) -> None:
    """Relations between sizes that no single key can show."""
    g = geometry
    if g.heads % g.output_groups:
        raise ConfigError(
            "key 'num_attention_heads' is not divisible by 'o_groups'",
            expected=f"a multiple of {g.output_groups}",
            found=g.heads,
            path=source,
        )
    if g.experts_per_token > g.experts:
        raise ConfigError(
            "key 'num_experts_per_tok' is larger than 'n_routed_experts'",
            expected=f"at most {g.experts}",
            found=g.experts_per_token,
            path=source,
        )
    if AttentionKind.CSA in g.attention_kinds and g.rope_dim > g.index_dim:
        raise ConfigError(
            "key 'index_head_dim' is smaller than the rotary dimension",
            expected=f"at least {g.rope_dim}",
            found=g.index_dim,
            path=source,
        )
    named = {"bos_token_id": (g.bos_token,), "eos_token_id": g.stop_tokens}
    for key, tokens in named.items():
        outside = [token for token in tokens if token is not None and token >= g.vocab]
        if outside:
            raise ConfigError(
                f"key {key!r} names a token outside the vocabulary",
                expected=f"ids below {g.vocab}",
                found=outside[0],
                path=source,
            )
