"""Rules of config.json that transformers does not check: contradictions, unknown keys, other networks, bad files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trt_redknot.config import AttentionKind, RouterKind, geometry_from_config, load_geometry, released_geometry
from trt_redknot.config.released import released_config
from trt_redknot.errors import ConfigError

S, C, H = AttentionKind.SLIDING, AttentionKind.CSA, AttentionKind.HCA
CSA_TYPE, HCA_TYPE = "compressed_sparse_attention", "heavily_compressed_attention"


def parse(**config: Any) -> Any:
    return geometry_from_config(config, source="config.json")


@pytest.mark.parametrize(
    ("config", "kinds", "rates"),
    [
        ({"compress_ratios": [0, 1, 4, 128]}, (S, S, C, H), (4, 128)),
        ({"compress_ratios": [0, 1, 4, 128, 0]}, (S, S, C, H), (4, 128)),
        ({"compress_ratios": [1, 32, 4, 32]}, (S, H, C, H), (4, 32)),
        ({"compress_ratios": [2, 3, 2, 3]}, (C, H, C, H), (2, 3)),
        ({"compress_ratios": [4, 4, 4, 4]}, (C, C, C, C), (4, 128)),
        ({"compress_ratios": [128, 0, 0, 0]}, (H, S, S, S), (4, 128)),
        ({"compress_ratios": [16, 0, 0, 0], "compress_rates": {CSA_TYPE: 16, HCA_TYPE: 64}}, (C, S, S, S), (16, 64)),
        ({"compress_ratios": [16, 4, 0, 0], "compress_rates": {CSA_TYPE: 16, HCA_TYPE: 4}}, (C, H, S, S), (16, 4)),
        ({"compress_ratios": [8, 0, 0, 0], "compress_rate_csa": 8}, (C, S, S, S), (8, 128)),
        ({"compress_ratios": [16] * 4, "layer_types": [CSA_TYPE, HCA_TYPE] * 2}, (C, H, C, H), (16, 16)),
        ({"compress_ratios": [16] * 4, "layer_types": [HCA_TYPE] * 4}, (H, H, H, H), (4, 16)),
        ({"compress_rate_csa": 2, "compress_rate_hca": 6}, (H, H, H, C), (2, 6)),
        ({"layer_types": ["sliding_attention"] * 5}, (S, S, S, S), (4, 128)),
    ],
)
def test_ratios_and_kinds(config: dict[str, Any], kinds: tuple[AttentionKind, ...], rates: tuple[int, int]) -> None:
    geometry = parse(num_hidden_layers=4, **config)
    assert geometry.attention_kinds == kinds
    assert (geometry.csa_ratio, geometry.hca_ratio) == rates
    expected = {S: 0, C: rates[0], H: rates[1]}
    assert [geometry.ratio(layer) for layer in range(4)] == [expected[kind] for kind in kinds]
    assert geometry.coarsest_ratio == max(1, *(expected[kind] for kind in kinds))
    assert geometry.boundary == max(geometry.window, geometry.coarsest_ratio)


def test_ratio_one_and_zero_are_the_same_network() -> None:
    config = released_config("flash")
    config["compress_ratios"] = [1 if ratio == 0 else ratio for ratio in config["compress_ratios"]]
    assert geometry_from_config(config, source="test").digest == released_geometry("flash").digest


def test_hash_layers_beyond_the_network_are_cut() -> None:
    assert parse(num_hidden_layers=2, num_hash_layers=9).router_kinds == (RouterKind.HASH, RouterKind.HASH)


@pytest.mark.parametrize(("eos", "stop"), [(7, (7,)), ([3, 4], (3, 4)), (None, ()), ([], ())])
def test_stop_tokens(eos: Any, stop: tuple[int, ...]) -> None:
    assert parse(eos_token_id=eos).stop_tokens == stop


def test_nested_rope_wins_over_flat_thetas() -> None:
    part = {"rope_type": "default", "partial_rotary_factor": 0.125}
    nested = {"main": part | {"rope_theta": 5.0}, "compress": part | {"rope_theta": 7}}
    geometry = parse(rope_parameters=nested, rope_theta=100, compress_rope_theta=200)
    assert (geometry.rope_sliding.theta, geometry.rope_compressed.theta) == (5.0, 7.0)


YARN = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536}
NESTED = {"rope_type": "default", "rope_theta": 10.0, "partial_rotary_factor": 0.125}


@pytest.mark.parametrize(
    ("key", "config"),
    [
        ("n_layers", {"n_layers": 3}),
        ("engram", {"engram": {}}),
        ("model_type", {"model_type": "deepseek_v3"}),
        ("hidden_size", {"hidden_size": 0}),
        ("hidden_size", {"hidden_size": 4096.0}),
        ("hidden_size", {"hidden_size": "4096"}),
        ("hidden_size", {"hidden_size": True}),
        ("hidden_size", {"hidden_size": None}),
        ("rms_norm_eps", {"rms_norm_eps": float("nan")}),
        ("swiglu_limit", {"swiglu_limit": float("inf")}),
        ("routed_scaling_factor", {"routed_scaling_factor": -1.5}),
        ("o_groups", {"num_attention_heads": 12, "o_groups": 8}),
        ("num_key_value_heads", {"num_key_value_heads": 2}),
        ("attention_bias", {"attention_bias": True}),
        ("mlp_bias", {"mlp_bias": True}),
        ("scoring_func", {"scoring_func": "softmax"}),
        ("hidden_act", {"hidden_act": "gelu"}),
        ("num_experts_per_tok", {"n_routed_experts": 4, "num_experts_per_tok": 5}),
        ("norm_topk_prob", {"norm_topk_prob": False}),
        ("tie_word_embeddings", {"tie_word_embeddings": True}),
        ("n_shared_experts", {"n_shared_experts": 2}),
        ("topk_method", {"topk_method": "greedy"}),
        ("n_group", {"n_group": 8}),
        ("num_local_experts", {"n_routed_experts": 8, "num_local_experts": 16}),
        ("intermediate_size", {"moe_intermediate_size": 8, "intermediate_size": 16}),
        ("eos_token_id", {"vocab_size": 10, "eos_token_id": 10}),
        ("eos_token_id", {"eos_token_id": [1, "2"]}),
        ("bos_token_id", {"vocab_size": 10, "bos_token_id": 12}),
        ("compress_ratios", {"num_hidden_layers": 2, "compress_ratios": [4]}),
        ("compress_ratios", {"num_hidden_layers": 2, "compress_ratios": [4, 4, 4, 4]}),
        ("compress_ratios", {"num_hidden_layers": 2, "num_nextn_predict_layers": 0, "compress_ratios": [4, 4, 0]}),
        ("compress_ratios", {"num_hidden_layers": 2, "compress_ratios": [16, 0]}),
        ("compress_ratios", {"num_hidden_layers": 3, "compress_ratios": [4, 8, 16]}),
        ("compress_ratios", {"num_hidden_layers": 2, "compress_ratios": [4, -1]}),
        ("compress_ratios", {"num_hidden_layers": 2, "compress_ratios": [4, 8], "compress_rates": {}}),
        ("compress_rates", {"compress_rates": {CSA_TYPE: 1}}),
        ("compress_rates", {"compress_rates": {"sliding_attention": 4}}),
        ("compress_rate_csa", {"compress_rates": {CSA_TYPE: 4}, "compress_rate_csa": 8}),
        ("layer_types", {"num_hidden_layers": 1, "layer_types": ["full_attention"]}),
        ("layer_types", {"num_hidden_layers": 2, "layer_types": [CSA_TYPE]}),
        ("layer_types", {"num_hidden_layers": 2, "layer_types": [CSA_TYPE] * 2, "compress_ratios": [4, 0]}),
        ("layer_types", {"num_hidden_layers": 2, "layer_types": [CSA_TYPE] * 2, "compress_ratios": [4, 8]}),
        (
            "layer_types",
            {
                "num_hidden_layers": 2,
                "layer_types": [CSA_TYPE, HCA_TYPE],
                "compress_ratios": [128, 4],
                "compress_rates": {CSA_TYPE: 4, HCA_TYPE: 128},
            },
        ),
        ("mlp_layer_types", {"num_hidden_layers": 2, "mlp_layer_types": ["moe", "hash_moe"], "num_hash_layers": 1}),
        ("mlp_layer_types", {"num_hidden_layers": 1, "mlp_layer_types": ["dense"]}),
        ("qk_rope_head_dim", {"head_dim": 64, "qk_rope_head_dim": 7}),
        ("qk_rope_head_dim", {"head_dim": 64, "qk_rope_head_dim": 66}),
        ("qk_rope_head_dim", {"head_dim": 64, "qk_rope_head_dim": 16, "partial_rotary_factor": 0.5}),
        ("partial_rotary_factor", {"head_dim": 64, "partial_rotary_factor": 1.5}),
        ("index_head_dim", {"index_head_dim": 32}),
        ("rope_theta", {"rope_theta": 1}),
        ("rope_theta", {"rope_theta": 0}),
        ("type", {"rope_scaling": {"type": "linear", "factor": 2}}),
        ("rope_type", {"rope_scaling": {"type": "yarn", "rope_type": "default"}}),
        ("truncate", {"rope_scaling": YARN | {"truncate": False}}),
        ("factor", {"rope_scaling": YARN | {"factor": 0.5}}),
        ("factor", {"rope_scaling": {"factor": 4}}),
        ("beta_fast", {"rope_scaling": YARN | {"beta_fast": 1, "beta_slow": 2}}),
        ("beta_medium", {"rope_scaling": YARN | {"beta_medium": 2}}),
        ("rope_scaling", {"rope_scaling": YARN, "rope_parameters": {"type": "yarn", "factor": 4}}),
        ("rope_parameters.main.rope_theta", {"rope_parameters": {"main": {}, "compress": NESTED}}),
        ("main", {"rope_parameters": {"compress": NESTED}}),
        (
            "rope_parameters.compress.partial_rotary_factor",
            {"rope_parameters": {"main": NESTED, "compress": {"rope_theta": 10.0}}},
        ),
        (
            "rope_parameters.compress.partial_rotary_factor",
            {"rope_parameters": {"main": NESTED, "compress": NESTED | {"partial_rotary_factor": 0.25}}},
        ),
        ("weight_block_size", {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}),
        ("quant_method", {"quantization_config": {"quant_method": "awq"}}),
        ("fmt", {"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}),
    ],
)
def test_wrong_values_name_the_key(key: str, config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        geometry_from_config(config, source="some/config.json")
    message = str(caught.value)
    assert key in message
    assert "some/config.json" in message
    assert "\n" not in message


def test_all_faults_of_a_document_are_told_at_once() -> None:
    with pytest.raises(ConfigError, match=r"(?s)hidden_size.*n_layers|n_layers.*hidden_size"):
        parse(hidden_size=0, n_layers=3)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "list"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b'{"model_type": "deepseek_v4", "head_dim": 1, "head_dim": 2}', "twice"),
        (b"[" * 100_000, "nested"),
        (b"{}", "model_type"),
        (b'{"model_type": "llama"}', "model_type"),
    ],
)
def test_bad_files(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=reason) as caught:
        load_geometry(tmp_path)
    assert "config.json" in str(caught.value)


def test_missing_directory_and_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a directory"):
        load_geometry(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"cannot be read.*config\.json"):
        load_geometry(tmp_path)


def test_an_oversized_file_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as stream:
        stream.truncate(1 << 30)
    with pytest.raises(ConfigError, match="too large"):
        load_geometry(tmp_path)


def test_released_names_are_closed() -> None:
    with pytest.raises(ConfigError, match="flash or pro"):
        released_geometry("v3")
