"""Layers of an INetworkDefinition, each named, each checked: the only caller of TensorRT's `add_*` functions but the
plugin port."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from trt_redknot.errors import EngineError
from trt_redknot.ops.tensorrt.tensors import ElementType, NetworkTensor, Shape, network_dims

if TYPE_CHECKING:
    import tensorrt as trt

    from trt_redknot.ops.tensorrt.handle import TensorRT

_Layer = TypeVar("_Layer", bound="trt.ILayer")


class NetworkWriter:
    """Adds layers to one network.

    Args:
        module: the TensorRT module.
        network: strongly typed, so that a type that does not fit is an error and never a silent cast.
    """

    def __init__(self, module: TensorRT, network: trt.INetworkDefinition) -> None:
        self.module = module
        self.network = network
        self._names: dict[str, int] = {}
        # TensorRT keeps pointers into constants until the plan is built.
        self._constants: list[NDArray[np.generic]] = []

    def unique(self, name: str) -> str:
        """`name`, numbered from its second use on."""
        self._names[name] = count = self._names.get(name, 0) + 1
        return name if count == 1 else f"{name}.{count}"

    def input(self, name: str, type_: ElementType, shape: Shape) -> NetworkTensor:
        dims = self.module.Dims(list(network_dims(shape)))
        tensor = self.network.add_input(name, type_.of(self.module), dims)
        if tensor is None:
            raise EngineError(
                "TensorRT refused an input of the network", found=f"{name} {type_} {list(map(str, shape))}"
            )
        return NetworkTensor(tensor=tensor, type=type_, shape=shape)

    def output(self, name: str, value: NetworkTensor) -> None:
        """Make a value an output. An input that passes through unchanged becomes a copy."""
        tensor = value.tensor
        if tensor.is_network_input:
            tensor = self._added(self.network.add_identity(tensor), "identity").get_output(0)
        tensor.name = name
        self.network.mark_output(tensor)

    def plugin(self, name: str, plugin: trt.IPluginV3, inputs: Sequence[NetworkTensor]) -> trt.IPluginV3Layer:
        layer = self._added(self.network.add_plugin_v3([value.tensor for value in inputs], [], plugin), name)
        layer.name = name
        return layer

    def collective(self, kind: str, x: NetworkTensor, shape: Shape, *, world: int) -> NetworkTensor:
        """A collective layer of TensorRT 11.

        Args:
            kind: all_gather or reduce_scatter (a sum), over the rows.

        Raises:
            EngineError: this TensorRT has none, or refuses it.
        """
        operations: Any = getattr(self.module, "CollectiveOperation", None)
        add: Any = getattr(self.network, "add_dist_collective", None)
        if operations is None or add is None:
            raise EngineError(
                "this TensorRT has no collective layers", expected="11 or newer", found=self.module.__version__,
                remedy="Build with --collectives plugin.",
            )  # fmt: skip
        reduction = self.module.ReduceOperation.SUM if kind == "reduce_scatter" else self._no_reduction()
        # Root: none. Groups: all ranks of the communicator are one.
        layer = self._added(add(x.tensor, getattr(operations, kind.upper()), reduction, -1, None), kind)
        layer.num_ranks = world
        return self._result(layer, kind, x.type, shape)

    def _no_reduction(self) -> Any:
        kinds: Any = self.module.ReduceOperation
        return kinds.NONE

    def matmul(self, a: NetworkTensor, b: NetworkTensor, shape: Shape) -> NetworkTensor:
        """a @ b.T over the last two axes; the others are broadcast."""
        operation = self.module.MatrixOperation
        layer = self.network.add_matrix_multiply(a.tensor, operation.NONE, b.tensor, operation.TRANSPOSE)
        return self._result(layer, "matmul", a.type, shape)

    def einsum(self, equation: str, a: NetworkTensor, b: NetworkTensor, shape: Shape) -> NetworkTensor:
        return self._result(self.network.add_einsum([a.tensor, b.tensor], equation), "einsum", a.type, shape)

    def elementwise(self, a: NetworkTensor, b: NetworkTensor, operation: trt.ElementWiseOperation) -> NetworkTensor:
        """Operands of one rank; axes of size 1 are broadcast."""
        shape = tuple(y if x == 1 else x for x, y in zip(a.shape, b.shape, strict=True))
        return self._result(self.network.add_elementwise(a.tensor, b.tensor, operation), "elementwise", a.type, shape)

    def activation(self, x: NetworkTensor, operation: trt.ActivationType) -> NetworkTensor:
        return self._result(self.network.add_activation(x.tensor, operation), "activation", x.type, x.shape)

    def unary(self, x: NetworkTensor, operation: trt.UnaryOperation) -> NetworkTensor:
        return self._result(self.network.add_unary(x.tensor, operation), "unary", x.type, x.shape)

    def reduce(self, x: NetworkTensor, operation: trt.ReduceOperation, axis: int, *, keep: bool) -> NetworkTensor:
        layer = self.network.add_reduce(x.tensor, operation, 1 << axis, keep)
        shape = (*x.shape[:axis], *((1,) if keep else ()), *x.shape[axis + 1 :])
        return self._result(layer, "reduce", x.type, shape)

    def cast(self, x: NetworkTensor, type_: ElementType) -> NetworkTensor:
        if x.type is type_:
            return x
        return self._result(self.network.add_cast(x.tensor, type_.of(self.module)), "cast", type_, x.shape)

    def reshape(self, x: NetworkTensor, shape: Shape) -> NetworkTensor:
        """Sizes that change from call to call keep their axis or move one that is -1; the rest is fixed."""
        layer = self.network.add_shuffle(x.tensor)
        if layer is not None:
            layer.reshape_dims = self.module.Dims(list(network_dims(shape)))
        return self._result(layer, "reshape", x.type, shape)

    def gather_rows(self, table: NetworkTensor, rows: NetworkTensor) -> NetworkTensor:
        layer = self.network.add_gather(table.tensor, rows.tensor, 0)
        return self._result(layer, "gather", table.type, (*rows.shape, *table.shape[1:]))

    def concatenate(self, parts: Sequence[NetworkTensor], axis: int, shape: Shape) -> NetworkTensor:
        layer = self.network.add_concatenation([part.tensor for part in parts])
        if layer is not None:
            layer.axis = axis
        return self._result(layer, "concatenation", parts[0].type, shape)

    def rows_of(self, x: NetworkTensor) -> trt.ITensor:
        """int64 [1]: how many rows x has."""
        shape = self._added(self.network.add_shape(x.tensor), "shape").get_output(0)
        dims = self.module.Dims
        return self._added(self.network.add_slice(shape, dims([0]), dims([1]), dims([1])), "slice").get_output(0)

    def difference(self, a: trt.ITensor, b: trt.ITensor) -> trt.ITensor:
        """a - b of two row counts."""
        layer = self.network.add_elementwise(a, b, self.module.ElementWiseOperation.SUB)
        return self._added(layer, "elementwise").get_output(0)

    def first_rows(self, x: NetworkTensor, count: trt.ITensor, shape: Shape) -> NetworkTensor:
        """The first rows of a matrix; `count` is int64 [1]."""
        width = self.constant(np.array([x.fixed(1)], dtype=np.int64), ElementType.INT64)
        sizes = self._added(self.network.add_concatenation([count, width.tensor]), "concatenation").get_output(0)
        dims = self.module.Dims
        layer = self._added(self.network.add_slice(x.tensor, dims([0, 0]), dims([1, 1]), dims([1, 1])), "slice")
        layer.set_input(2, sizes)
        return self._result(layer, "slice", x.type, shape)

    def scalar(self, value: float, like: NetworkTensor) -> NetworkTensor:
        """A constant that broadcasts against `like`, in its type."""
        shape = (1,) * len(like.shape)
        constant = self.constant(np.full(shape, value, dtype=np.float32), ElementType.FLOAT32)
        # numpy has no bf16: the builder folds the cast of a constant.
        return self.cast(constant, like.type)

    def constant(self, values: NDArray[np.generic], type_: ElementType) -> NetworkTensor:
        values = np.ascontiguousarray(values)
        self._constants.append(values)
        layer = self.network.add_constant(self.module.Dims(list(values.shape)), self.module.Weights(values))
        return self._result(layer, "constant", type_, tuple(values.shape))

    def _result(self, layer: _Layer | None, kind: str, type_: ElementType, shape: Shape) -> NetworkTensor:
        tensor: trt.ITensor = self._added(layer, kind).get_output(0)
        if tensor.dtype != type_.of(self.module):
            raise EngineError(f"layer {kind} of the network has another type", expected=type_, found=tensor.dtype)
        return NetworkTensor(tensor=tensor, type=type_, shape=shape)

    def _added(self, layer: _Layer | None, kind: str) -> _Layer:
        if layer is None:
            raise EngineError("TensorRT refused a layer of the network", found=kind)
        layer.name = self.unique(kind)
        return layer
