"""The two rope tables from `config.json`: sliding-only layers (`main`) and compressed layers (`compress`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trt_redknot.config.documents import validated
from trt_redknot.config.geometry import RopeGeometry
from trt_redknot.config.keys import CheckpointKeys, NestedRopeKeys, RopeKeys
from trt_redknot.errors import ConfigError

_DEFAULT_ROTARY_FACTOR = 64 / 512


@dataclass(frozen=True, kw_only=True)
class RopePlan:
    """Rotated channels of a head, and the tables of both kinds of layer."""

    dim: int
    sliding: RopeGeometry
    compressed: RopeGeometry


def rope_plan(keys: CheckpointKeys, source: Path | str) -> RopePlan:
    """Rope tables of the network.

    Flat keys: `rope_theta` without scaling for sliding layers; `compress_rope_theta` with `rope_scaling` for compressed
    ones. Nested `rope_parameters` say both, and win over the flat thetas, as they do in transformers.

    Raises:
        ConfigError: an unknown key or type, a missing factor, or rotary dimensions that contradict each other.
    """
    name, scaling = _scaling(keys, source)
    if "main" in scaling or "compress" in scaling:
        nested = _checked(NestedRopeKeys, name, scaling, source)
        main, compress = nested.main, nested.compress
        for label, part in (("main", main), ("compress", compress)):
            _require(part.rope_theta, f"{name}.{label}.rope_theta", source)
            if keys.partial_rotary_factor is None:
                _require(part.partial_rotary_factor, f"{name}.{label}.partial_rotary_factor", source)
    else:
        flat = _checked(RopeKeys, name, scaling, source)
        main = RopeKeys(rope_theta=keys.rope_theta)
        # Checkpoints in the flat style never multiply cos and sin by YaRN's own attention factor.
        attention_factor = 1.0 if flat.attention_factor is None else flat.attention_factor
        compress = flat.model_copy(
            update={"rope_theta": keys.compress_rope_theta, "attention_factor": attention_factor}
        )
    dim = _rotary_dim(keys, {f"{name}.main": main, f"{name}.compress": compress}, source)
    return RopePlan(
        dim=dim,
        sliding=_table(main, dim, keys.max_position_embeddings, f"{name}.main", source),
        compressed=_table(compress, dim, keys.max_position_embeddings, f"{name}.compress", source),
    )


def _scaling(keys: CheckpointKeys, source: Path | str) -> tuple[str, Mapping[str, Any]]:
    old, new = keys.rope_scaling, keys.rope_parameters
    if old and new and old != new:
        raise ConfigError(
            "keys 'rope_scaling' and 'rope_parameters' contradict each other", expected=old, found=new, path=source
        )
    return ("rope_scaling", old) if old else ("rope_parameters", new or {})


def _checked(model: type[Any], name: str, values: Mapping[str, Any], source: Path | str) -> Any:
    return validated(model, values, f"{name} of {source}")


def _require(value: float | None, key: str, source: Path | str) -> None:
    if value is None:
        raise ConfigError(f"key {key!r} is missing", path=source, remedy="Nested rope parameters state it themselves.")


def _rotary_dim(keys: CheckpointKeys, parts: Mapping[str, RopeKeys], source: Path | str) -> int:
    """Rotated channels: every key that says it must say the same. Rounded down, as transformers does."""
    head_dim = keys.head_dim
    said = {"partial_rotary_factor": keys.partial_rotary_factor}
    said |= {f"{name}.partial_rotary_factor": part.partial_rotary_factor for name, part in parts.items()}
    dims = {key: int(head_dim * factor) for key, factor in said.items() if factor is not None}
    if not dims and keys.qk_rope_head_dim is None:
        dims = {"partial_rotary_factor": int(head_dim * _DEFAULT_ROTARY_FACTOR)}
    if keys.qk_rope_head_dim is not None:
        dims["qk_rope_head_dim"] = int(head_dim * (keys.qk_rope_head_dim / head_dim))
        if dims["qk_rope_head_dim"] != keys.qk_rope_head_dim:
            raise ConfigError(
                "key 'qk_rope_head_dim' cannot be expressed as a share of 'head_dim'",
                expected=f"a value that survives head_dim * (value / head_dim) for head_dim {head_dim}",
                found=keys.qk_rope_head_dim,
                path=source,
            )
    if len(set(dims.values())) > 1:
        raise ConfigError(
            f"keys {', '.join(map(repr, dims))} contradict each other",
            expected="one rotary dimension",
            found=list(dims.values()),
            path=source,
        )
    key, dim = next(iter(dims.items()))
    if dim < 2 or dim % 2 or dim > head_dim:
        raise ConfigError(
            f"key {key!r} gives an impossible rotary dimension",
            expected=f"an even number from 2 to head_dim {head_dim}",
            found=dim,
            path=source,
        )
    return dim


def _table(part: RopeKeys, dim: int, max_positions: int, name: str, source: Path | str) -> RopeGeometry:
    assert part.rope_theta is not None, "the theta was checked or filled in"
    kind = part.rope_type or part.type or "default"
    if part.rope_type and part.type and part.rope_type != part.type:
        raise ConfigError(
            f"keys '{name}.rope_type' and '{name}.type' contradict each other",
            expected=part.rope_type,
            found=part.type,
            path=source,
        )
    if kind == "default":
        if part.factor is not None and part.factor != 1:
            raise ConfigError(
                f"key '{name}.factor' has no meaning without YaRN",
                expected=f"'{name}.rope_type' to be 'yarn'",
                found=part.factor,
                path=source,
            )
        return RopeGeometry(theta=part.rope_theta, dim=dim)
    original = part.original_max_position_embeddings or max_positions
    factor = part.factor if part.factor is not None else max_positions / original
    beta_fast, beta_slow = part.beta_fast or 32.0, part.beta_slow or 1.0
    if factor < 1 or beta_fast < beta_slow:
        raise ConfigError(
            f"key '{name}' describes no YaRN table",
            expected="factor at least 1 and beta_fast not below beta_slow",
            found=f"factor {factor}, beta_fast {beta_fast}, beta_slow {beta_slow}",
            path=source,
        )
    return RopeGeometry(
        theta=part.rope_theta,
        dim=dim,
        factor=factor,
        original_positions=original,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        attention_factor=_attention_factor(part, factor),
    )


def _attention_factor(part: RopeKeys, factor: float) -> float:
    """Nested keys without `attention_factor` mean YaRN's own, as in transformers."""
    if part.attention_factor is not None:
        return part.attention_factor

    def temperature(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if part.mscale and part.mscale_all_dim:
        return temperature(part.mscale) / temperature(part.mscale_all_dim)
    return temperature(1.0)
