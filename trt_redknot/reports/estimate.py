"""The tables of `build_engine.py --dry-run`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from rich.table import Table

from trt_redknot.artifacts.formats import ArtifactFormat
from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.config.profile import SplitProfile
from trt_redknot.reports.fitting import Fit, fits_of
from trt_redknot.reports.footprint import TOKENS_PER_ARTIFACT_UNIT, Estimate, WeightDtype, estimate

if TYPE_CHECKING:
    from trt_redknot.cli.output import Output

_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def human_bytes(count: int) -> str:
    """`count` with two decimals in the largest binary unit that leaves at least 1."""
    for size, unit in _UNITS:
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


def show_estimate(
    out: Output,
    geometry: ModelGeometry,
    profile: SplitProfile,
    *,
    tp_size: int,
    dtype: str,
    artifact_format: ArtifactFormat,
    length: int,
    chunk_rows: int,
    experts: str,
    memory: tuple[int, str],
    as_json: bool,
    more: Mapping[str, object] | None = None,
) -> str:
    """Print what a rank of an engine would need, as tables or as JSON.

    Returns:
        in a sentence, whether that has room in the GPU's memory: to be the last thing that a person reads.

    Args:
        dtype: name of the torch dtype of activations and caches.
        artifact_format: the format that is marked as the chosen one.
        length: tokens of one request.
        experts: how experts are held, ``same`` or ``fp8``.
        memory: bytes of a GPU, and what to call it.
        more: further keys of the JSON object.

    Raises:
        CheckpointError: `tp_size` does not divide the output groups.
    """
    result = estimate(
        geometry,
        profile,
        tp_size=tp_size,
        length=length,
        chunk_rows=chunk_rows,
        activation_dtype=getattr(torch, dtype),
    )
    size, gpu = memory
    fits = fits_of(geometry, result, dtype=dtype, experts=experts, memory=size)
    if as_json:
        fitting = {"gpu": gpu, "fits": [fit.to_json() for fit in fits]}
        out.json(result.to_json() | {"artifact_format": artifact_format.value, "memory": fitting} | dict(more or {}))
    else:
        out.show(*estimate_tables(result, artifact_format), _fitting(result, fits, gpu))
    return _verdict(result, fits[0], gpu)


def estimate_tables(result: Estimate, chosen: ArtifactFormat | None = None) -> list[Table]:
    """Weights, artifacts and runtime memory of one rank; the artifact format `chosen` is marked."""
    return [_weights(result), _artifacts(result, chosen), _runtime(result)]


def _weights(result: Estimate) -> Table:
    table = Table(title=f"{result.name}: weights per rank, TP {result.tp_size}")
    table.add_column("tensors")
    for dtype in WeightDtype:
        table.add_column(dtype.value, justify="right")
    for name, by_dtype in result.weights.items():
        table.add_row(name, *(human_bytes(by_dtype[dtype]) for dtype in WeightDtype))
    table.add_section()
    table.add_row("total", *(human_bytes(result.weight_total(dtype)) for dtype in WeightDtype))
    return table


def _artifacts(result: Estimate, chosen: ArtifactFormat | None) -> Table:
    table = Table(title=f"{result.name}: artifacts per {TOKENS_PER_ARTIFACT_UNIT} tokens, TP {result.tp_size}")
    table.add_column("format")
    for title in ("common, stored once", "per rank", "all ranks"):
        table.add_column(title, justify="right")
    for form, size in result.artifacts.items():
        everything = size.common + result.tp_size * size.rank
        mark = " (chosen)" if form == chosen else ""
        table.add_row(form + mark, human_bytes(size.common), human_bytes(size.rank), human_bytes(everything))
    return table


def _verdict(result: Estimate, fit: Fit, gpu: str) -> str:
    what = f"{result.name} at TP {result.tp_size} in {fit.dtype}" + (
        " with FP8 experts" if fit.experts == "fp8" else ""
    )
    if fit.fits:
        return f"{what} fits into {human_bytes(fit.memory)} ({gpu}), with {human_bytes(fit.memory - fit.total)} left."
    more = "with no number of ranks" if fit.smallest is None else f"from {fit.smallest} ranks on"
    room, needed = human_bytes(fit.memory), human_bytes(fit.total)
    return f"{what} DOES NOT FIT into {room} ({gpu}): a rank needs {needed}. It fits {more}."


def _fitting(result: Estimate, fits: Sequence[Fit], gpu: str) -> Table:
    table = Table(
        title=f"{result.name}: a rank of TP {result.tp_size} in {human_bytes(fits[0].memory)} ({gpu}), "
        f"with one request of {result.length:,} tokens"
    )
    for column in ("engine", "weights", "request", "total", "", "fits from"):
        table.add_column(column, justify="left" if column in ("engine", "") else "right")
    for index, fit in enumerate(fits):
        table.add_row(
            f"{fit.dtype}, experts {fit.experts}" + (" (chosen)" if index == 0 else ""), human_bytes(fit.weights),
            human_bytes(fit.request), human_bytes(fit.total), "fits" if fit.fits else "does not fit",
            "-" if fit.smallest is None else f"TP {fit.smallest}",
        )  # fmt: skip
    return table


def _runtime(result: Estimate) -> Table:
    runtime = result.runtime
    table = Table(
        title=f"{result.name}: one request of {result.length:,} tokens per rank, "
        f"{result.activation_dtype}, chunks of {result.chunk_rows:,} rows"
    )
    table.add_column("memory")
    table.add_column("bytes", justify="right")
    for title, count in (
        ("residual streams, own rows", runtime.streams),
        ("latents", runtime.latents),
        ("compressed entries", runtime.entries),
        ("index keys", runtime.index_keys),
        ("chunk temporaries, at least", runtime.temporaries),
    ):
        table.add_row(title, human_bytes(count))
    table.add_section()
    table.add_row("total", human_bytes(runtime.total))
    return table
