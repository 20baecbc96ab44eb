"""Our ops in a network that someone else defines: TensorRT-LLM 1.2's, or any strongly typed TensorRT network.

The ops are those of :mod:`trt_redknot.ops.tensorrt`: plugin names, fields and output shapes have one definition.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.engine.tensorrt.platform import find_plugin_library, find_tensorrt, make_logger, plugin_registry
from trt_redknot.errors import EngineError
from trt_redknot.ops.tensorrt.calls import Calling
from trt_redknot.ops.tensorrt.emitter import EmitterOps
from trt_redknot.ops.tensorrt.plugins import PluginPort, RegistryPort
from trt_redknot.ops.tensorrt.tensors import ElementType, Extent, NetworkTensor, Shape, Size
from trt_redknot.ops.tensorrt.writer import NetworkWriter

if TYPE_CHECKING:
    from trt_redknot.ops.tensorrt.handle import TensorRT


def load_plugins(library: Path | None = None, module: TensorRT | None = None) -> PluginPort:
    """Load the plugin library into TensorRT's registry, once a process.

    Args:
        library: left out: the one that `make plugins` built.
        module: TensorRT's Python package; left out: `tensorrt`.

    Raises:
        EngineError: no TensorRT, no library, or one that TensorRT does not take.
    """
    trt = module or find_tensorrt()
    return RegistryPort(plugin_registry(trt, make_logger(trt), find_plugin_library(library)))


class NetworkOps:
    """Ops over the tensors of an existing network.

    Args:
        network: `tensorrt_llm.Network`, or a `tensorrt.INetworkDefinition`; strongly typed.
        port: :func:`load_plugins`.
        world: ranks; all of them own equally many rows.
        packed: cache rows are packed FP8, else bf16.
        tau, first_expert: fp32 [1] and int64 [1] tensors of the network, for routers and experts.

    Attributes:
        ops: implements :class:`trt_redknot.ops.interface.Ops`; takes and gives what `tensor` makes.
    """

    def __init__(
        self,
        network: Any,
        geometry: ModelGeometry,
        port: PluginPort,
        *,
        world: int = 1,
        packed: bool = False,
        tau: Any = None,
        first_expert: Any = None,
        module: TensorRT | None = None,
    ) -> None:
        self._module = module or find_tensorrt()
        # tensorrt_llm.Network keeps TensorRT's network here.
        self._network = getattr(network, "trt_network", network)
        self._writer = NetworkWriter(self._module, self._network)
        calling = Calling(
            tau=None if tau is None else self.tensor(tau),
            first_expert=None if first_expert is None else self.tensor(first_expert),
        )
        self.ops = EmitterOps(self._writer, port, geometry, calling, world=world, packed=packed)

    def tensor(self, value: Any, rows: Extent = Extent.ROWS) -> NetworkTensor:
        """A tensor of the network as the ops take it.

        Args:
            value: `tensorrt_llm.functional.Tensor`, or a `tensorrt.ITensor`.
            rows: what the size of its first axis is, where it changes from call to call. Tensors with the same number
                of rows must say the same.

        Raises:
            EngineError: an element type that no op takes, or another axis that changes.
        """
        inner = getattr(value, "trt_tensor", value)
        types = {type_.of(self._module): type_ for type_ in ElementType}
        if inner.dtype not in types:
            raise EngineError(
                "no op takes tensors of this type", expected=", ".join(ElementType), found=f"{inner.name} {inner.dtype}"
            )
        sizes = tuple(inner.shape)
        if any(size < 0 for size in sizes[1:]):
            raise EngineError(
                "only the first size of a tensor may change from call to call", found=f"{inner.name} {list(sizes)}"
            )
        shape: Shape = tuple(Size(extent=rows) if size < 0 else size for size in sizes)
        return NetworkTensor(tensor=inner, type=types[inner.dtype], shape=shape)

    def llm_tensor(self, value: NetworkTensor) -> Any:
        """A result as a `tensorrt_llm.functional.Tensor`.

        Raises:
            EngineError: TensorRT-LLM with networks (1.2.x) is not installed.
        """
        try:
            functional: Any = importlib.import_module("tensorrt_llm.functional")
            create = functional._create_tensor
        except (ImportError, OSError, AttributeError) as error:
            raise EngineError(
                "TensorRT-LLM with networks is not installed", expected="tensorrt_llm 1.2.x", found=error,
                remedy="Take the TensorRT tensor itself: value.tensor.",
            ) from error  # fmt: skip
        layers = [self._network.get_layer(index) for index in range(self._network.num_layers)]
        producer = next(
            layer for layer in reversed(layers)
            if any(layer.get_output(index).name == value.tensor.name for index in range(layer.num_outputs))
        )  # fmt: skip
        return create(value.tensor, producer)
