"""The machine that a bench runs on: what it is, what it can reach, how much of its memory was taken."""

from __future__ import annotations

import gc
import platform
import shutil
import subprocess
from typing import Protocol

import torch

from trt_redknot.digests import digest_file
from trt_redknot.evaluation.metering import Ceilings, Clock, DeviceClock, measure_ceilings
from trt_redknot.ops.cuda.library import KERNEL_LIBRARY, library_folder

_TIMEOUT_S = 20.0


class Machine(Protocol):
    """What the bench asks of the machine it runs on.

    Attributes:
        device: where ranks compute.
        clock: times ops there.
    """

    device: torch.device

    @property
    def clock(self) -> Clock: ...

    def describe(self) -> dict[str, object]:
        """What ran: hardware and software."""
        ...

    def ceilings(self) -> Ceilings: ...

    def begin(self) -> None:
        """Forget the peak of memory, and what is cached."""
        ...

    def peak_gib(self) -> tuple[float, float | None]:
        """Most memory since `begin`, in tensors and by the driver; None where that is not known."""
        ...


class Gpu:
    """A :class:`Machine` with a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.clock = DeviceClock()
        self._given_back = 0

    def describe(self) -> dict[str, object]:
        return {
            "gpu": torch.cuda.get_device_name(self.device),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
            "kernel_library": digest_file(library_folder() / KERNEL_LIBRARY),
        }

    def ceilings(self) -> Ceilings:
        return measure_ceilings(self.device)

    def begin(self) -> None:
        # What only refers to itself is in memory still.
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        self._given_back = self._retries()

    def peak_gib(self) -> tuple[float, float | None]:
        # torch keeps what it took from the driver until it has to give some back: until then, now is the peak.
        kept = self._retries() == self._given_back
        return torch.cuda.max_memory_allocated(self.device) / 2**30, used_by_driver(self.device) if kept else None

    def _retries(self) -> int:
        return int(torch.cuda.memory_stats(self.device)["num_alloc_retries"])


def used_by_driver(device: torch.device) -> float | None:
    """GiB in use on a GPU now, by `nvidia-smi`; None where it is not there or does not say."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    asked = [
        program, f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}", "--query-gpu=memory.used",
        "--format=csv,noheader,nounits",
    ]  # fmt: skip
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True).stdout
        return int(answer) / 2**10
    except (subprocess.SubprocessError, OSError, ValueError):
        return None
