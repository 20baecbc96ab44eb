"""What ops that are plugins share: how a plugin is called, collectives, and what differs between runs of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.errors import EngineError
from trt_redknot.ops.tensorrt.native import NativeOps
from trt_redknot.ops.tensorrt.plugins import PluginCall, PluginOutput, PluginPort
from trt_redknot.ops.tensorrt.tensors import ElementType, NetworkTensor, Shape, Size
from trt_redknot.ops.tensorrt.writer import NetworkWriter

_GATHER, _REDUCE_SCATTER = 0, 1


@dataclass(frozen=True, kw_only=True)
class Calling:
    """What differs between runs of one plan, as tensors of its network; None where the plan does not need it.

    Attributes:
        tau: fp32 [1], adaptive fanout threshold.
        first_expert: int64 [1], id of the first expert held here.
    """

    tau: NetworkTensor | None = None
    first_expert: NetworkTensor | None = None


class PluginOps(NativeOps):
    """Native ops, collectives, and :meth:`_call` for the ops that are plugins.

    Args:
        world: ranks; counts of rows are equal on all of them, the runtime pads.
        packed: cache rows are packed FP8.
        native_collectives: TensorRT's own collective layers take the place of our plugin.

    Attributes:
        written: rows for pools of the runtime, by pool.
        faults: fault cells of hash routers.
    """

    def __init__(
        self,
        writer: NetworkWriter,
        port: PluginPort,
        geometry: ModelGeometry,
        calling: Calling,
        *,
        world: int,
        packed: bool,
        native_collectives: bool = False,
    ) -> None:
        super().__init__(writer)
        self._port = port
        self._rope_dim = geometry.rope_dim
        self._head_dim = geometry.head_dim
        self._calling = calling
        self._world = world
        self._packed = packed
        self._native_collectives = native_collectives
        self.written: dict[str, NetworkTensor] = {}
        self.faults: list[NetworkTensor] = []

    def all_gather(self, own: NetworkTensor, counts: Sequence[int]) -> NetworkTensor:
        return self._collective("all_gather", _GATHER, own, times(own.shape[0], self._world))

    def reduce_scatter(self, partial: NetworkTensor, counts: Sequence[int]) -> NetworkTensor:
        return self._collective("reduce_scatter", _REDUCE_SCATTER, partial, _share(partial.shape[0], self._world))

    def _collective(self, op: str, kind: int, x: NetworkTensor, rows: int | Size) -> NetworkTensor:
        if self._world == 1:
            return x
        if self._native_collectives:
            return self._writer.collective(op, x, (rows, *x.shape[1:]), world=self._world)
        (result,) = self._call(
            op, "Collective", {"kind": kind, "group": 0, "world": self._world}, {"source": x},
            result=(x.type, (rows, *x.shape[1:])),
        )  # fmt: skip
        return result

    def _call(
        self,
        op: str,
        plugin: str,
        fields: dict[str, int | float],
        inputs: dict[str, NetworkTensor],
        **outputs: tuple[ElementType, Shape],
    ) -> tuple[NetworkTensor, ...]:
        described = tuple(PluginOutput(name=name, type=type_, shape=shape) for name, (type_, shape) in outputs.items())
        call = PluginCall(op=op, plugin=plugin, fields=fields, inputs=inputs, outputs=described)
        return self._port.add(self._writer, call)


def serves(op: str, **sizes: tuple[int, int]) -> None:
    """Raise EngineError unless each size is the one that the op's kernel was written for."""
    if any(found != served for found, served in sizes.values()):
        raise EngineError(
            f"op {op!r} has no implementation in the tensorrt backend for this geometry",
            expected=", ".join(f"{name} {served}" for name, (_, served) in sizes.items()),
            found=", ".join(f"{name} {found}" for name, (found, _) in sizes.items()),
            remedy="Build with --backend torch, which serves every geometry.",
        )


def times(rows: int | Size, factor: int) -> int | Size:
    if isinstance(rows, int):
        return rows * factor
    return Size(extent=rows.extent, factor=rows.factor * factor)


def _share(rows: int | Size, parts: int) -> int | Size:
    if isinstance(rows, int):
        return rows // parts
    assert rows.factor % parts == 0, f"{rows} rows over {parts} ranks"
    return Size(extent=rows.extent, factor=rows.factor // parts)
