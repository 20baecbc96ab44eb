"""Names and shapes of the published checkpoints: families, counts and stored shapes as their index files list them."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from trt_redknot.checkpoint import layer_specs, shared_specs
from trt_redknot.checkpoint.inventory import expert_parts, stored_shape
from trt_redknot.checkpoint.names import Piece, is_ignored, released_name, resolve
from trt_redknot.checkpoint.specs import Storage
from trt_redknot.config import released_geometry

FAMILIES = {
    "flash": {
        "embed.weight": (1, (129280, 4096)),
        "head.weight": (1, (129280, 4096)),
        "norm.weight": (1, (4096,)),
        "hc_head_base": (1, (4,)),
        "hc_head_fn": (1, (4, 16384)),
        "hc_head_scale": (1, (1,)),
        "layers.N.attn.attn_sink": (43, (64,)),
        "layers.N.attn.q_norm.weight": (43, (1024,)),
        "layers.N.attn.kv_norm.weight": (43, (512,)),
        "layers.N.attn.wq_a.weight": (43, (1024, 4096)),
        "layers.N.attn.wq_b.weight": (43, (32768, 1024)),
        "layers.N.attn.wkv.weight": (43, (512, 4096)),
        "layers.N.attn.wo_a.weight": (43, (8192, 4096)),
        "layers.N.attn.wo_b.weight": (43, (4096, 8192)),
        "layers.N.attn.compressor.ape": (41, None),
        "layers.N.attn.compressor.norm.weight": (41, (512,)),
        "layers.N.attn.compressor.wgate.weight": (41, None),
        "layers.N.attn.compressor.wkv.weight": (41, None),
        "layers.N.attn.indexer.compressor.ape": (21, (4, 256)),
        "layers.N.attn.indexer.compressor.norm.weight": (21, (128,)),
        "layers.N.attn.indexer.compressor.wgate.weight": (21, (256, 4096)),
        "layers.N.attn.indexer.compressor.wkv.weight": (21, (256, 4096)),
        "layers.N.attn.indexer.weights_proj.weight": (21, (64, 4096)),
        "layers.N.attn.indexer.wq_b.weight": (21, (8192, 1024)),
        "layers.N.ffn.experts.N.w1.weight": (11008, (2048, 4096)),
        "layers.N.ffn.experts.N.w2.weight": (11008, (4096, 2048)),
        "layers.N.ffn.experts.N.w3.weight": (11008, (2048, 4096)),
        "layers.N.ffn.gate.weight": (43, (256, 4096)),
        "layers.N.ffn.gate.bias": (40, (256,)),
        "layers.N.ffn.gate.tid2eid": (3, (129280, 6)),
        "layers.N.ffn.shared_experts.w1.weight": (43, (2048, 4096)),
        "layers.N.ffn.shared_experts.w2.weight": (43, (4096, 2048)),
        "layers.N.ffn.shared_experts.w3.weight": (43, (2048, 4096)),
        "layers.N.attn_norm.weight": (43, (4096,)),
        "layers.N.ffn_norm.weight": (43, (4096,)),
        "layers.N.hc_attn_base": (43, (24,)),
        "layers.N.hc_attn_fn": (43, (24, 16384)),
        "layers.N.hc_attn_scale": (43, (3,)),
        "layers.N.hc_ffn_base": (43, (24,)),
        "layers.N.hc_ffn_fn": (43, (24, 16384)),
        "layers.N.hc_ffn_scale": (43, (3,)),
    },
    "pro": {
        "hc_head_fn": (1, (4, 28672)),
        "layers.N.attn.attn_sink": (61, (128,)),
        "layers.N.attn.wq_a.weight": (61, (1536, 7168)),
        "layers.N.attn.wq_b.weight": (61, (65536, 1536)),
        "layers.N.attn.wo_a.weight": (61, (16384, 4096)),
        "layers.N.attn.wo_b.weight": (61, (7168, 16384)),
        "layers.N.attn.compressor.norm.weight": (61, (512,)),
        "layers.N.attn.indexer.wq_b.weight": (30, (8192, 1536)),
        "layers.N.ffn.experts.N.w1.weight": (61 * 384, (3072, 7168)),
        "layers.N.ffn.experts.N.w2.weight": (61 * 384, (7168, 3072)),
        "layers.N.ffn.gate.bias": (58, (384,)),
        "layers.N.ffn.gate.tid2eid": (3, (129280, 6)),
        "layers.N.ffn.shared_experts.w2.weight": (61, (7168, 3072)),
    },
}


@pytest.mark.parametrize("name", ["flash", "pro"])
def test_families_of_the_published_index(name: str) -> None:
    geometry = released_geometry(name)
    counts: Counter[str] = Counter()
    shapes: dict[str, set[tuple[int, ...]]] = {}
    prefixed = [("", shared_specs(geometry))]
    prefixed += [(f"layers.{layer}.", layer_specs(geometry, layer)) for layer in range(geometry.layers)]
    for prefix, specs in prefixed:
        for spec in specs:
            pieces = [(prefix + spec.name, stored_shape(spec))]
            if spec.storage is Storage.EXPERTS:
                experts, rows, columns = spec.shape
                parts = expert_parts(spec.name, rows)
                pieces = [
                    (f"{prefix}experts.{expert}.{part}", (count, columns))
                    for expert in range(experts)
                    for part, count in parts
                ]
            for piece, shape in pieces:
                published = released_name(Piece(piece))
                assert resolve(published) == Piece(piece)
                family = re.sub(r"\.\d+\.", ".N.", published)
                counts[family] += 1
                shapes.setdefault(family, set()).add(shape)
    for family, (count, shape) in FAMILIES[name].items():
        assert counts[family] == count, family
        assert shape is None or shapes[family] == {shape}, family
    if name == "flash":
        assert counts.keys() == FAMILIES[name].keys()
    assert shapes["layers.N.attn.compressor.ape"] == {(4, 1024), (128, 512)}


@pytest.mark.parametrize(
    ("name", "piece"),
    [
        ("layers.3.attn.wq_a.scale", Piece("layers.3.attn.q_a", is_scale=True)),
        ("layers.3.attn.wq_a.weight_scale_inv", Piece("layers.3.attn.q_a", is_scale=True)),
        ("model.layers.3.self_attn.q_a_proj.weight_scale_inv", Piece("layers.3.attn.q_a", is_scale=True)),
        ("layers.0.ffn.experts.17.w3.scale", Piece("layers.0.experts.17.up", is_scale=True)),
        ("layers.0.ffn.experts.17.w2.weight", Piece("layers.0.experts.17.down")),
        ("model.layers.0.mlp.experts.down_proj_scale_inv", Piece("layers.0.experts.down", is_scale=True)),
        ("model.layers.0.attn_hc.scale", Piece("layers.0.attn_hc.scale")),
        ("layers.0.hc_attn_scale", Piece("layers.0.attn_hc.scale")),
        ("hc_head_scale", Piece("hc_head.scale")),
        ("layers.0.attn.norm.weight", Piece("layers.0.attn.kv_norm")),
        ("layers.0.attn.compressor.norm.weight", Piece("layers.0.compressor.norm")),
        ("lm_head.weight", Piece("head")),
        ("model.embed_tokens.weight", Piece("embed")),
    ],
)
def test_names(name: str, piece: Piece) -> None:
    assert resolve(name) == piece


@pytest.mark.parametrize(
    "name",
    [
        "",
        "layers.3",
        "layers.03.attn.wq_a.weight",
        "layers.-1.attn.wq_a.weight",
        "layers.٣.attn.wq_a.weight",
        "layers.3.attn.wq_a.weight\n",
        "layers.3.attn.wq_a.bias",
        "layers.3.ffn.experts.#.w1.weight",
        "layers.3.ffn.experts.00.w1.weight",
        "layers.3.ffn.experts.gate_up_proj.weight",
        "model.model.norm.weight",
        "layers.3.attn.wq_a.scale.scale",
    ],
)
def test_unknown_names(name: str) -> None:
    assert resolve(name) is None


@pytest.mark.parametrize(("name", "ignored"), [("mtp.0.norm.weight", True), ("model.mtp.0.x", True), ("smtp.0", False)])
def test_multi_token_prediction_is_ignored(name: str, ignored: bool) -> None:
    assert is_ignored(name) == ignored
