"""Bytes a rank needs, from a geometry alone: weights, artifacts, caches and activations. No checkpoint is read."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum

import torch

from trt_redknot.artifacts.contents import artifact_parts
from trt_redknot.artifacts.formats import ArtifactFormat, TensorCodec
from trt_redknot.checkpoint.specs import Storage, TensorSpec, check_parallelism, layer_specs, shared_specs
from trt_redknot.config.geometry import AttentionKind, ModelGeometry
from trt_redknot.config.profile import SplitProfile

TOKENS_PER_ARTIFACT_UNIT = 1024
_SCALE_BLOCK = 128


class WeightDtype(StrEnum):
    """How matrices are held. FP8: those released in 8 bits or less, one scale byte per 128 x 128; the rest BF16."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FP8 = "fp8"


# Prefix of a tensor's name -> the class it is reported in.
_CLASSES = (
    ("embed", "embedding"),
    ("head", "head"),
    ("attn_hc", "hyper-connections"),
    ("ffn_hc", "hyper-connections"),
    ("hc_head", "hyper-connections"),
    ("attn_norm", "norms"),
    ("ffn_norm", "norms"),
    ("norm", "norms"),
    ("attn.", "attention"),
    ("compressor.", "compressor"),
    ("indexer.", "indexer"),
    ("router.", "router"),
    ("experts.", "routed experts"),
    ("shared.", "shared expert"),
)
# The compressors, the Indexer's key side, the routers, the embedding and the head are released in 16 bits or more.
_EIGHT_BIT = ("attn.q_a", "attn.q_b", "attn.kv", "attn.o_a", "attn.o_b", "indexer.q_b", "experts.", "shared.")


@dataclass(frozen=True, kw_only=True)
class ArtifactBytes:
    """Artifact bytes per 1024 tokens: `common` once for all ranks, `rank` by every rank."""

    common: int
    rank: int


@dataclass(frozen=True, kw_only=True)
class RuntimeBytes:
    """Device or host memory of one rank for one request of a given length.

    Attributes:
        streams: residual streams of its share of the rows.
        latents, entries, index_keys: caches, which every rank holds whole.
        temporaries: the larger of the attention and the expert stage for one chunk of rows; a lower bound, because
            an executor may keep more alive than the stage itself reads and writes.
    """

    streams: int
    latents: int
    entries: int
    index_keys: int
    temporaries: int

    @property
    def total(self) -> int:
        return self.streams + self.latents + self.entries + self.index_keys + self.temporaries


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes per rank; the rank with the most, where they do not divide evenly.

    Attributes:
        weights: class of tensors -> dtype -> bytes.
        artifacts: artifact format -> bytes per 1024 tokens.
        runtime: caches and activations at `length` tokens, `chunk_rows` rows at a time, in `activation_dtype`.
    """

    name: str
    tp_size: int
    length: int
    chunk_rows: int
    activation_dtype: str
    weights: Mapping[str, Mapping[str, int]]
    artifacts: Mapping[str, ArtifactBytes]
    runtime: RuntimeBytes

    def weight_total(self, dtype: WeightDtype) -> int:
        return sum(by_dtype[dtype] for by_dtype in self.weights.values())

    def to_json(self) -> dict[str, object]:
        data = asdict(self)
        data["weights_total"] = {dtype.value: self.weight_total(dtype) for dtype in WeightDtype}
        data["runtime"]["total"] = self.runtime.total
        return data


def estimate(
    geometry: ModelGeometry,
    profile: SplitProfile,
    *,
    tp_size: int,
    length: int,
    chunk_rows: int = 4096,
    activation_dtype: torch.dtype = torch.bfloat16,
) -> Estimate:
    """What rank 0, which never holds less than another, needs.

    Args:
        length: tokens of one request, prompt and answer together.
        chunk_rows: rows that go through a stage together.

    Raises:
        CheckpointError: `tp_size` does not divide the output groups.
    """
    check_parallelism(geometry, 0, tp_size)
    return Estimate(
        name=profile.name,
        tp_size=tp_size,
        length=length,
        chunk_rows=chunk_rows,
        activation_dtype=str(activation_dtype).removeprefix("torch."),
        weights=weight_bytes(geometry, tp_size),
        artifacts={form.value: _artifacts(geometry, profile, tp_size, form) for form in ArtifactFormat},
        runtime=runtime_bytes(geometry, tp_size, length, min(chunk_rows, length), activation_dtype),
    )


def weight_bytes(geometry: ModelGeometry, tp_size: int) -> dict[str, dict[str, int]]:
    """Class of tensors -> dtype -> bytes of a rank."""
    totals: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(map(str, WeightDtype), 0))
    for spec in _all_specs(geometry):
        for dtype in WeightDtype:
            totals[_class_of(spec.name)][dtype] += _held_bytes(spec, tp_size, dtype)
    return dict(sorted(totals.items(), key=lambda item: -item[1][WeightDtype.BFLOAT16]))


def _all_specs(geometry: ModelGeometry) -> Iterator[TensorSpec]:
    yield from shared_specs(geometry)
    for layer in range(geometry.layers):
        yield from layer_specs(geometry, layer)


def _class_of(name: str) -> str:
    return next(title for prefix, title in _CLASSES if name.startswith(prefix))


def _held_bytes(spec: TensorSpec, tp_size: int, dtype: WeightDtype) -> int:
    if dtype is WeightDtype.FP8 and spec.name.startswith(_EIGHT_BIT) and spec.storage is not Storage.EXACT:
        shape = spec.local_shape(0, tp_size)
        matrices, rows, columns = math.prod(shape[:-2]), shape[-2], shape[-1]
        scales = -(-rows // _SCALE_BLOCK) * -(-columns // _SCALE_BLOCK)
        return matrices * (rows * columns + scales)
    plain = torch.float32 if dtype is WeightDtype.FLOAT32 else torch.bfloat16
    return spec.loaded_bytes(0, tp_size, plain)


def _artifacts(geometry: ModelGeometry, profile: SplitProfile, tp_size: int, form: ArtifactFormat) -> ArtifactBytes:
    common = rank = 0
    for spec in artifact_parts(geometry, profile, TOKENS_PER_ARTIFACT_UNIT, tp_size):
        codec = TensorCodec.of(spec, form, geometry)
        stored = math.prod(codec.stored_shape(spec.shape)) * codec.stored_dtype.itemsize
        if spec.by_rank:
            rank += stored
        else:
            common += stored
    return ArtifactBytes(common=common, rank=rank)


def runtime_bytes(geometry: ModelGeometry, tp_size: int, length: int, chunk: int, dtype: torch.dtype) -> RuntimeBytes:
    """Caches and activations of a rank for one request of `length` tokens, `chunk` rows at a time, in `dtype`."""
    g, itemsize = geometry, dtype.itemsize
    entries = sum(length // g.ratio(layer) for layer in range(g.layers) if g.ratio(layer))
    attention = _attention_stage(g, tp_size, length, chunk, itemsize)
    experts = _expert_stage(g, tp_size, chunk, itemsize)
    csa_layers = sum(kind is AttentionKind.CSA for kind in g.attention_kinds)
    return RuntimeBytes(
        streams=-(-length // tp_size) * g.streams * g.hidden * itemsize,
        latents=g.layers * length * g.head_dim * itemsize,
        entries=entries * g.head_dim * itemsize,
        index_keys=csa_layers * (length // g.csa_ratio) * g.index_dim * itemsize,
        temporaries=max(attention, experts),
    )


def _attention_stage(g: ModelGeometry, tp_size: int, length: int, chunk: int, itemsize: int) -> int:
    """Query latents, queries and outputs of the rank's heads, projected state, output; Indexer scores of its rows."""
    heads = g.heads // tp_size
    row = g.q_lora_rank + 2 * heads * g.head_dim + g.projected // tp_size + g.hidden
    scores = -(-chunk // tp_size) * (length // g.csa_ratio) * torch.float32.itemsize
    return chunk * row * itemsize + (scores if AttentionKind.CSA in g.attention_kinds else 0)


def _expert_stage(g: ModelGeometry, tp_size: int, chunk: int, itemsize: int) -> int:
    """Gathered rows in and out, and the rank's average share of expert rows: input, gate and up, product, output."""
    shares = -(-chunk * g.experts_per_token // tp_size)
    return (2 * chunk * g.hidden + shares * (2 * g.hidden + 3 * g.expert_width)) * itemsize
