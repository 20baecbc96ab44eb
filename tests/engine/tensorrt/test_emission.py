"""One definition: emission calls the ops that a forward pass of the torch backend calls, with the same attributes."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.networks import build_engine
from tests.support.plans import BFLOAT16, WORLDS, geometry, nano_geometry, specs, write_nano
from tests.support.recording import OpCall, RecordingOps
from trt_redknot import Engine, Request, Tokens
from trt_redknot.checkpoint.specs import layer_specs, shared_specs
from trt_redknot.engine import engine as engine_module
from trt_redknot.engine.build import BuildOptions
from trt_redknot.engine.tensorrt.build import plan_specs
from trt_redknot.engine.tensorrt.emission import emit_plan
from trt_redknot.engine.tensorrt.platform import Platform
from trt_redknot.engine.tensorrt.specification import PlanSpec, plan_spec
from trt_redknot.engine.weights import SCALE
from trt_redknot.errors import EngineError
from trt_redknot.ops.interface import Ops
from trt_redknot.ops.tensorrt.plugins import CutPort

# Where rows lie between stages is the runtime's business, not the network's.
MOVES = {"all_gather", "reduce_scatter", "write_rows"}


def recorded(platform: Platform, spec: PlanSpec) -> list[OpCall]:
    watched: list[RecordingOps] = []

    def watch(ops: Ops) -> Ops:
        watched.append(RecordingOps(ops=ops))
        wrapped: Any = watched[-1]
        return wrapped  # type: ignore[no-any-return]

    network = platform.module.Builder(platform.logger).create_network(1)
    emit_plan(platform.module, network, spec, CutPort(), watch=watch)
    return watched[0].calls


def without_moves(calls: list[OpCall]) -> list[OpCall]:
    # The first id is the rank's, and an input of the plan.
    kept = [call for call in calls if call.name not in MOVES]
    return [
        OpCall(name=call.name, attributes={k: v for k, v in call.attributes.items() if k != "first"}) for call in kept
    ]


def test_emission_records_the_ops_of_a_forward_pass(
    platform: Platform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorders: list[RecordingOps] = []
    make_ops = engine_module.ops_for

    def recording(*arguments: Any) -> Any:
        recorders.append(RecordingOps(ops=make_ops(*arguments)))
        return recorders[-1]

    monkeypatch.setattr(engine_module, "ops_for", recording)
    engine = Engine.open(build_engine(write_nano(tmp_path / "checkpoint"), tmp_path / "engine",
                                      options=BuildOptions(chunk_rows=512)))  # fmt: skip
    assert engine.geometry == nano_geometry()
    tokens = [random.randrange(engine.geometry.vocab) for _ in range(random.randrange(260, 300))]
    engine.generate(Request(segments=[Tokens(tokens)], max_new_tokens=1))

    plans = {spec.kind.name: recorded(platform, spec) for spec in specs("nano", world=1)}
    wanted = plans["embed"]
    for attention, router in zip(engine.geometry.attention_kinds, engine.geometry.router_kinds, strict=True):
        names = [f"{stage}-{attention}" for stage in ("project", "compress", "select", "attend")]
        for name in (*names, f"mix-{router}"):
            wanted = wanted + plans.get(name, [])
    assert without_moves(recorders[0].calls) == without_moves(wanted + plans["head"])


def test_recording_is_the_same_for_one_rank_and_for_several(platform: Platform) -> None:
    for one, several in zip(specs("nano", world=1), specs("nano", world=2), strict=True):
        assert recorded(platform, one) == recorded(platform, several)


@pytest.mark.parametrize("name", WORLDS)
def test_every_weight_of_a_layer_is_read_by_one_plan(name: str) -> None:
    g, plans = geometry(name), specs(name)
    for layer in range(g.layers):
        mine = [spec for spec in plans if layer in spec.kind.layers(g)]
        read = [tensor.name for spec in mine for tensor in spec.inputs if tensor.weight]
        assert len(set(read)) == len(read)
        assert originals(read) == {spec.name for spec in layer_specs(g, layer)}
    outside = [tensor.name for spec in plans if not spec.kind.layers(g) for tensor in spec.inputs if tensor.weight]
    assert set(outside) == {spec.name for spec in shared_specs(g)}


def originals(names: list[str]) -> set[str]:
    """Names of the checkpoint: roles of heads put together, scales left out."""
    scales = {name for name in names if name.endswith(SCALE) and name.removesuffix(SCALE) in names}
    return {name.removesuffix("_global").removesuffix("_local") for name in set(names) - scales}


def test_several_ranks_must_share_experts_and_groups_evenly() -> None:
    with pytest.raises(EngineError, match="output groups"):
        specs("nano", world=4)
    odd = dataclasses.replace(nano_geometry(), experts=7)
    with pytest.raises(EngineError, match="do not share the experts evenly"):
        plan_specs(odd, world=2, format=BFLOAT16)


def test_a_geometry_that_no_kernel_serves_is_refused_by_the_op_s_name(platform: Platform) -> None:
    small = dataclasses.replace(nano_geometry(), head_dim=128)
    spec = next(spec for spec in specs("nano") if spec.kind.name == "attend-csa")
    refused = plan_spec(small, spec.kind, world=2, format=spec.format)
    with pytest.raises(EngineError, match=r"op 'seg_latent_attention'.*head_dim 512.*head_dim 128"):
        recorded(platform, refused)
