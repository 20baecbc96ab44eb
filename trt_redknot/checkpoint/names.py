"""Names of tensors in files. The only place that knows them.

Three styles name the same tensors: the released checkpoints' own, transformers' module names, and what transformers'
`save_pretrained` writes, which is a mixture. Names are resolved one by one, so mixtures are fine. A name resolves to a
*piece*: a canonical name (`layers.3.attn.q_a`), or a part of one where files hold experts one by one
(`layers.3.experts.17.up`). Tensors of the multi-token-prediction layers (`mtp.*`) are not part of the network this
package runs; they are ignored by design.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# Canonical name: names in files, the released one first.
_LAYER_NAMES: dict[str, tuple[str, ...]] = {
    "attn_hc.fn": ("hc_attn_fn", "attn_hc.fn"),
    "attn_hc.base": ("hc_attn_base", "attn_hc.base"),
    "attn_hc.scale": ("hc_attn_scale", "attn_hc.scale"),
    "attn_norm": ("attn_norm.weight", "input_layernorm.weight"),
    "attn.q_a": ("attn.wq_a.weight", "self_attn.q_a_proj.weight"),
    "attn.q_norm": ("attn.q_norm.weight", "self_attn.q_a_norm.weight"),
    "attn.q_b": ("attn.wq_b.weight", "self_attn.q_b_proj.weight"),
    "attn.kv": ("attn.wkv.weight", "self_attn.kv_proj.weight"),
    # transformers' save_pretrained shortens this norm's name like the compressor's.
    "attn.kv_norm": ("attn.kv_norm.weight", "attn.norm.weight", "self_attn.kv_norm.weight"),
    "attn.sinks": ("attn.attn_sink", "self_attn.sinks"),
    "attn.o_a": ("attn.wo_a.weight", "self_attn.o_a_proj.weight"),
    "attn.o_b": ("attn.wo_b.weight", "self_attn.o_b_proj.weight"),
    "compressor.kv": ("attn.compressor.wkv.weight", "self_attn.compressor.kv_proj.weight"),
    "compressor.gate": ("attn.compressor.wgate.weight", "self_attn.compressor.gate_proj.weight"),
    "compressor.ape": ("attn.compressor.ape", "self_attn.compressor.position_bias"),
    "compressor.norm": ("attn.compressor.norm.weight", "self_attn.compressor.kv_norm.weight"),
    "indexer.kv": ("attn.indexer.compressor.wkv.weight", "self_attn.compressor.indexer.kv_proj.weight"),
    "indexer.gate": ("attn.indexer.compressor.wgate.weight", "self_attn.compressor.indexer.gate_proj.weight"),
    "indexer.ape": ("attn.indexer.compressor.ape", "self_attn.compressor.indexer.position_bias"),
    "indexer.norm": ("attn.indexer.compressor.norm.weight", "self_attn.compressor.indexer.kv_norm.weight"),
    "indexer.q_b": ("attn.indexer.wq_b.weight", "self_attn.compressor.indexer.q_b_proj.weight"),
    "indexer.weights": (
        "attn.indexer.weights_proj.weight",
        "self_attn.compressor.indexer.scorer.weights_proj.weight",
    ),
    "ffn_hc.fn": ("hc_ffn_fn", "ffn_hc.fn"),
    "ffn_hc.base": ("hc_ffn_base", "ffn_hc.base"),
    "ffn_hc.scale": ("hc_ffn_scale", "ffn_hc.scale"),
    "ffn_norm": ("ffn_norm.weight", "post_attention_layernorm.weight"),
    "router.weight": ("ffn.gate.weight", "mlp.gate.weight"),
    "router.bias": ("ffn.gate.bias", "mlp.gate.e_score_correction_bias"),
    "router.tid2eid": ("ffn.gate.tid2eid", "mlp.gate.tid2eid"),
    "experts.gate_up": ("ffn.experts.gate_up_proj", "mlp.experts.gate_up_proj"),
    "experts.down": ("ffn.experts.down_proj", "mlp.experts.down_proj"),
    "experts.#.gate": ("ffn.experts.#.w1.weight", "mlp.experts.#.gate_proj.weight"),
    "experts.#.up": ("ffn.experts.#.w3.weight", "mlp.experts.#.up_proj.weight"),
    "experts.#.down": ("ffn.experts.#.w2.weight", "mlp.experts.#.down_proj.weight"),
    "shared.gate": ("ffn.shared_experts.w1.weight", "mlp.shared_experts.gate_proj.weight"),
    "shared.up": ("ffn.shared_experts.w3.weight", "mlp.shared_experts.up_proj.weight"),
    "shared.down": ("ffn.shared_experts.w2.weight", "mlp.shared_experts.down_proj.weight"),
}
_SHARED_NAMES: dict[str, tuple[str, ...]] = {
    "embed": ("embed.weight", "embed_tokens.weight"),
    "head": ("head.weight", "lm_head.weight"),
    "norm": ("norm.weight",),
    "hc_head.fn": ("hc_head_fn", "hc_head.hc_fn"),
    "hc_head.base": ("hc_head_base", "hc_head.hc_base"),
    "hc_head.scale": ("hc_head_scale", "hc_head.hc_scale"),
}
_LAYER_PIECES = {name: canonical for canonical, names in _LAYER_NAMES.items() for name in names}
_SHARED_PIECES = {name: canonical for canonical, names in _SHARED_NAMES.items() for name in names}

# Leading zeros are no second spelling of the same layer or expert.
_LAYER = re.compile(r"layers\.(0|[1-9][0-9]{0,5})\.(.+)", re.ASCII | re.DOTALL)
_EXPERT = re.compile(r"((?:ffn|mlp)\.experts)\.(0|[1-9][0-9]{0,5})\.(.+)", re.ASCII | re.DOTALL)
_IGNORED = re.compile(r"(?:^|\.)mtp\.")
# Suffix of a tensor of block scales, and what stands in its place in the name of the tensor it scales.
_SCALES = ((".weight_scale_inv", (".weight",)), ("_scale_inv", ("",)), (".scale", (".weight", "")))


@dataclass(frozen=True, slots=True)
class Piece:
    """What a tensor of a file is: a piece's name, and whether it holds the piece's block scales."""

    name: str
    is_scale: bool = False


def is_ignored(name: str) -> bool:
    """Whether a tensor belongs to the multi-token-prediction layers, which the engine does not run."""
    return _IGNORED.search(name) is not None


def resolve(name: str) -> Piece | None:
    """The piece that a tensor in a file holds, or None where the name is unknown."""
    bare = name.removeprefix("model.")
    direct = _lookup(bare)
    if direct is not None:
        return Piece(direct)
    for suffix, replacements in _SCALES:
        if bare.endswith(suffix):
            for replacement in replacements:
                scaled = _lookup(bare.removesuffix(suffix) + replacement)
                if scaled is not None:
                    return Piece(scaled, is_scale=True)
    return None


def released_name(piece: Piece) -> str:
    """The name a piece has in released checkpoints, for messages and for writing."""
    layer = _LAYER.fullmatch(piece.name)
    if layer is None:
        name = _SHARED_NAMES[piece.name][0]
    else:
        index, rest = layer.groups()
        expert = re.fullmatch(r"experts\.([0-9]+)\.(.+)", rest)
        key = f"experts.#.{expert[2]}" if expert else rest
        name = f"layers.{index}." + _LAYER_NAMES[key][0].replace("#", expert[1] if expert else "")
    if not piece.is_scale:
        return name
    return name.removesuffix(".weight") + (".scale" if name.endswith(".weight") else "_scale_inv")


def _lookup(bare: str) -> str | None:
    layer = _LAYER.fullmatch(bare)
    if layer is None:
        return _SHARED_PIECES.get(bare)
    index, rest = layer.groups()
    expert = _EXPERT.fullmatch(rest)
    if expert is not None:
        parent, number, leaf = expert.groups()
        canonical = _LAYER_PIECES.get(f"{parent}.#.{leaf}")
        return None if canonical is None else f"layers.{index}." + canonical.replace("#", number)
    canonical = _LAYER_PIECES.get(rest)
    return None if canonical is None or "#" in rest else f"layers.{index}.{canonical}"
