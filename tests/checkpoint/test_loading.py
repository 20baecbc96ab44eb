"""Loading against the tensors of a transformers model: name styles, dtypes, slices of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trt_redknot.checkpoint import (
    Checkpoint,
    dequantize_fp4,
    layer_specs,
    quantize_fp4,
    quantize_fp8_blocks,
    rank_bytes,
    shared_specs,
)
from trt_redknot.config import AttentionKind, ModelGeometry, RouterKind
from trt_redknot.errors import CheckpointError
from trt_redknot.partition import even_split

F32, BF16 = torch.float32, torch.bfloat16
ALWAYS_FP32 = ("norm", "hc.", "hc_head.", "sinks", "ape", "router.bias")


def module_tensors(truth: dict[str, torch.Tensor], geometry: ModelGeometry, layer: int) -> dict[str, torch.Tensor]:
    """The canonical tensors of a layer, taken from the model's own modules."""
    g, at = geometry, f"layers.{layer}."
    attn, mlp = f"{at}self_attn.", f"{at}mlp."
    named = {
        "attn_norm": f"{at}input_layernorm.weight",
        "ffn_norm": f"{at}post_attention_layernorm.weight",
        "attn.q_a": f"{attn}q_a_proj.weight",
        "attn.q_norm": f"{attn}q_a_norm.weight",
        "attn.q_b": f"{attn}q_b_proj.weight",
        "attn.kv": f"{attn}kv_proj.weight",
        "attn.kv_norm": f"{attn}kv_norm.weight",
        "attn.sinks": f"{attn}sinks",
        "attn.o_b": f"{attn}o_b_proj.weight",
        "router.weight": f"{mlp}gate.weight",
        "experts.gate_up": f"{mlp}experts.gate_up_proj",
        "experts.down": f"{mlp}experts.down_proj",
    }
    named |= {f"{hc}.{leaf}": f"{at}{hc}.{leaf}" for hc in ("attn_hc", "ffn_hc") for leaf in ("fn", "base", "scale")}
    named |= {f"shared.{leaf}": f"{mlp}shared_experts.{leaf}_proj.weight" for leaf in ("gate", "up", "down")}
    kind = g.attention_kinds[layer]
    if kind is not AttentionKind.SLIDING:
        named |= {
            "compressor.kv": f"{attn}compressor.kv_proj.weight",
            "compressor.gate": f"{attn}compressor.gate_proj.weight",
            "compressor.ape": f"{attn}compressor.position_bias",
            "compressor.norm": f"{attn}compressor.kv_norm.weight",
        }
    if kind is AttentionKind.CSA:
        named |= {
            "indexer.kv": f"{attn}compressor.indexer.kv_proj.weight",
            "indexer.gate": f"{attn}compressor.indexer.gate_proj.weight",
            "indexer.ape": f"{attn}compressor.indexer.position_bias",
            "indexer.norm": f"{attn}compressor.indexer.kv_norm.weight",
            "indexer.q_b": f"{attn}compressor.indexer.q_b_proj.weight",
            "indexer.weights": f"{attn}compressor.indexer.scorer.weights_proj.weight",
        }
    hashed = g.router_kinds[layer] is RouterKind.HASH
    named |= {"router.tid2eid": f"{mlp}gate.tid2eid"} if hashed else {}
    named |= {} if hashed else {"router.bias": f"{mlp}gate.e_score_correction_bias"}
    tensors = {name: truth[source] for name, source in named.items()}
    tensors["attn.o_a"] = truth[f"{attn}o_a_proj.weight"].view(g.output_groups, g.output_lora_rank, -1)
    return tensors


def shared_tensors(truth: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        "embed": truth["embed_tokens.weight"],
        "head": truth["lm_head.weight"],
        "norm": truth["norm.weight"],
        "hc_head.fn": truth["hc_head.hc_fn"],
        "hc_head.base": truth["hc_head.hc_base"],
        "hc_head.scale": truth["hc_head.hc_scale"],
    }


def rank_part(name: str, whole: torch.Tensor, g: ModelGeometry, rank: int, size: int) -> torch.Tensor:
    """What `rank` owns, by the words of the contract."""
    heads, groups = g.heads // size, g.output_groups // size
    if name == "attn.q_b":
        return whole.view(g.heads, g.head_dim, -1)[rank * heads : (rank + 1) * heads].flatten(0, 1)
    if name == "attn.sinks":
        return whole[rank * heads : (rank + 1) * heads]
    if name == "attn.o_a":
        return whole[rank * groups : (rank + 1) * groups]
    if name == "attn.o_b":
        return whole.view(g.hidden, g.output_groups, -1)[:, rank * groups : (rank + 1) * groups].flatten(1)
    if name.startswith("experts."):
        return whole[list(even_split(g.experts, size)[rank])]
    if name == "head":
        return whole[list(even_split(g.vocab, size)[rank])]
    return whole


def expected_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    if name == "router.tid2eid":
        return torch.int32
    return F32 if any(part in name for part in ALWAYS_FP32) else dtype


def assert_loads(
    checkpoint: Checkpoint, truth: dict[str, torch.Tensor], sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    g = checkpoint.geometry
    for size in sizes:
        for rank in range(size):
            for layer in range(g.layers):
                expected = module_tensors(truth, g, layer)
                loaded = checkpoint.load_layer(layer, rank, size, dtype)
                specs = {spec.name: spec for spec in layer_specs(g, layer)}
                assert loaded.keys() == expected.keys() == specs.keys()
                for name, tensor in loaded.items():
                    part = rank_part(name, expected[name], g, rank, size)
                    assert tensor.dtype == expected_dtype(name, dtype), name
                    assert tuple(tensor.shape) == specs[name].local_shape(rank, size), name
                    assert torch.equal(tensor, part.to(tensor.dtype)), (layer, name, rank, size)
            whole = shared_tensors(truth)
            loaded = checkpoint.load_shared(rank, size, dtype)
            assert loaded.keys() == whole.keys()
            for name, tensor in loaded.items():
                assert tensor.dtype == expected_dtype(name, dtype), name
                assert torch.equal(tensor, rank_part(name, whole[name], g, rank, size).to(tensor.dtype)), name


@pytest.mark.parametrize("original_format", [True, False])
@pytest.mark.parametrize("shard_size", ["5GB", "200KB"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_what_transformers_writes(
    network, tmp_path: Path, original_format: bool, shard_size: str, dtype: torch.dtype
) -> None:
    network.model.save_pretrained(tmp_path, save_original_format=original_format, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "200KB")
    assert_loads(Checkpoint.open(tmp_path, network.geometry), network.truth, (1, 2, 4), dtype)


@pytest.mark.parametrize("shards", [1, 3])
def test_released_names(network, write: Callable[..., Path], shards: int) -> None:
    directory = write(network.released, shards=shards)
    assert_loads(Checkpoint.open(directory, network.geometry), network.truth, (1, 4), BF16)


def test_multi_token_prediction_tensors_are_left_aside(network, write: Callable[..., Path]) -> None:
    extra = {"mtp.0.e_proj.weight": torch.zeros(2, 2), "model.mtp.1.norm.weight": torch.zeros(2)}
    checkpoint = Checkpoint.open(write(network.released | extra), network.geometry)
    assert sorted(checkpoint.inventory.ignored) == sorted(extra)


def naive_fp8(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    wide = scales.float().repeat_interleave(128, -2).repeat_interleave(128, -1)
    return codes.float() * wide[..., : codes.shape[-2], : codes.shape[-1]]


QUANTISED = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3")


def is_quantised(name: str) -> bool:
    return any(f".{leaf}.weight" in name for leaf in QUANTISED) and "compressor" not in name


def quantised(
    network, *, scale_suffix: str, scale_dtype: torch.dtype, fp4_experts: bool
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Released tensors in blocks, and the values they stand for."""
    stored, values = {}, {}
    for name, tensor in network.released.items():
        if not is_quantised(name):
            stored[name] = values[name] = tensor
            continue
        if fp4_experts and ".experts." in name:
            codes, scales = quantize_fp4(tensor)
            values[name] = dequantize_fp4(codes, scales)
            codes = codes.view(torch.int8)
        else:
            codes, scales = quantize_fp8_blocks(tensor)
            values[name] = naive_fp8(codes, scales)
        stored[name] = codes
        stored[name.removesuffix(".weight") + scale_suffix] = scales.to(scale_dtype).contiguous()
    return stored, values


def truth_with(network, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The model's tensors with the values of quantised ones put in their place."""
    truth = {name: tensor.clone() for name, tensor in network.truth.items()}
    renamed = {
        "wq_a": "self_attn.q_a_proj.weight",
        "wq_b": "self_attn.q_b_proj.weight",
        "wkv": "self_attn.kv_proj.weight",
        "wo_a": "self_attn.o_a_proj.weight",
        "wo_b": "self_attn.o_b_proj.weight",
    }
    width = network.geometry.expert_width
    for name, tensor in values.items():
        if not is_quantised(name):
            continue
        parts = name.split(".")
        layer, leaf = f"layers.{parts[1]}.", parts[-2]
        if parts[3] == "indexer":
            truth[f"{layer}self_attn.compressor.indexer.q_b_proj.weight"] = tensor
        elif parts[3] == "shared_experts":
            leaf = {"w1": "gate", "w2": "down", "w3": "up"}[leaf]
            truth[f"{layer}mlp.shared_experts.{leaf}_proj.weight"] = tensor
        elif parts[3] == "experts":
            fused = truth[f"{layer}mlp.experts." + ("down_proj" if leaf == "w2" else "gate_up_proj")][int(parts[4])]
            rows = {"w1": fused[:width], "w3": fused[width:], "w2": fused}[leaf]
            rows.copy_(tensor)
        else:
            truth[layer + renamed[leaf]] = tensor
    return truth


@pytest.mark.parametrize("fp4_experts", [False, True])
@pytest.mark.parametrize(("suffix", "scale_dtype"), [(".scale", torch.float8_e8m0fnu), (".weight_scale_inv", F32)])
def test_block_formats_and_slices_that_cut_blocks(
    network, write: Callable[..., Path], suffix: str, scale_dtype: torch.dtype, fp4_experts: bool
) -> None:
    stored, values = quantised(network, scale_suffix=suffix, scale_dtype=scale_dtype, fp4_experts=fp4_experts)
    assert len(stored) > len(network.released)
    checkpoint = Checkpoint.open(write(stored, shards=2), network.geometry)
    truth = truth_with(network, values)
    assert_loads(checkpoint, truth, (1, 2, 4), F32)
    assert_loads(checkpoint, truth, (4,), BF16)


@pytest.mark.parametrize("fp4", [False, True])
def test_fused_experts_in_blocks(network, write: Callable[..., Path], fp4: bool) -> None:
    tensors = {
        (name if name.startswith("lm_head") else f"model.{name}"): tensor for name, tensor in network.truth.items()
    }
    truth = {name: tensor.clone() for name, tensor in network.truth.items()}
    quantise, restore = (quantize_fp4, dequantize_fp4) if fp4 else (quantize_fp8_blocks, naive_fp8)
    for name in [name for name in tensors if ".experts." in name]:
        pairs = [quantise(expert) for expert in tensors[name]]
        # uint8 views: stacking is not implemented for every 8-bit float.
        stacked = [torch.stack([part.view(torch.uint8) for part in parts]) for parts in zip(*pairs, strict=True)]
        tensors[name] = stacked[0] if fp4 else stacked[0].view(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = stacked[1].view(torch.float8_e8m0fnu)
        truth[name.removeprefix("model.")] = torch.stack([restore(*pair) for pair in pairs])
    assert_loads(Checkpoint.open(write(tensors), network.geometry), truth, (1, 4), F32)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_half_precision_files(network, write: Callable[..., Path], stored: torch.dtype) -> None:
    halves = {n: t if t.dtype == torch.int64 else t.to(stored) for n, t in network.released.items()}
    truth = {n: t if t.dtype == torch.int64 else t.to(stored).float() for n, t in network.truth.items()}
    checkpoint = Checkpoint.open(write(halves), network.geometry)
    assert_loads(checkpoint, truth, (2,), F32)
    assert_loads(checkpoint, truth, (2,), BF16)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_bytes_are_those_of_the_tensors_loaded(network, write: Callable[..., Path], dtype: torch.dtype) -> None:
    checkpoint = Checkpoint.open(write(network.released), network.geometry)
    for size in (1, 2, 4):
        for rank in range(size):
            parts = [checkpoint.load_layer(layer, rank, size, dtype) for layer in range(network.geometry.layers)]
            parts.append(checkpoint.load_shared(rank, size, dtype))
            loaded = sum(tensor.nbytes for part in parts for tensor in part.values())
            assert checkpoint.tensor_bytes(rank, size, dtype) == loaded
            assert rank_bytes(network.geometry, rank, size, dtype) == loaded


def test_specs_count_every_parameter(network) -> None:
    g = network.geometry
    specs = [*shared_specs(g), *(spec for layer in range(g.layers) for spec in layer_specs(g, layer))]
    counted = sum(math.prod(spec.shape) for spec in specs)
    assert counted == sum(tensor.numel() for tensor in network.truth.values())


@pytest.mark.parametrize("size", [0, 3, 8])
def test_ranks_must_divide_the_groups(network, write: Callable[..., Path], size: int) -> None:
    checkpoint = Checkpoint.open(write(network.released), network.geometry)
    with pytest.raises(CheckpointError, match=r"output groups, expected one of \[1, 2, 4\]"):
        checkpoint.load_layer(0, 0, size, F32)


@pytest.mark.parametrize(("layer", "rank", "dtype"), [(4, 0, F32), (-1, 0, F32), (0, 2, F32), (0, 0, torch.float16)])
def test_impossible_arguments(network, write: Callable[..., Path], layer: int, rank: int, dtype: torch.dtype) -> None:
    checkpoint = Checkpoint.open(write(network.released), network.geometry)
    with pytest.raises(CheckpointError, match="expected"):
        checkpoint.load_layer(layer, rank, 2, dtype)


def test_tensors_outlive_the_files(network, write: Callable[..., Path]) -> None:
    directory = write(network.released)
    loaded = Checkpoint.open(directory, network.geometry).load_layer(0, 0, 1, F32)
    path = directory / "model.safetensors"
    with path.open("r+b") as stream:
        stream.write(b"\xff" * path.stat().st_size)
    assert torch.equal(loaded["attn.q_a"], network.truth["layers.0.self_attn.q_a_proj.weight"])


def test_digests_are_shared_between_ranks_and_see_every_bit(network, write: Callable[..., Path]) -> None:
    directory = write(network.released, shards=3)
    (directory / "config.json").write_text("{}")
    (directory / "tokenizer.json").write_text("{}")
    (directory / "README.md").write_text("not content")
    checkpoint = Checkpoint.open(directory, network.geometry)
    files = checkpoint.content_files
    assert len(files) == 5
    assert {"config.json", "tokenizer.json"} < set(files)
    parts = [checkpoint.content_digests(part) for part in even_split(len(files), 2)]
    assert checkpoint.fingerprint(parts[0] | parts[1]) == checkpoint.fingerprint(checkpoint.content_digests(range(5)))
    before = checkpoint.fingerprint(parts[0] | parts[1])
    for file in files:
        path = directory / file
        original = path.read_bytes()
        path.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
        assert checkpoint.fingerprint(checkpoint.content_digests(range(5))) != before, file
        path.write_bytes(original)
    with pytest.raises(CheckpointError, match="difference"):
        checkpoint.fingerprint(parts[0])
    with pytest.raises(CheckpointError, match="no such content file"):
        checkpoint.content_digests([5])
    (directory / files[0]).unlink()
    with pytest.raises(CheckpointError, match=files[0].replace(".", r"\.")):
        checkpoint.content_digests([0])
