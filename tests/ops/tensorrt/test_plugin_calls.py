"""Every plugin layer that plans have is what the plugin library's own contract says: fields, inputs, outputs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.conftest import Built
from tests.plugins.lean import run_lean
from tests.support.plans import BFLOAT16, PACKED, WORLDS, cpu_platform, specs
from trt_redknot.engine.tensorrt.builder import BuilderSettings, PlanBuilder
from trt_redknot.engine.tensorrt.profiles import PlanLimits
from trt_redknot.ops.tensorrt.plugins import CutPort, PluginCall, PluginOutput
from trt_redknot.ops.tensorrt.tensors import Extent, NetworkTensor, Shape, Size

# Building the libraries is part of the first test that needs them.
pytestmark = pytest.mark.timeout(1800)

# Any sizes that fit together: rows = rows with all heads + restored rows.
SIZES = {
    Extent.OWN_ROWS: 3,
    Extent.ROWS: 7,
    Extent.FULL_ROWS: 5,
    Extent.RESTORED_ROWS: 2,
    Extent.RAW_ROWS: 11,
    Extent.WRITTEN_ENTRIES: 4,
    Extent.LATENT_POOL: 13,
    Extent.ENTRY_POOL: 17,
    Extent.SEGMENTS: 2,
    Extent.POSITIONS: 19,
    Extent.VOCABULARY_SHARE: 23,
}


def plugin_calls(rtx: Any, name: str) -> list[PluginCall]:
    platform = cpu_platform(rtx)
    builder = PlanBuilder(platform, PlanLimits(chunk_rows=512, max_length=4096), BuilderSettings())
    calls = []
    for form in (BFLOAT16, PACKED):
        for spec in specs(name, form):
            _, port = builder.define(spec)
            assert isinstance(port, CutPort)
            calls += port.calls
    return calls


def manifest(call: PluginCall, path: Path) -> Path:
    """The call as the host program of the plugin tests reads it."""
    lines = [f"plugin {call.plugin}"]
    lines += [f"field {'float32' if isinstance(v, float) else 'int32'} {k} {v!r}" for k, v in call.fields.items()]
    for name, tensor in call.inputs.items():
        lines.append(line("input", name, tensor))
    for output in call.outputs:
        lines.append(line("output", output.name, output))
    path.write_text("\n".join(lines) + "\n")
    return path


def line(kind: str, name: str, tensor: NetworkTensor | PluginOutput) -> str:
    return " ".join([kind, tensor.type.value, name, "-", *map(str, sizes(tensor.shape))])


def sizes(shape: Shape) -> Iterator[int]:
    for size in shape:
        yield SIZES[size.extent] * size.factor if isinstance(size, Size) else size


@pytest.mark.parametrize("name", WORLDS)
def test_calls_fit_the_plugins_own_contract(built: Built, rtx: Any, tmp_path: Path, name: str) -> None:
    calls = plugin_calls(rtx, name)
    paths = [manifest(call, tmp_path / f"{index:03}_{call.plugin}") for index, call in enumerate(calls)]
    done = built.run("contract", *paths)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [text.split()[0] for text in done.stdout.splitlines()] == [call.plugin for call in calls]


def test_every_plugin_of_the_library_is_used(built: Built, rtx: Any) -> None:
    done = built.run("list")
    assert done.returncode == 0, done.stderr
    listed = {text.split()[1] for text in done.stdout.splitlines()}
    assert listed == {call.plugin for call in plugin_calls(rtx, "nano")}


def test_a_wrong_output_is_found(built: Built, rtx: Any, tmp_path: Path) -> None:
    call = next(call for call in plugin_calls(rtx, "nano") if call.plugin == "MoePermute")
    path = manifest(call, tmp_path / "call")
    text = path.read_text()
    wrong = text.replace("output int32 inverse - ", "output int32 inverse - 1")
    assert wrong != text
    path.write_text(wrong)
    assert built.run("contract", path).returncode == 1


def test_nvidias_runtime_creates_the_plugins_from_the_fields(built: Built, rtx: Any, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_lean", reason="the lean TensorRT runtime is not installed (tensorrt-lean-cu13)")
    calls = {(call.plugin, tuple(call.fields.items())) for name in WORLDS for call in plugin_calls(rtx, name)}
    report = run_lean(built, [(plugin, dict(fields)) for plugin, fields in sorted(calls)], tmp_path)
    assert len(report["made"]) == 2 * len(calls)
