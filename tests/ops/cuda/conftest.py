"""`poisoned_memory`: torch fills fresh memory, outputs and workspaces alike, with NaN while a module's tests run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benches import measure


@pytest.fixture(scope="module")
def poisoned_memory() -> Iterator[None]:
    with measure.poisoned_memory():
        yield
