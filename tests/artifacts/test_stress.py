"""The crowd of docs/reliability.md, scaled: nothing torn, nothing lost, nobody hangs."""

from __future__ import annotations

import random
from pathlib import Path

from tests.artifacts.stress import Crowd, run


def test_readers_builders_and_an_evictor_for_some_seconds(tmp_path: Path) -> None:
    seed = random.randrange(2**31)
    outcome = run(tmp_path / "store", Crowd(readers=8, builders=4, evictors=1, seconds=6.0, room=12, seed=seed))
    assert outcome.problems == [], f"seed {seed}"
    for kind in ("read", "built", "removed", "sound"):
        assert outcome.counts[kind] > 0, outcome.counts
