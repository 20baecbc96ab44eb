"""The TensorRT, GPU and plugin library that a rank builds with, or the reason why it cannot."""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from trt_redknot.digests import digest_file
from trt_redknot.errors import EngineError
from trt_redknot.ops.cuda.library import library_folder
from trt_redknot.ops.tensorrt.plugins import NAMESPACE, VERSION, PluginPort, RegistryPort

if TYPE_CHECKING:
    import tensorrt as trt

    from trt_redknot.ops.tensorrt.handle import TensorRT

PLUGIN_LIBRARY = "libredknot_tensorrt.so"
# One that every build of the library has.
KNOWN_PLUGIN = "SegLatentAttention"
_LOG = logging.getLogger("trt_redknot.tensorrt")
_OLDEST = 10


def _unchanged(config: trt.IBuilderConfig) -> None:
    """A builder configuration needs nothing more."""


@dataclass(frozen=True, kw_only=True)
class Platform:
    """What plans are built with and for.

    Attributes:
        gpu: name of this rank's GPU; plans run on no other kind.
        free_bytes: device memory that was free when the build began.
        plugin_build: digest of the plugin library.
        plugin_library: where it is; None where plugins are cut out.
        port: makes the plugin port of one network.
        configure: called with every builder configuration.
        creating: held while a builder is made. Making one logs under a lock of TensorRT's, and does not let go of the
            interpreter's: two ranks that are threads of a process would wait for each other for good.
    """

    module: TensorRT
    logger: trt.ILogger
    gpu: str
    free_bytes: int
    plugin_build: str
    port: Callable[[], PluginPort]
    configure: Callable[[trt.IBuilderConfig], None] = _unchanged
    plugin_library: Path | None = None
    creating: threading.Lock = field(default_factory=threading.Lock)

    @property
    def version(self) -> str:
        return self.module.__version__

    def record(self) -> dict[str, str]:
        """What must be the same on all ranks."""
        return {"tensorrt": self.version, "gpu": self.gpu, "plugin_build": self.plugin_build}


def find_platform(rank: int, plugin_library: Path | None = None) -> Platform:
    """The platform of this rank, on the GPU that is its by number.

    Args:
        plugin_library: left out: the one that `make plugins` built.

    Raises:
        EngineError: no TensorRT, no GPU, no plugin library, or one that TensorRT does not take.
    """
    module = find_tensorrt()
    gpu, free = _take_gpu(rank)
    library = find_plugin_library(plugin_library)
    logger = make_logger(module)
    registry = plugin_registry(module, logger, library)
    return Platform(
        module=module, logger=logger, gpu=gpu, free_bytes=free, plugin_build=digest_file(library),
        port=lambda: RegistryPort(registry), plugin_library=library,
    )  # fmt: skip


def find_plugin_library(named: Path | None = None) -> Path:
    """The plugin library: `named`, or the one that `make plugins` built. Raises EngineError where it is not."""
    library = named or library_folder() / PLUGIN_LIBRARY
    if not library.is_file():
        raise EngineError(
            "the plugin library was not built", expected=PLUGIN_LIBRARY, path=library.parent,
            remedy="Build it with `make plugins` (needs nvcc, cmake and TensorRT's headers), or name it with "
            "--plugin-library.",
        )  # fmt: skip
    return library


def plugin_registry(module: TensorRT, logger: trt.ILogger, library: Path) -> trt.IPluginRegistry:
    """TensorRT's registry with our plugins. A process loads the library once: TensorRT refuses plugins that it has.

    Raises:
        EngineError: TensorRT does not take the library.
    """
    registry = module.Builder(logger).get_plugin_registry()
    known = registry.get_creator(KNOWN_PLUGIN, VERSION, NAMESPACE) is not None
    if not known and registry.load_library(str(library)) is None:
        raise EngineError(
            "TensorRT did not load the plugin library", path=library,
            remedy=f"It must be built for TensorRT {module.__version__}; the log above has TensorRT's reason.",
        )  # fmt: skip
    return registry


def find_tensorrt(name: str = "tensorrt") -> TensorRT:
    """The TensorRT module.

    Raises:
        EngineError: it is not installed, cannot be loaded, has no builder, or is too old.
    """
    remedy = "Install TensorRT 10 or 11 with its Python package, or build with --backend torch."
    try:
        module = importlib.import_module(name)
    except (ImportError, OSError) as error:
        raise EngineError("TensorRT is not installed", found=error, remedy=remedy) from error
    # A folder of type stubs, or the lean runtime, imports and cannot build.
    if not hasattr(module, "Builder"):
        raise EngineError("this TensorRT has no builder", found=f"module {name!r} without Builder", remedy=remedy)
    version = str(module.__version__)
    if int(version.split(".")[0]) < _OLDEST:
        raise EngineError("this TensorRT is too old", expected=f"{_OLDEST} or newer", found=version, remedy=remedy)
    return cast("TensorRT", module)


def make_logger(module: TensorRT) -> trt.ILogger:
    """TensorRT's messages as records of the logger `trt_redknot.tensorrt`."""
    levels = {"INTERNAL_ERROR": logging.CRITICAL, "ERROR": logging.ERROR, "WARNING": logging.WARNING}

    class _Logger(module.ILogger):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()

        def log(self, severity: trt.ILogger.Severity, msg: str) -> None:
            _LOG.log(levels.get(severity.name, logging.DEBUG), "%s", msg)

    return _Logger()


def _take_gpu(rank: int) -> tuple[str, int]:
    """Make this rank's GPU the current one: its name and free bytes."""
    remedy = "Build on the machine that will run the engine, or with --backend torch."
    if not torch.cuda.is_available():
        raise EngineError("TensorRT builds plans on a GPU and there is none", remedy=remedy)
    count = torch.cuda.device_count()
    device = rank % count
    torch.cuda.set_device(device)
    free, _ = torch.cuda.mem_get_info(device)
    return torch.cuda.get_device_name(device), free
