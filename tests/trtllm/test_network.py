"""Our ops in someone else's network: the plugin layers are those that our own plans have."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.plans import cpu_platform, nano_geometry, specs
from trt_redknot.engine.tensorrt.builder import BuilderSettings, PlanBuilder
from trt_redknot.engine.tensorrt.platform import PLUGIN_LIBRARY
from trt_redknot.engine.tensorrt.profiles import PlanLimits
from trt_redknot.errors import EngineError
from trt_redknot.ops.cuda.library import kernels_present
from trt_redknot.ops.tensorrt.plugins import CutPort, PluginCall
from trt_redknot.ops.tensorrt.tensors import ElementType, Extent
from trt_redknot.trtllm.network import NetworkOps, load_plugins


@pytest.fixture(scope="module")
def rtx() -> Any:
    return pytest.importorskip("tensorrt_rtx", reason="the CPU-capable TensorRT is not installed (tensorrt-rtx-cu13)")


def planned(rtx: Any, name: str) -> list[PluginCall]:
    builder = PlanBuilder(cpu_platform(rtx), PlanLimits(chunk_rows=64, max_length=512), BuilderSettings())
    _, port = builder.define(next(spec for spec in specs("nano", world=1) if spec.kind.name == name))
    assert isinstance(port, CutPort)
    return port.calls


class LlmTensor:
    """What `tensorrt_llm.functional.Tensor` and `tensorrt_llm.Network` keep TensorRT's objects in."""

    def __init__(self, trt_tensor: Any) -> None:
        self.trt_tensor = trt_tensor


def test_a_plugin_of_ours_in_a_network_of_tensorrt_llm_is_the_one_of_our_plans(rtx: Any) -> None:
    g = nano_geometry()
    network = rtx.Builder(rtx.Logger()).create_network(1)
    llm_network, port = SimpleNamespace(trt_network=network), CutPort()
    mine = NetworkOps(llm_network, g, port, module=rtx)

    def given(name: str, type_: ElementType, *dims: int) -> Any:
        return LlmTensor(network.add_input(name, type_.of(rtx), rtx.Dims(list(dims))))

    rows = mine.tensor(given("x", ElementType.BFLOAT16, -1, g.head_dim))
    weight = mine.tensor(given("norm", ElementType.BFLOAT16, g.head_dim))
    rope = mine.tensor(given("rope", ElementType.FLOAT32, -1, g.rope_dim // 2, 2), rows=Extent.POSITIONS)
    positions = mine.tensor(given("positions", ElementType.INT64, -1))
    result = mine.ops.norm_rope_pack(rows, weight, rope, positions, eps=g.norm_eps)
    (call,) = port.calls
    wanted = next(call for call in planned(rtx, "project-sliding") if call.plugin == "NormRopePack")
    assert call.plugin == wanted.plugin
    assert call.fields == wanted.fields
    assert list(call.inputs) == list(wanted.inputs)
    assert [(tensor.type, tensor.fixed(-1)) for tensor in call.inputs.values() if len(tensor.shape) > 1] == [
        (tensor.type, tensor.fixed(-1)) for tensor in wanted.inputs.values() if len(tensor.shape) > 1
    ]
    assert (result.type, result.shape) == (rows.type, rows.shape)
    normed = mine.ops.rms_norm(result, weight, eps=g.norm_eps)
    assert normed.tensor.dtype == rtx.DataType.BF16


def test_tensors_that_no_op_takes_are_named(rtx: Any) -> None:
    network = rtx.Builder(rtx.Logger()).create_network(1)
    mine = NetworkOps(network, nano_geometry(), CutPort(), module=rtx)
    half = network.add_input("half", rtx.DataType.HALF, rtx.Dims([4]))
    with pytest.raises(EngineError, match=r"no op takes tensors of this type.*found half"):
        mine.tensor(half)
    wide = network.add_input("wide", rtx.DataType.FLOAT, rtx.Dims([4, -1]))
    with pytest.raises(EngineError, match=r"only the first size.*found wide \[4, -1\]"):
        mine.tensor(wide)


def test_without_tensorrt_llm_its_tensors_are_refused_only_when_asked_for(rtx: Any) -> None:
    network = rtx.Builder(rtx.Logger()).create_network(1)
    mine = NetworkOps(network, nano_geometry(), CutPort(), module=rtx)
    x = mine.tensor(network.add_input("x", rtx.DataType.BF16, rtx.Dims([4, 8])))
    with pytest.raises(EngineError, match=r"TensorRT-LLM with networks is not installed.*1\.2\.x"):
        mine.llm_tensor(x)


def test_a_result_becomes_a_tensor_of_tensorrt_llm(rtx: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, Any]] = []

    def create(tensor: Any, producer: Any) -> str:
        made.append((tensor, producer))
        return "llm tensor"

    monkeypatch.setitem(sys.modules, "tensorrt_llm", SimpleNamespace())  # type: ignore[arg-type]
    functional: Any = SimpleNamespace(_create_tensor=create)
    monkeypatch.setitem(sys.modules, "tensorrt_llm.functional", functional)
    network = rtx.Builder(rtx.Logger()).create_network(1)
    mine = NetworkOps(network, nano_geometry(), CutPort(), module=rtx)
    x = mine.tensor(network.add_input("x", rtx.DataType.BF16, rtx.Dims([4, 8])))
    total = mine.ops.add(x, x)
    mine.ops.add(total, x)
    assert mine.llm_tensor(total) == "llm tensor"
    ((tensor, producer),) = made
    assert tensor is total.tensor
    assert producer.get_output(0).name == total.tensor.name


class Registry:
    """TensorRT's plugin registry: a library's creators are known once it is loaded, and it is not loaded twice."""

    def __init__(self, *, takes: bool = True) -> None:
        self.loaded: list[str] = []
        self.takes = takes

    def get_creator(self, name: str, version: str, namespace: str) -> object | None:
        return object() if self.loaded else None

    def load_library(self, path: str) -> object | None:
        assert not self.loaded
        if self.takes:
            self.loaded.append(path)
            return object()
        return None


def module_with(registry: Registry) -> Any:
    class Logger:
        def __init__(self) -> None:
            pass

    builder = SimpleNamespace(get_plugin_registry=lambda: registry)
    return SimpleNamespace(__version__="10.14", ILogger=Logger, Builder=lambda logger: builder)


def test_the_plugin_library_is_loaded_once_a_process(tmp_path: Path) -> None:
    library = tmp_path / PLUGIN_LIBRARY
    with pytest.raises(EngineError, match="the plugin library was not built"):
        load_plugins(library, module_with(Registry()))
    library.write_bytes(b"")
    registry = Registry()
    for _ in range(2):
        load_plugins(library, module_with(registry))
    assert registry.loaded == [str(library)]
    with pytest.raises(EngineError, match="TensorRT did not load the plugin library"):
        load_plugins(library, module_with(Registry(takes=False)))


SCRIPT = """
import sys
import trt_redknot.trtllm, trt_redknot.trtllm.mapping, trt_redknot.trtllm.network
assert not [name for name in sys.modules if name.split(".")[0] in ("tensorrt_llm", "tensorrt")]
from trt_redknot.errors import EngineError
try:
    import trt_redknot.trtllm.torch
except EngineError as error:
    print("refused:", error)
else:
    import torch
    print("registered:", torch.ops.redknot.seg_latent_attention)
assert "tensorrt_llm" not in sys.modules
"""


def test_one_import_registers_the_torch_ops_and_needs_no_tensorrt_llm() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    expected = (
        "registered: redknot.seg_latent_attention" if kernels_present() else "refused: the kernel library was not"
    )
    assert done.stdout.startswith(expected)
