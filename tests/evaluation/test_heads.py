"""Drift of heads: what is measured is what the heads did, and engines are built with the profile it gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.evaluation.conftest import RECORDS, Nano
from trt_redknot import Engine
from trt_redknot.cli.build_engine import build_engine_command
from trt_redknot.cli.profile_heads import profile_heads_command
from trt_redknot.errors import RequestError
from trt_redknot.evaluation.heads import HeadTap, drift_profile, heads_of, measure_drift


def test_a_context_that_changes_nothing_gives_no_drift_and_another_gives_some(nano: Nano) -> None:
    tap = HeadTap()
    engine = Engine.open(nano.directory, watch=tap.watch)
    window = max(engine.geometry.window, engine.geometry.hca_ratio)
    first = list(range(2, 2 + window))
    drift = measure_drift(engine, tap, [first, list(range(50, 50 + window))])
    geometry = engine.geometry
    assert drift.change.shape == (geometry.layers, geometry.output_groups, geometry.heads_per_group)
    assert drift.rows == window
    assert torch.isfinite(drift.change).all()
    # Layer 0 sees the tokens of the window before: every later layer's heads differ, none by less than nothing.
    assert (drift.change >= 0).all()
    assert (drift.size > 0).all()
    assert (drift.change.sum(-1) > 0).all()
    # The tap changes nothing: the same tokens alone and alone again have no drift.
    alone = [heads_of(engine, tap, first) for _ in range(2)]
    assert all(torch.equal(a.local, b.local) for a, b in zip(*alone, strict=True))


def test_contributions_of_all_heads_are_the_projected_state(nano: Nano) -> None:
    tap = HeadTap()
    engine = Engine.open(nano.directory, watch=tap.watch)
    tokens = list(range(2, 66))
    layers = heads_of(engine, tap, tokens)
    assert len(layers) == engine.geometry.layers
    for layer in layers:
        state = torch.einsum("rghd,gchd->rgc", layer.local, layer.local_weight)
        # The op that the engine itself uses.
        projected = tap.grouped_linear(layer.local.flatten(1, 2), layer.local_weight.flatten(2))
        torch.testing.assert_close(state.flatten(1), projected, rtol=1e-4, atol=1e-5)


def test_one_document_has_no_context(nano: Nano) -> None:
    with pytest.raises(RequestError, match="at least two documents"):
        measure_drift(nano.engine, HeadTap(), [[1, 2, 3]])


def test_the_command_writes_a_profile_that_engines_are_built_with(nano: Nano, tmp_path: Path) -> None:
    profile = tmp_path / "heads.json"
    profile_heads_command(None).main(
        ["--engine", str(nano.directory), "--records", str(RECORDS), "--only", "nano-256.jsonl", "--limit", "1",
         "--output", str(profile)], standalone_mode=False,
    )  # fmt: skip
    saved = json.loads(profile.read_text())
    chosen = {int(layer): tuple(heads) for layer, heads in saved["global_heads"].items()}
    assert set(chosen) == set(nano.engine.manifest.profile.reusable)
    build_engine_command(None).main(
        ["--checkpoint", str(nano.checkpoint), "--output", str(tmp_path / "engine"), "--profile", str(profile)],
        standalone_mode=False,
    )
    built = Engine.open(tmp_path / "engine").manifest.profile
    assert built.global_heads == chosen
    assert built.name == "heads"


def test_the_profile_takes_the_head_of_largest_change(nano: Nano) -> None:
    tap = HeadTap()
    engine = Engine.open(nano.directory, watch=tap.watch)
    drift = measure_drift(engine, tap, [list(range(2, 50)), list(range(80, 120))])
    profile = drift_profile(engine, drift, "mine")
    profile.check(engine.geometry)
    for layer in profile.reusable:
        for group in range(profile.output_groups):
            change = drift.change[layer, group]
            assert change[profile.global_head(layer, group)] == change.max()
