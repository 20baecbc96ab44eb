"""The NCCL communicator that collectives inside plans run on: made by torch, handed to our plugins or to TensorRT."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trt_redknot.collectives import Collectives
from trt_redknot.collectives.device import DeviceCollectives, make_group
from trt_redknot.errors import EngineError
from trt_redknot.ops.cuda.library import KERNEL_LIBRARY

# Field `group` of the Collective plugin.
PLUGIN_GROUP = 0


class PlanCommunicator:
    """One NCCL communicator of all ranks of an engine, for its plans alone. Making one is collective.

    Attributes:
        pointer: the ncclComm_t.

    Raises:
        EngineError: the ranks do not have a GPU each, or torch gives no communicator.
    """

    def __init__(self, collectives: Collectives, device: torch.device) -> None:
        if not isinstance(collectives, DeviceCollectives):
            raise EngineError(
                "plans of several ranks need a GPU for each rank", expected=f"{collectives.size} GPUs on NCCL",
                remedy="Start one rank a GPU, or build the engine with --backend torch.",
            )  # fmt: skip
        # Kept, because the communicator goes with it.
        self._group = make_group(collectives, "nccl")
        # torch makes its communicator at the first collective.
        dist.all_reduce(torch.zeros(1, device=device), group=self._group)
        self.pointer = communicator_pointer(self._group, device)

    def capsule(self) -> object:
        """The communicator as TensorRT's Python API takes it."""
        new = ctypes.pythonapi.PyCapsule_New
        new.restype = ctypes.py_object
        new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(self.pointer, None, None)


def communicator_pointer(group: dist.ProcessGroup, device: torch.device) -> int:
    """The ncclComm_t of a group.

    Raises:
        EngineError: this torch does not tell, or has none yet.
    """
    backend: Any = group._get_backend(device)
    tell = getattr(backend, "_comm_ptr", None)
    pointer = 0 if tell is None else int(tell())
    if pointer == 0:
        raise EngineError(
            "torch gives no NCCL communicator", expected="torch 2.7 or newer with NCCL", found=torch.__version__
        )
    return pointer


def hand_to_plugins(pointer: int | None, plugin_library: Path) -> None:
    """Let the Collective plugin run on a communicator; None takes it back.

    Args:
        plugin_library: that TensorRT loaded; the kernel library lies beside it, and a process loads it once.

    Raises:
        EngineError: the kernel library is not there, or refuses the communicator.
    """
    path = plugin_library.parent / KERNEL_LIBRARY
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise EngineError("the kernel library cannot be loaded", found=error, path=path) from error
    library.redknot_set_communicator.argtypes = [ctypes.c_int32, ctypes.c_void_p]
    library.redknot_set_communicator.restype = ctypes.c_int32
    library.redknot_status_text.argtypes = [ctypes.c_int32]
    library.redknot_status_text.restype = ctypes.c_char_p
    status = library.redknot_set_communicator(PLUGIN_GROUP, pointer)
    if status:
        text = library.redknot_status_text(status).decode()
        raise EngineError("the plugin library refused the communicator of the ranks", found=text, path=path)
