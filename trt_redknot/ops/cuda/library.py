"""Finding and loading the torch adapters of the kernel library. Nothing is loaded before `load_kernels` is called."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import torch

from trt_redknot.errors import EngineError

TORCH_LIBRARY = "libredknot_torch.so"
KERNEL_LIBRARY = "libredknot_kernels.so"
_REMEDY = "Build the libraries with `make plugins` (needs nvcc and cmake)."


def library_folder() -> Path:
    """Where setup.py puts the built libraries."""
    return Path(str(resources.files("trt_redknot"))) / "lib"


def kernels_present(folder: Path | None = None) -> bool:
    """Whether the libraries were built; says nothing about a GPU."""
    where = library_folder() if folder is None else folder
    return all((where / name).is_file() for name in (TORCH_LIBRARY, KERNEL_LIBRARY))


_loaded: set[Path] = set()


def load_kernels(folder: Path | None = None) -> None:
    """Register the ops of the kernel library as `torch.ops.redknot`. Works without a GPU; calling an op does not.

    Args:
        folder: where the libraries are; left out: those that are loaded, or else :func:`library_folder`.

    Raises:
        EngineError: a library is missing, or this torch cannot load it.
    """
    if _loaded and (folder is None or folder in _loaded):
        return
    where = library_folder() if folder is None else folder
    for name in (KERNEL_LIBRARY, TORCH_LIBRARY):
        if not (where / name).is_file():
            raise EngineError("the kernel library was not built", expected=name, path=where, remedy=_REMEDY)
    try:
        torch.ops.load_library(str(where / TORCH_LIBRARY))
    except OSError as error:
        raise EngineError(
            "the kernel library cannot be loaded",
            expected=f"a library built against a torch no newer than {torch.__version__}",
            found=str(error),
            path=where / TORCH_LIBRARY,
            remedy=_REMEDY,
        ) from error
    _loaded.add(where)


def refuse_unless(condition: bool, problem: str, *, expected: object, found: object) -> None:
    """Raise EngineError about an op's input unless `condition` holds."""
    if not condition:
        raise EngineError(problem, expected=expected, found=found)
