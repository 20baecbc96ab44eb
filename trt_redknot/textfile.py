"""Text files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8 in one step: whoever reads, or fails to write, meets the old file or the whole new one.

    Folders on the way are made. A link stays, and what it points to is replaced. What is no regular file, such as
    /dev/stdout or a pipe, is written to as it is.

    Raises:
        OSError: it cannot be written; nothing is left beside it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    target = Path(os.path.realpath(path))
    beside = target.with_name(f".{uuid.uuid4().hex}")
    try:
        with beside.open("x", encoding="utf-8") as file:
            file.write(text)
        beside.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
