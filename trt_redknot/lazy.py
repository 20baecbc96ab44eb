"""Names that a package offers and imports on first use, so that what does not need torch does not wait for it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping


def importer(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """The `__getattr__` of a package.

    Args:
        homes: module below the package, by the name that it defines.
    """

    def find(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    return find
