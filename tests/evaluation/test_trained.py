"""The harness end to end on the trained checkpoint of the repository: it answers, and reuse changes little."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.evaluation.conftest import EXAMPLES, RECORDS
from tests.support.networks import build_engine
from trt_redknot.cli.evaluate import evaluate_command
from trt_redknot.engine.build import BuildOptions
from trt_redknot.evaluation.journal import read_journal

TRAINED = EXAMPLES / "checkpoint"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run over records of 1024 tokens, in fp32, with the policy in the network's proportions."""
    folder = tmp_path_factory.mktemp("trained")
    build_engine(TRAINED, folder / "engine", options=BuildOptions(chunk_rows=2048))
    command = [
        "run", "--engine", str(folder / "engine"), "--records", str(RECORDS), "--only", "nano-1024.jsonl",
        "--output", str(folder / "out"), "--limit", "6", "--short-tokens", "4", "--longer-tokens", "8",
        "--set", "boundary=8", "--set", "top_entries=8",
    ]  # fmt: skip
    evaluate_command(None).main(command, standalone_mode=False)
    return folder / "out"


def test_it_answers_in_both_arms(measured: Path) -> None:
    short = [pair for pair in read_journal(measured / "results.jsonl")[1] if not pair.longer]
    right = {pair.kind: (pair.recompute.exact, pair.reuse.exact) for pair in short}
    assert list(right) == ["single", "override", "relation", "implied", "continued", "two_hop"]
    # Whom a document is about may stand in the one before: what its rows learn from that is not in its artifact.
    assert right.pop("continued")[0] == 1
    assert set(right.values()) == {(1, 1)}


def test_reuse_ran_and_its_first_tokens_are_nearly_those_of_recomputation(measured: Path) -> None:
    pairs = [pair for pair in read_journal(measured / "results.jsonl")[1] if pair.kind != "continued"]
    assert all(pair.reuse.rows["omitted"] > 0 for pair in pairs)
    assert sum(pair.kl for pair in pairs) / len(pairs) < 0.1
    assert sum(pair.top1 for pair in pairs) >= len(pairs) - 1


def test_the_card_and_the_scores_agree() -> None:
    scores = json.loads((TRAINED / "scores.json").read_text(encoding="utf-8"))["exact_match"]
    card = (TRAINED / "README.md").read_text(encoding="utf-8")
    for length, by_kind in scores.items():
        assert f"| {length} | " + " | ".join(f"{share:.1%}" for share in by_kind.values()) + " |" in card
