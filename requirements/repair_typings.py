"""Makes TensorRT's type stubs parse: they were generated from signatures that are not Python in a few places.

Usage: repair_typings.py FOLDER, the folder that requirements/typings.txt was installed into.
"""

import re
import sys
from pathlib import Path

# Keywords as parameter names; a parameter without a default behind one that has it.
REPAIRS = (
    (re.compile(r"\bin: list\["), "in_: list["),
    (re.compile(r"(def add_scale_nd\(.*channel_axis: int)\)"), r"\1 = ...)"),
)


def repair(text: str) -> str:
    for pattern, replacement in REPAIRS:
        text = pattern.sub(replacement, text)
    return text


if __name__ == "__main__":
    stub = Path(sys.argv[1]) / "tensorrt_bindings" / "tensorrt.pyi"
    stub.write_text(repair(stub.read_text(encoding="utf-8")), encoding="utf-8")
