"""`build_engine.py --backend tensorrt`: what a dry run shows, on one rank and on eight, and what is refused."""

from __future__ import annotations

import importlib.util
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import pytest
import torch
from click.testing import CliRunner

from tests.artifacts.support import together
from tests.support.plans import geometry, specs, write_nano
from trt_redknot.checkpoint.specs import layer_specs, rank_bytes, shared_specs
from trt_redknot.cli import plan_options
from trt_redknot.cli.build_engine import build_engine_command
from trt_redknot.cli.output import Output
from trt_redknot.collectives import Collectives
from trt_redknot.engine.tensorrt.backend import PlanBackend
from trt_redknot.engine.tensorrt.platform import Platform
from trt_redknot.engine.tensorrt.profiles import PlanLimits
from trt_redknot.engine.tensorrt.samples import PlanSample
from trt_redknot.engine.tensorrt.verification import reference_outputs
from trt_redknot.errors import EngineError
from trt_redknot.launch import run_ranks

BUILDER = Path(__file__).resolve().parents[2] / "build_engine.py"


def test_a_dry_run_lists_every_plan() -> None:
    options = ["--dry-run", "--profile", "flash", "--tp", "8", "--backend", "tensorrt", "--json"]
    done = CliRunner().invoke(build_engine_command(None), options)
    assert done.exit_code == 0, done.output
    shown = json.loads(done.stdout)["plans"]
    wanted = specs("flash")
    assert [plan["name"] for plan in shown] == [spec.kind.name for spec in wanted]
    for plan, spec in zip(shown, wanted, strict=True):
        assert plan["layers"] == list(spec.kind.layers(geometry("flash")))
        assert plan["inputs"].keys() == {tensor.name for tensor in spec.inputs}
        assert plan["ranges"].keys() == {"prefill", "decode"}
    table = CliRunner().invoke(build_engine_command(None), options[:-1])
    assert all(spec.kind.name in table.stdout for spec in wanted)


@pytest.mark.parametrize(("name", "ranks"), [("flash", 8), ("pro", 1)])
def test_bytes_of_eight_ranks_add_up_to_the_checkpoint(name: str, ranks: int) -> None:
    """Flash under mpirun, where one rank prints for all; Pro as one rank shows it for eight."""
    options = ["--dry-run", "--profile", name, "--tp", "8", "--backend", "tensorrt", "--json"]
    done = run_ranks(ranks, [str(BUILDER), *options], timeout_s=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [plan["name"] for plan in found["plans"]] == [spec.kind.name for spec in specs(name)]
    of_a_rank = sum(by_dtype["bfloat16"] for by_dtype in found["weights"].values())
    g = geometry(name)
    tensors = [*shared_specs(g), *(spec for layer in range(g.layers) for spec in layer_specs(g, layer))]
    on_every_rank = sum(spec.loaded_bytes(0, 8, torch.bfloat16) for spec in tensors if spec.axis is None)
    assert 8 * (of_a_rank - on_every_rank) + on_every_rank == rank_bytes(g, 0, 1, torch.bfloat16)


@pytest.mark.skipif(
    getattr(importlib.util.find_spec("tensorrt"), "origin", None) is not None, reason="TensorRT is installed here"
)
def test_without_tensorrt_a_build_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    checkpoint = write_nano(tmp_path / "checkpoint")
    output = tmp_path / "out" / "engine"
    options = ["--checkpoint", str(checkpoint), "--output", str(output), "--backend", "tensorrt"]
    done = CliRunner().invoke(build_engine_command(None), options)
    assert isinstance(done.exception, EngineError)
    assert "TensorRT is not installed" in str(done.exception)
    assert not output.parent.exists()
    done = CliRunner().invoke(build_engine_command(None), [*options, "--dtype", "float32"])
    assert "computes in bfloat16" in str(done.exception)


@pytest.mark.parametrize("options", [["--backend", "torch"], ["--backend", "tensorrt", "--dry-run"]])
def test_verify_is_for_built_plans_only(options: list[str]) -> None:
    done = CliRunner().invoke(build_engine_command(None), ["--profile", "flash", "--dry-run", "--verify", *options])
    assert done.exit_code == 2
    assert "--verify runs the plans of --backend tensorrt" in done.stderr


@pytest.mark.parametrize("world", [1, 2])
def test_verification_names_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    """The table and the error of --verify, with the reference in the place of the plans. One plan of the last rank is
    spoilt; plans with collectives run on all ranks together."""
    plans = specs("nano", world=world)

    class Reference:
        def __init__(self, ranks: Collectives) -> None:
            self.ranks = ranks

        def run(self, plan: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            spec = next(spec for spec in plans if spec.kind.name == plan)
            outputs = reference_outputs(PlanSample(spec, 7, rank=self.ranks.rank), torch.bfloat16, self.ranks)
            if "faults" in {tensor.name for tensor in spec.outputs}:
                outputs["faults"] = torch.zeros(1, dtype=torch.int32)
            last = self.ranks.rank == world - 1
            return {name: tensor * (3 if name == "logits" and last else 1) for name, tensor in outputs.items()}

    limits = PlanLimits(chunk_rows=256, max_length=512)
    monkeypatch.setattr("trt_redknot.engine.tensorrt.opening.open_plans", lambda *given: object())
    monkeypatch.setattr(
        "trt_redknot.engine.tensorrt.starting.start_plans",
        lambda opened, ranks, device: PlanBackend(specs=plans, limits=limits, runtime=Reference(ranks)),
    )  # fmt: skip
    monkeypatch.setattr(plan_options.secrets, "randbits", lambda bits: 7)
    shown = [io.StringIO() for _ in range(world)]

    def work(ranks: Collectives) -> None:
        out, platform = Output(stdout=shown[ranks.rank]), cast("Platform", None)
        plan_options.verify_plans(out, tmp_path, platform, ranks, torch.device("cpu"))

    for outcome in together(world, work):
        assert isinstance(outcome, EngineError)
        assert "reference backend, found head.logits, in" in str(outcome)
    lines = shown[0].getvalue().splitlines()
    assert sum("FAIL" in line for line in lines) == 1
    assert sum("pass" in line for line in lines) == sum(len(spec.outputs) for spec in plans) - 1
