"""The kind of every layer from `config.json`: attention (with compression ratios) and router, in both key styles."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from trt_redknot.config.geometry import AttentionKind, RouterKind
from trt_redknot.config.keys import CheckpointKeys, CompressRates
from trt_redknot.errors import ConfigError

Entry = TypeVar("Entry")

_ATTENTION = {
    "sliding_attention": AttentionKind.SLIDING,
    "compressed_sparse_attention": AttentionKind.CSA,
    "heavily_compressed_attention": AttentionKind.HCA,
}
_ROUTER = {"hash_moe": RouterKind.HASH, "moe": RouterKind.LEARNED}
_DEFAULT_HASH_LAYERS = 3
# A ratio of 0 or 1 pools nothing: the layer has no compressor.
_LARGEST_RATIO_WITHOUT_COMPRESSOR = 1


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """Kinds by layer, and tokens pooled per compressed entry for the two compressed kinds."""

    attention_kinds: tuple[AttentionKind, ...]
    router_kinds: tuple[RouterKind, ...]
    csa_ratio: int
    hca_ratio: int


def layer_plan(keys: CheckpointKeys, source: Path | str) -> LayerPlan:
    """Kinds of the `num_hidden_layers` layers.

    `layer_types` names the kinds; `compress_ratios` names a ratio by layer. Which ratio is CSA and which HCA is told by
    `compress_rates` (or `compress_rate_csa`, `compress_rate_hca`), else by `layer_types`, else 4 is CSA and 128 is HCA,
    else the smaller of the two ratios is CSA and the larger HCA.

    Raises:
        ConfigError: lists of the wrong length, an ambiguous or unknown ratio, or keys that contradict each other.
    """
    kinds = None if keys.layer_types is None else _cut(keys, "layer_types", keys.layer_types, source)
    ratios = None if keys.compress_ratios is None else _cut(keys, "compress_ratios", keys.compress_ratios, source)
    named = None if kinds is None else tuple(_ATTENTION[kind] for kind in kinds)
    csa, hca = _rates(keys, named, ratios, source)
    if ratios is not None:
        by_ratio = _kinds_of_ratios(ratios, named, csa, hca, source)
        if named is not None and by_ratio != named:
            layer = next(index for index, kind in enumerate(named) if by_ratio[index] is not kind)
            raise ConfigError(
                f"keys 'compress_ratios' and 'layer_types' contradict each other at layer {layer}",
                expected=f"the ratio of a {named[layer]} layer (csa {csa}, hca {hca}, sliding 0 or 1)",
                found=ratios[layer],
                path=source,
            )
        named = by_ratio
    return LayerPlan(
        attention_kinds=named if named is not None else _default_kinds(keys.num_hidden_layers),
        router_kinds=_router_kinds(keys, source),
        csa_ratio=csa,
        hca_ratio=hca,
    )


def _cut(keys: CheckpointKeys, name: str, values: list[Entry], source: Path | str) -> list[Entry]:
    """The network's own entries of a list that may go on with those of the multi-token-prediction layers."""
    layers, extra = keys.num_hidden_layers, keys.num_nextn_predict_layers
    if not layers <= len(values) <= layers + extra:
        raise ConfigError(
            f"key {name!r} has the wrong length",
            expected=f"{layers} entries, or up to {layers + extra} with 'num_nextn_predict_layers'",
            found=len(values),
            path=source,
        )
    return values[:layers]


def _rates(
    keys: CheckpointKeys, named: tuple[AttentionKind, ...] | None, ratios: list[int] | None, source: Path | str
) -> tuple[int, int]:
    """Tokens per compressed entry of (CSA, HCA) layers."""
    csa = _legacy_rate(keys, "compress_rate_csa", "compressed_sparse_attention", source)
    hca = _legacy_rate(keys, "compress_rate_hca", "heavily_compressed_attention", source)
    defaults = CompressRates()
    csa_default, hca_default = defaults.compressed_sparse_attention, defaults.heavily_compressed_attention
    if ratios is not None and csa is None and hca is None:
        if named is not None:
            csa = _ratio_of(AttentionKind.CSA, named, ratios, source)
            hca = _ratio_of(AttentionKind.HCA, named, ratios, source)
        else:
            csa, hca = _ordered_ratios(ratios, (csa_default, hca_default), source)
    return (csa if csa is not None else csa_default, hca if hca is not None else hca_default)


def _legacy_rate(keys: CheckpointKeys, scalar: str, layer_type: str, source: Path | str) -> int | None:
    one: int | None = getattr(keys, scalar)
    if keys.compress_rates is None:
        return one
    other: int = getattr(keys.compress_rates, layer_type)
    if one is not None and one != other:
        raise ConfigError(
            f"keys {scalar!r} and 'compress_rates.{layer_type}' contradict each other",
            expected=other,
            found=one,
            path=source,
        )
    return other


def _ratio_of(
    kind: AttentionKind, named: tuple[AttentionKind, ...], ratios: list[int], source: Path | str
) -> int | None:
    found = sorted({ratio for ratio, here in zip(ratios, named, strict=True) if here is kind})
    if not found:
        return None
    if len(found) > 1 or found[0] <= _LARGEST_RATIO_WITHOUT_COMPRESSOR:
        raise ConfigError(
            "keys 'compress_ratios' and 'layer_types' contradict each other",
            expected=f"one ratio of at least 2 for all {kind} layers",
            found=found,
            path=source,
        )
    return found[0]


def _ordered_ratios(ratios: list[int], defaults: tuple[int, int], source: Path | str) -> tuple[int, int]:
    found = sorted({ratio for ratio in ratios if ratio > _LARGEST_RATIO_WITHOUT_COMPRESSOR})
    if set(found) <= set(defaults):
        return defaults
    if len(found) != 2:
        raise ConfigError(
            "key 'compress_ratios' does not tell CSA from HCA layers",
            expected=f"{defaults[0]} and {defaults[1]}, or two ratios of which the smaller is CSA and the larger HCA",
            found=found,
            path=source,
            remedy="Add 'compress_rates', which names the ratio of each layer type.",
        )
    return found[0], found[1]


def _kinds_of_ratios(
    ratios: list[int], named: tuple[AttentionKind, ...] | None, csa: int, hca: int, source: Path | str
) -> tuple[AttentionKind, ...]:
    kinds = []
    for layer, ratio in enumerate(ratios):
        if ratio <= _LARGEST_RATIO_WITHOUT_COMPRESSOR:
            kinds.append(AttentionKind.SLIDING)
        elif csa == hca == ratio and named is not None and named[layer] is not AttentionKind.SLIDING:
            kinds.append(named[layer])
        elif ratio in (csa, hca) and csa != hca:
            kinds.append(AttentionKind.CSA if ratio == csa else AttentionKind.HCA)
        else:
            raise ConfigError(
                f"key 'compress_ratios' has an unknown ratio at layer {layer}",
                expected=f"0 or 1 (no compressor), {csa} (CSA) or {hca} (HCA)",
                found=ratio,
                path=source,
            )
    return tuple(kinds)


def _default_kinds(layers: int) -> tuple[AttentionKind, ...]:
    """transformers' schedule for a config that names none: HCA twice, then HCA and CSA in turn."""
    kinds = (AttentionKind.HCA, AttentionKind.CSA)
    return tuple(AttentionKind.HCA if layer < 2 else kinds[layer % 2] for layer in range(layers))


def _router_kinds(keys: CheckpointKeys, source: Path | str) -> tuple[RouterKind, ...]:
    layers = keys.num_hidden_layers
    hashed = keys.num_hash_layers
    if keys.mlp_layer_types is None:
        count = min(layers, _DEFAULT_HASH_LAYERS if hashed is None else hashed)
        return (RouterKind.HASH,) * count + (RouterKind.LEARNED,) * (layers - count)
    kinds = tuple(_ROUTER[kind] for kind in _cut(keys, "mlp_layer_types", keys.mlp_layer_types, source))
    if hashed is not None and kinds != tuple(
        RouterKind.HASH if layer < hashed else RouterKind.LEARNED for layer in range(layers)
    ):
        raise ConfigError(
            "keys 'num_hash_layers' and 'mlp_layer_types' contradict each other",
            expected=f"'hash_moe' in the first {hashed} layers and 'moe' after them",
            found=[kind.value for kind in kinds],
            path=source,
        )
    return kinds
