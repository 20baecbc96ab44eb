"""Not the Triton compiler: this folder holds the model repository for Triton Inference Server.

Both are called triton. With this repository on `sys.path`, `import triton` would find the folder, and torch would take
it for the compiler. So this module steps aside: the compiler is imported where it is installed, and is missing where it
is not.
"""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

# Any checkout of this repository, not only this one: two that step aside for each other would never end.
_elsewhere = [entry for entry in sys.path if not (Path(entry) / "triton" / "model_repository").is_dir()]
_spec = PathFinder.find_spec("triton", _elsewhere)
if _spec is None or _spec.loader is None or _spec.origin is None:
    raise ModuleNotFoundError("No module named 'triton' (the folder of that name is no package)", name="triton")
sys.modules["triton"] = _module = module_from_spec(_spec)
_spec.loader.exec_module(_module)
