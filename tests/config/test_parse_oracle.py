"""Geometry and rope tables against transformers' own reading of the same config.json."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

from trt_redknot.config import (
    AttentionKind,
    ModelGeometry,
    RouterKind,
    geometry_from_config,
    load_geometry,
    released_geometry,
)
from trt_redknot.config.released import released_config
from trt_redknot.config.rope import inverse_frequencies

KINDS = {
    "sliding_attention": AttentionKind.SLIDING,
    "compressed_sparse_attention": AttentionKind.CSA,
    "heavily_compressed_attention": AttentionKind.HCA,
}
ROUTERS = {"hash_moe": RouterKind.HASH, "moe": RouterKind.LEARNED}


def assert_same(geometry: ModelGeometry, config: DeepseekV4Config) -> None:
    direct = {
        "vocab": "vocab_size",
        "hidden": "hidden_size",
        "heads": "num_attention_heads",
        "head_dim": "head_dim",
        "rope_dim": "qk_rope_head_dim",
        "q_lora_rank": "q_lora_rank",
        "output_groups": "o_groups",
        "output_lora_rank": "o_lora_rank",
        "window": "sliding_window",
        "index_heads": "index_n_heads",
        "index_dim": "index_head_dim",
        "index_topk": "index_topk",
        "experts": "n_routed_experts",
        "experts_per_token": "num_experts_per_tok",
        "expert_width": "moe_intermediate_size",
        "routed_scale": "routed_scaling_factor",
        "scoring": "scoring_func",
        "swiglu_limit": "swiglu_limit",
        "streams": "hc_mult",
        "sinkhorn_iterations": "hc_sinkhorn_iters",
        "hc_eps": "hc_eps",
        "norm_eps": "rms_norm_eps",
        "max_positions": "max_position_embeddings",
        "bos_token": "bos_token_id",
        "layers": "num_hidden_layers",
    }
    for ours, theirs in direct.items():
        assert getattr(geometry, ours) == getattr(config, theirs), theirs
    assert geometry.attention_kinds == tuple(KINDS[kind] for kind in config.layer_types)
    assert geometry.router_kinds == tuple(ROUTERS[kind] for kind in config.mlp_layer_types)
    assert geometry.csa_ratio == config.compress_rates["compressed_sparse_attention"]
    assert geometry.hca_ratio == config.compress_rates["heavily_compressed_attention"]
    eos = config.eos_token_id
    assert geometry.stop_tokens == (() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,))
    tables = DeepseekV4RotaryEmbedding(config)
    for label, rope in (("main", geometry.rope_sliding), ("compress", geometry.rope_compressed)):
        frequencies = inverse_frequencies(rope)
        assert frequencies.dtype == torch.float32
        assert torch.equal(frequencies, getattr(tables, f"{label}_inv_freq")), label
        assert rope.attention_factor == getattr(tables, f"{label}_attention_scaling"), label


@st.composite
def networks(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of a transformers config, layer kinds and rope left out."""
    groups = draw(st.integers(1, 16))
    experts = draw(st.integers(1, 40))
    vocab = draw(st.integers(2, 5000))
    tokens = st.integers(0, vocab - 1)
    return {
        "vocab_size": vocab,
        "hidden_size": draw(st.integers(1, 512)),
        "num_hidden_layers": draw(st.integers(1, 12)),
        "num_attention_heads": groups * draw(st.integers(1, 8)),
        "o_groups": groups,
        "o_lora_rank": draw(st.integers(1, 64)),
        "q_lora_rank": draw(st.integers(1, 64)),
        "index_n_heads": draw(st.integers(1, 8)),
        "index_topk": draw(st.integers(1, 64)),
        "n_routed_experts": experts,
        "num_experts_per_tok": draw(st.integers(1, experts)),
        "moe_intermediate_size": draw(st.integers(1, 64)),
        "routed_scaling_factor": draw(st.floats(0.1, 4)),
        "scoring_func": draw(st.sampled_from(["sqrtsoftplus", "sigmoid"])),
        "swiglu_limit": draw(st.floats(0.5, 20)),
        "sliding_window": draw(st.integers(1, 256)),
        "hc_mult": draw(st.integers(1, 6)),
        "hc_sinkhorn_iters": draw(st.integers(1, 30)),
        "hc_eps": draw(st.floats(1e-8, 1e-4)),
        "rms_norm_eps": draw(st.floats(1e-8, 1e-4)),
        "max_position_embeddings": draw(st.integers(64, 1 << 21)),
        "bos_token_id": draw(st.none() | tokens),
        "eos_token_id": draw(st.none() | tokens | st.lists(tokens, min_size=1, max_size=3)),
    }


@st.composite
def heads(draw: st.DrawFn) -> dict[str, Any]:
    """A head width, a rotary width that transformers keeps when it turns it into a share and back."""
    head_dim = draw(st.integers(4, 512))
    rope_dim = 2 * draw(st.integers(1, head_dim // 2))
    if int(head_dim * (rope_dim / head_dim)) != rope_dim:
        rope_dim = 2
        head_dim = 64
    return {"head_dim": head_dim, "qk_rope_head_dim": rope_dim, "index_head_dim": rope_dim + draw(st.integers(0, 64))}


@st.composite
def scalings(draw: st.DrawFn) -> dict[str, Any]:
    """Flat `rope_scaling`."""
    if draw(st.booleans()):
        return {}
    scaling: dict[str, Any] = {draw(st.sampled_from(["type", "rope_type"])): "yarn"}
    scaling["factor"] = draw(st.integers(1, 64) | st.floats(1, 64))
    scaling["original_max_position_embeddings"] = draw(st.integers(16, 1 << 17))
    if draw(st.booleans()):
        scaling["beta_slow"] = draw(st.integers(1, 4) | st.floats(0.5, 4))
        scaling["beta_fast"] = draw(st.integers(5, 64) | st.floats(5, 64))
    if draw(st.booleans()):
        scaling["attention_factor"] = draw(st.floats(0.5, 2))
    if draw(st.booleans()):
        scaling["mscale"], scaling["mscale_all_dim"] = draw(st.floats(0.5, 2)), draw(st.floats(0.5, 2))
    return scaling


thetas = st.integers(2, 1_000_000) | st.floats(1.5, 1e6)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), network=networks(), head=heads())
def test_what_transformers_writes_reads_as_transformers_reads_it(
    data: st.DataObject, network: dict[str, Any], head: dict[str, Any]
) -> None:
    layers = network["num_hidden_layers"]
    kinds = st.sampled_from(sorted(KINDS))
    arguments = network | head
    arguments["layer_types"] = data.draw(st.none() | st.lists(kinds, min_size=layers, max_size=layers))
    routers = st.lists(st.sampled_from(sorted(ROUTERS)), min_size=layers, max_size=layers)
    arguments["mlp_layer_types"] = data.draw(st.none() | routers)
    rates = st.fixed_dictionaries(
        {"compressed_sparse_attention": st.integers(2, 8), "heavily_compressed_attention": st.integers(2, 200)}
    )
    arguments["compress_rates"] = data.draw(st.none() | rates)
    if data.draw(st.booleans()):
        arguments |= {"rope_theta": data.draw(thetas), "compress_rope_theta": data.draw(thetas)}
        arguments["rope_parameters"] = data.draw(scalings())
    else:
        share = head["qk_rope_head_dim"] / head["head_dim"]
        arguments["rope_parameters"] = {
            label: {"rope_type": "default", "partial_rotary_factor": share, "rope_theta": data.draw(thetas)}
            | {("rope_type" if key == "type" else key): value for key, value in data.draw(scalings()).items()}
            for label in ("main", "compress")
        }
    config = DeepseekV4Config(**arguments)
    with tempfile.TemporaryDirectory() as directory:
        config.save_pretrained(directory)
        geometry = load_geometry(Path(directory))
        assert_same(geometry, DeepseekV4Config.from_pretrained(directory))
    assert_same(geometry, config)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), network=networks(), head=heads(), scaling=scalings())
def test_released_key_style_reads_as_transformers_reads_it(
    data: st.DataObject, network: dict[str, Any], head: dict[str, Any], scaling: dict[str, Any]
) -> None:
    layers = network["num_hidden_layers"]
    config = network | head | {"model_type": "deepseek_v4", "num_hash_layers": data.draw(st.integers(0, layers + 2))}
    config["num_nextn_predict_layers"] = data.draw(st.integers(0, 2))
    extra = data.draw(st.integers(0, config["num_nextn_predict_layers"]))
    ratios = st.lists(st.sampled_from([0, 4, 128]), min_size=layers + extra, max_size=layers + extra)
    config["compress_ratios"] = data.draw(ratios)
    config |= {"rope_theta": data.draw(thetas), "compress_rope_theta": data.draw(thetas)}
    if scaling:
        config["rope_scaling"] = scaling
    oracle = DeepseekV4Config(**json.loads(json.dumps({k: v for k, v in config.items() if k != "model_type"})))
    assert_same(geometry_from_config(config, source="test"), oracle)


def test_an_empty_config_is_transformers_default() -> None:
    assert_same(geometry_from_config({}, source="test"), DeepseekV4Config())


@pytest.mark.parametrize(
    ("name", "layers", "csa", "hca", "sliding"), [("flash", 43, 21, 20, 2), ("pro", 61, 30, 31, 0)]
)
def test_released_networks(name: str, layers: int, csa: int, hca: int, sliding: int) -> None:
    config = released_config(name)
    geometry = released_geometry(name)
    assert_same(geometry, DeepseekV4Config(**{key: value for key, value in config.items() if key != "model_type"}))
    counted = [geometry.attention_kinds.count(kind) for kind in (AttentionKind.CSA, AttentionKind.HCA)]
    assert [geometry.layers, *counted] == [layers, csa, hca]
    assert geometry.attention_kinds.count(AttentionKind.SLIDING) == sliding
    assert geometry.attention_kinds[2::2] == (AttentionKind.CSA,) * len(geometry.attention_kinds[2::2])
    assert geometry.router_kinds.count(RouterKind.HASH) == 3
    assert geometry.heads_per_group == 8
    assert (geometry.nope_dim, geometry.rope_dim) == (448, 64)
    assert geometry.boundary == 128
    assert geometry.rope_sliding.factor is None
    assert (geometry.rope_compressed.factor, geometry.rope_compressed.attention_factor) == (16, 1.0)
