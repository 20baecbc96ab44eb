"""TensorRT's own collective layers: emitted, compiled, chosen by version and by a trial, else our plugin."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import pytest
import torch

from tests.support.plans import specs
from trt_redknot.collectives import Collectives, LocalCollectives
from trt_redknot.engine.tensorrt.builder import BuilderSettings, PlanBuilder
from trt_redknot.engine.tensorrt.communicator import PlanCommunicator, communicator_pointer, hand_to_plugins
from trt_redknot.engine.tensorrt.native import Chosen, Wanted, choose_collectives, smallest_context
from trt_redknot.engine.tensorrt.platform import Platform
from trt_redknot.engine.tensorrt.profiles import PlanLimits
from trt_redknot.engine.tensorrt.specification import PlanFormat, PlanSpec, needs_other_ranks
from trt_redknot.errors import EngineError
from trt_redknot.ops.cuda.library import KERNEL_LIBRARY, library_folder
from trt_redknot.ops.tensorrt.plugins import CutPort

NATIVE = PlanFormat(native_collectives=True)
MEETING = [spec for spec in specs("nano", NATIVE, world=2) if needs_other_ranks(spec)]


class TwoRanks(LocalCollectives):
    """One rank that believes there is another, for what is decided before ranks meet."""

    size = 2

    def exchange(self, payload: bytes) -> list[bytes]:
        return [payload, payload]


def of_version(platform: Platform, version: str) -> Platform:
    class Module:
        __version__ = version

    module: Any = Module()
    return dataclasses.replace(platform, module=module)


@pytest.mark.parametrize("spec", MEETING, ids=lambda spec: spec.kind.name)
def test_native_collectives_compile_and_leave_no_plugin_for_them(platform: Platform, spec: PlanSpec) -> None:
    builder = PlanBuilder(platform, PlanLimits(chunk_rows=256, max_length=2048), BuilderSettings(optimization_level=0))
    network, port = builder.define(spec)
    assert isinstance(port, CutPort)
    assert "Collective" not in {call.plugin for call in port.calls}
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    found = [layer for layer in layers if "all_gather" in layer.name or "reduce_scatter" in layer.name]
    kinds = ["all_gather"] if spec.kind.stage == "select" else ["reduce_scatter", *["all_gather"] * 3, "reduce_scatter"]
    assert [layer.name.split(".")[0] for layer in found] == kinds
    assert all(layer.num_ranks == 2 for layer in found)
    assert len(builder.build(spec)) > 1000


def test_plans_of_one_rank_have_no_collectives(platform: Platform) -> None:
    for spec in specs("nano", NATIVE, world=1):
        network, _ = PlanBuilder(platform, PlanLimits(chunk_rows=256, max_length=2048), BuilderSettings()).define(spec)
        names = [network.get_layer(index).name for index in range(network.num_layers)]
        assert not [name for name in names if "gather" in name and "all_" in name]


def test_a_tensorrt_without_the_layers_is_named(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(platform.module, "CollectiveOperation")
    with pytest.raises(EngineError, match=r"has no collective layers, expected 11 or newer.*--collectives plugin"):
        PlanBuilder(platform, PlanLimits(chunk_rows=256, max_length=2048), BuilderSettings()).define(MEETING[0])


@pytest.mark.parametrize(
    ("wanted", "version", "works", "chosen"),
    [
        ("auto", "10.14.1", True, "plugin"),
        ("auto", "11.4.0", True, "native"),
        ("auto", "11.4.0", False, "plugin"),
        ("plugin", "11.4.0", True, "plugin"),
        ("native", "12.0.1", True, "native"),
        ("native", "11.4.0", False, None),
        ("native", "10.14.1", True, None),
    ],
)
def test_what_moves_rows_is_chosen_by_version_and_trial(
    platform: Platform, wanted: Wanted, version: str, works: bool, chosen: Chosen | None
) -> None:
    tried: list[int] = []

    def trial(platform: Platform, collectives: Collectives) -> None:
        tried.append(collectives.size)
        if not works:
            raise EngineError("TensorRT refused the communicator of the ranks")

    machine = of_version(platform, version)
    assert choose_collectives(wanted, machine, LocalCollectives(), trial) == "none"
    assert tried == []
    if chosen is None:
        with pytest.raises(EngineError):
            choose_collectives(wanted, machine, TwoRanks(), trial)
    else:
        assert choose_collectives(wanted, machine, TwoRanks(), trial) == chosen
    assert tried == ([] if wanted == "plugin" or version.startswith("10") else [2])


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_the_trial_s_plan_compiles_and_cannot_be_opened_without_a_gpu(platform: Platform) -> None:
    with pytest.raises(EngineError, match="cannot open a plan with a collective layer"):
        smallest_context(platform, 2)


def test_ranks_that_share_a_gpu_have_no_communicator() -> None:
    with pytest.raises(EngineError, match=r"need a GPU for each rank, expected 2 GPUs"):
        PlanCommunicator(TwoRanks(), torch.device("cpu"))


def test_a_torch_that_gives_no_communicator_is_named() -> None:
    class Group:
        def __init__(self, backend: object) -> None:
            self._backend = backend

        def _get_backend(self, device: torch.device) -> object:
            return self._backend

    class Backend:
        def _comm_ptr(self) -> int:
            return 4711

    group: Any = Group(Backend())
    assert communicator_pointer(group, torch.device("cpu")) == 4711
    silent: Any = Group(object())
    with pytest.raises(EngineError, match="torch gives no NCCL communicator"):
        communicator_pointer(silent, torch.device("cpu"))


def test_a_communicator_travels_as_a_capsule() -> None:
    made = PlanCommunicator.__new__(PlanCommunicator)
    made.pointer = 4096
    unpack = ctypes.pythonapi.PyCapsule_GetPointer
    unpack.restype, unpack.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    assert unpack(made.capsule(), None) == 4096


@pytest.mark.skipif(not (library_folder() / KERNEL_LIBRARY).is_file(), reason="the kernel library was not built")
def test_the_plugin_library_takes_back_what_it_never_had_and_refuses_without_nccl() -> None:
    library = library_folder() / "libredknot_tensorrt.so"
    hand_to_plugins(None, library)
    if not torch.cuda.is_available():
        with pytest.raises(EngineError, match="refused the communicator of the ranks, found"):
            hand_to_plugins(4096, library)


def test_a_missing_kernel_library_is_named(tmp_path: Any) -> None:
    with pytest.raises(EngineError, match=rf"the kernel library cannot be loaded.*{KERNEL_LIBRARY}"):
        hand_to_plugins(4096, tmp_path / "libredknot_tensorrt.so")
