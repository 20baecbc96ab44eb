"""Ops that TensorRT's own layers express. Arithmetic and rounding follow `ops/reference`."""

from __future__ import annotations

from collections.abc import Sequence

from trt_redknot.ops.tensorrt.tensors import ElementType, NetworkRows, NetworkTensor
from trt_redknot.ops.tensorrt.writer import NetworkWriter


class NativeOps:
    """The part of :class:`trt_redknot.ops.interface.Ops` without plugins, over network tensors."""

    def __init__(self, writer: NetworkWriter) -> None:
        self._writer = writer

    def embed(self, tokens_R: NetworkTensor, table_VM: NetworkTensor, *, streams: int) -> NetworkTensor:
        rows, hidden = tokens_R.shape[0], table_VM.fixed(1)
        one = self._writer.reshape(self._writer.gather_rows(table_VM, tokens_R), (rows, 1, hidden))
        return self._writer.concatenate([one] * streams, 1, (rows, streams, hidden))

    def linear(self, x: NetworkTensor, weight: NetworkTensor) -> NetworkTensor:
        return self._writer.matmul(x, weight, (x.shape[0], weight.shape[0]))

    def linears(self, x: NetworkTensor, weights: Sequence[NetworkTensor]) -> tuple[NetworkTensor, ...]:
        return tuple(self.linear(x, weight) for weight in weights)

    def split_heads(self, x: NetworkTensor, *, dim: int) -> NetworkTensor:
        return self._writer.reshape(x, (x.shape[0], x.fixed(1) // dim, dim))

    def first_rows(self, x: NetworkTensor, count: NetworkRows) -> NetworkTensor:
        return self._writer.first_rows(x, count.count, (count.size, x.shape[1]))

    def rms_norm(self, x: NetworkTensor, weight: NetworkTensor, *, eps: float) -> NetworkTensor:
        w, kinds, unary = self._writer, self._writer.module.ElementWiseOperation, self._writer.module.UnaryOperation
        wide = w.cast(x, ElementType.FLOAT32)
        square = w.elementwise(wide, wide, kinds.PROD)
        mean = w.reduce(square, w.module.ReduceOperation.AVG, 1, keep=True)
        root = w.unary(w.elementwise(mean, w.scalar(eps, mean), kinds.SUM), unary.SQRT)
        scale = w.reshape(w.cast(weight, ElementType.FLOAT32), (1, weight.fixed(0)))
        normed = w.elementwise(w.elementwise(wide, root, kinds.DIV), scale, kinds.PROD)
        return w.cast(normed, x.type)

    def grouped_linear(self, heads: NetworkTensor, weight: NetworkTensor) -> NetworkTensor:
        groups, rank, width = (weight.fixed(axis) for axis in range(3))
        grouped = self._writer.reshape(heads, (heads.shape[0], groups, width))
        outputs = self._writer.einsum("rgk,gck->rgc", grouped, weight, (heads.shape[0], groups, rank))
        return self._writer.reshape(outputs, (heads.shape[0], groups * rank))

    def shared_expert(
        self, x_RM: NetworkTensor, gate_FM: NetworkTensor, up_FM: NetworkTensor, down_MF: NetworkTensor, *, limit: float
    ) -> NetworkTensor:
        gated = self.swiglu(self.linear(x_RM, gate_FM), self.linear(x_RM, up_FM), limit)
        return self.linear(gated, down_MF)

    def add(self, x: NetworkTensor, y: NetworkTensor) -> NetworkTensor:
        return self._writer.elementwise(x, y, self._writer.module.ElementWiseOperation.SUM)

    def swiglu(self, gate: NetworkTensor, up: NetworkTensor, limit: float) -> NetworkTensor:
        """silu(min(gate, limit)) * clamp(up, -limit, limit), in fp32, rounded once."""
        w, kinds, type_ = self._writer, self._writer.module.ElementWiseOperation, gate.type
        gate, up = w.cast(gate, ElementType.FLOAT32), w.cast(up, ElementType.FLOAT32)
        high = w.scalar(limit, gate)
        gate, up = w.elementwise(gate, high, kinds.MIN), w.elementwise(up, high, kinds.MIN)
        up = w.elementwise(up, w.scalar(-limit, up), kinds.MAX)
        silu = w.elementwise(gate, w.activation(gate, w.module.ActivationType.SIGMOID), kinds.PROD)
        return w.cast(w.elementwise(silu, up, kinds.PROD), type_)
