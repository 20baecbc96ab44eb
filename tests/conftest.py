"""What holds for all tests: their order, and that none of them is held to a time.

Files that take long come first, so that no worker is left alone with one at the end. `make test` gives whole files to
its workers, in this order: what the tests of a file share is made once.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

FOLDER = Path(__file__).parent
# From about a minute to about ten seconds.
LONG = (
    "engine/test_ranks.py",
    "engine/test_reuse.py",
    "serving/test_triton_ranks.py",
    "serving/test_triton_server.py",
    "model/test_native.py",
    "evaluation/test_evaluate.py",
    "serving/test_ranks.py",
    "cli/test_build_tensorrt.py",
    "serving/test_triton_units.py",
    "admission/test_reasons.py",
    "serving/test_scheduler.py",
    "engine/tensorrt/test_answers.py",
    "engine/test_tiles.py",
    "engine/test_build.py",
    "artifacts/test_killed.py",
    "engine/test_formats.py",
    "engine/tensorrt/test_ranks.py",
    "serving/test_orchestrator.py",
    "evaluation/nano/test_training.py",
    "cli/test_commands.py",
    "checkpoint/test_memory.py",
    "cli/test_main.py",
    "evaluation/test_ttft.py",
    "reports/test_rowmap.py",
)
_RANK = {FOLDER / name: rank for rank, name in enumerate(LONG)}


def pytest_configure() -> None:
    # Loaded machines are slow machines.
    settings.register_profile("timeless", deadline=None)
    settings.load_profile("timeless")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _RANK.get(item.path, len(LONG)))
