"""Bytes per rank against the checkpoint's own count, known figures and sums over ranks."""

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
from trt_redknot.reports.fitting import Fit, fits_of
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
            experts="fp8",
            memory=(139 << 30, "a GPU"),
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


def shown(name: str, tp_size: int, *, experts: str, gib: float, dtype: str = "bfloat16") -> tuple[str, list[Fit]]:
    """What a dry run says about the memory of a GPU, as text and as data."""
    texts, verdict = [], ""
    for as_json in (False, True):
        stream = io.StringIO()
        verdict = show_estimate(
            Output(0, stdout=stream), RELEASED[name], PROFILES[name], tp_size=tp_size, dtype=dtype,
            artifact_format=ArtifactFormat.FP8, length=65536, chunk_rows=4096, experts=experts,
            memory=(int(gib * 2**30), "a GPU"), as_json=as_json,
        )  # fmt: skip
        texts.append(stream.getvalue())
    fits = json.loads(texts[1])["memory"]["fits"]
    derived = [(each.pop("total"), each.pop("fits")) for each in fits]
    found = [Fit(**each) for each in fits]
    assert [(fit.total, fit.fits) for fit in found] == derived
    assert ("does not fit" in texts[0]) == (not all(fit.fits for fit in found))
    return verdict, found


def test_pro_on_eight_gpus_is_said_not_to_fit() -> None:
    text, fits = shown("pro", 8, experts="fp8", gib=139)
    assert "pro at TP 8 in bfloat16 with FP8 experts DOES NOT FIT into 139.00 GiB (a GPU)" in text
    assert "It fits from 16 ranks on." in text
    assert (fits[0].fits, fits[0].smallest) == (False, 16)
    assert fits[0].weights > RELEASED["pro"].layers * RELEASED["pro"].experts // 8 * 3 * 7168 * 3072
    # Of BF16 experts not even the most ranks hold a share.
    assert [(fit.experts, fit.smallest) for fit in fits] == [("fp8", 16), ("same", None)]


def test_flash_on_eight_gpus_is_said_to_fit() -> None:
    text, fits = shown("flash", 8, experts="fp8", gib=139)
    assert "flash at TP 8 in bfloat16 with FP8 experts fits into 139.00 GiB (a GPU), with" in text
    assert "DOES NOT FIT" not in text
    assert all(fit.fits for fit in fits)


def test_the_smallest_number_of_ranks_is_the_smallest() -> None:
    geometry = RELEASED["flash"]
    results = {ranks: estimate(geometry, PROFILES["flash"], tp_size=ranks, length=65536) for ranks in (1, 2, 4, 8)}

    def fit(ranks: int, memory: int) -> Fit:
        return fits_of(geometry, results[ranks], dtype="float64", experts="same", memory=memory)[0]

    needed = {ranks: fit(ranks, 1).total for ranks in results}
    assert sorted(needed.values(), reverse=True) == list(needed.values())
    for ranks, total in needed.items():
        assert (fit(2, total).smallest, fit(2, total).fits) == (ranks, ranks <= 2)


@pytest.mark.parametrize("experts", ["same", "fp8"])
def test_weights_of_an_engine_are_the_columns_of_the_table(experts: str) -> None:
    result = estimate(RELEASED["flash"], PROFILES["flash"], tp_size=8, length=65536)
    held = result.weights["routed experts"]
    saved = held[WeightDtype.BFLOAT16] - held[WeightDtype.FP8] if experts == "fp8" else 0
    _, fits = shown("flash", 8, experts=experts, gib=139)
    assert fits[0].weights == result.weight_total(WeightDtype.BFLOAT16) - saved
    assert fits[0].request == result.runtime.total
