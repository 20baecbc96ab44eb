"""Bytes per rank against the checkpoint's own count, the design's figures and sums over ranks."""

from __future__ import annotations

import io
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from trt_redknot.artifacts.contents import Part, artifact_parts
from trt_redknot.artifacts.formats import ArtifactFormat
from trt_redknot.checkpoint.specs import rank_bytes
from trt_redknot.cli.output import Output
from trt_redknot.config.profile import SplitProfile
from trt_redknot.config.released import released_geometry
from trt_redknot.errors import CheckpointError
from trt_redknot.reports.estimate import estimate_tables, human_bytes, show_estimate
from trt_redknot.reports.footprint import WeightDtype, estimate

RELEASED = {name: released_geometry(name) for name in ("flash", "pro")}
PROFILES = {name: SplitProfile.default(geometry, name) for name, geometry in RELEASED.items()}


@pytest.mark.parametrize("name", RELEASED)
@pytest.mark.parametrize("tp_size", [1, 8])
def test_weights_are_those_of_the_checkpoint(name: str, tp_size: int) -> None:
    result = estimate(RELEASED[name], PROFILES[name], tp_size=tp_size, length=1024)
    for form, dtype in ((WeightDtype.FLOAT32, torch.float32), (WeightDtype.BFLOAT16, torch.bfloat16)):
        assert result.weight_total(form) == rank_bytes(RELEASED[name], 0, tp_size, dtype)
    experts = result.weights["routed experts"]
    # One byte an element and one scale a block of 128 x 128: a little more than half of BF16.
    assert experts[WeightDtype.FP8] == experts[WeightDtype.BFLOAT16] // 2 * (1 + 1 / 128**2)


def test_local_contribution_of_flash_is_the_figure_of_the_design() -> None:
    result = estimate(RELEASED["flash"], PROFILES["flash"], tp_size=8, length=1024)
    assert round(result.artifacts["bfloat16"].rank / 1024 / 1000, 1) == 75.8
    assert result.artifacts["float32"].rank == 2 * result.artifacts["bfloat16"].rank
    assert result.artifacts["fp8"].rank < 0.6 * result.artifacts["bfloat16"].rank


@pytest.mark.parametrize("name", RELEASED)
def test_artifact_bytes_of_exact_formats_are_elements_times_width(name: str) -> None:
    result = estimate(RELEASED[name], PROFILES[name], tp_size=4, length=1024)
    elements = {True: 0, False: 0}
    for spec in artifact_parts(RELEASED[name], PROFILES[name], 1024, 4):
        elements[spec.part is Part.LOCAL] += int(torch.Size(spec.shape).numel())
    assert result.artifacts["float32"].rank == 4 * elements[True]
    assert result.artifacts["float32"].common == 4 * elements[False]


@given(
    name=st.sampled_from(sorted(RELEASED)),
    tp_size=st.sampled_from([1, 2, 4, 8]),
    length=st.integers(1, 1 << 20),
    chunk=st.integers(1, 8192),
)
@settings(max_examples=15, deadline=None)
def test_memory_grows_with_length_and_shrinks_with_ranks(name: str, tp_size: int, length: int, chunk: int) -> None:
    def runtime(ranks: int, tokens: int) -> int:
        return estimate(RELEASED[name], PROFILES[name], tp_size=ranks, length=tokens, chunk_rows=chunk).runtime.total

    here = runtime(tp_size, length)
    assert runtime(tp_size, length + 128) > here
    assert runtime(tp_size * 2 if tp_size < 8 else 8, length) <= here
    result = estimate(RELEASED[name], PROFILES[name], tp_size=tp_size, length=length, chunk_rows=chunk)
    assert result.runtime.latents == RELEASED[name].layers * length * 512 * 2
    assert result.runtime.streams * tp_size >= length * 4 * RELEASED[name].hidden * 2


def test_json_and_tables_say_the_same() -> None:
    result = estimate(RELEASED["flash"], PROFILES["flash"], tp_size=8, length=65536)
    data = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert sum(row["fp8"] for row in data["weights"].values()) == data["weights_total"]["fp8"]
    stream = io.StringIO()
    Console(file=stream, width=140).print(*estimate_tables(result))
    for count in (data["weights_total"]["fp8"], data["runtime"]["total"], data["artifacts"]["fp8"]["rank"]):
        assert human_bytes(count) in stream.getvalue()


@pytest.mark.parametrize("as_json", [True, False])
def test_dry_run_prints_on_rank_zero_only(as_json: bool) -> None:
    for rank in (0, 1):
        stream = io.StringIO()
        show_estimate(
            Output(rank, stdout=stream),
            RELEASED["flash"],
            PROFILES["flash"],
            tp_size=8,
            dtype="bfloat16",
            artifact_format=ArtifactFormat.FP8,
            length=4096,
            chunk_rows=512,
            as_json=as_json,
        )
        text = stream.getvalue()
        if rank:
            assert text == ""
        elif as_json:
            data = json.loads(text)
            assert (data["artifact_format"], data["length"], data["chunk_rows"]) == ("fp8", 4096, 512)
        else:
            assert "fp8 (chosen)" in text
            assert "4,096 tokens" in text


def test_ranks_that_do_not_divide_the_groups_are_refused() -> None:
    with pytest.raises(CheckpointError, match="output groups"):
        estimate(RELEASED["flash"], PROFILES["flash"], tp_size=3, length=1024)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (3 << 29, "1.50 GiB"), (1 << 50, "1024.00 TiB")],
)
def test_human_bytes(count: int, text: str) -> None:
    assert human_bytes(count) == text
