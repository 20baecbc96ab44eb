"""The harness end to end on the trained checkpoint of the repository: it answers, and reuse changes little."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.evaluation.conftest import EXAMPLES
from tests.support.networks import build_engine
from trt_redknot.cli.evaluate import evaluate_command
from trt_redknot.engine.build import BuildOptions
from trt_redknot.evaluation.frozen import freeze
from trt_redknot.evaluation.journal import read_journal
from trt_redknot.evaluation.nano.prompts import write_records
from trt_redknot.evaluation.nano.world import SHORT_KINDS

TRAINED = EXAMPLES / "checkpoint"
# Of records that the network answers without reuse: no network answers all there are.
SEED = 1


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run over records of 1024 tokens, in fp32, with the default policy."""
    folder = tmp_path_factory.mktemp("trained")
    short, longer = len(SHORT_KINDS), 1
    written = write_records(folder / "records", [1024], seed=SEED, short=short, longer=longer)
    freeze(folder / "records", "trained", written, short=short, longer=longer)
    build_engine(TRAINED, folder / "engine", options=BuildOptions(chunk_rows=2048))
    command = [
        "run", "--engine", str(folder / "engine"), "--records", str(folder / "records"),
        "--output", str(folder / "out"), "--short-tokens", "4", "--longer-tokens", "8",
    ]  # fmt: skip
    evaluate_command(None).main(command, standalone_mode=False)
    return folder / "out"


def test_it_answers_in_both_arms(measured: Path) -> None:
    short = [pair for pair in read_journal(measured / "results.jsonl")[1] if not pair.longer]
    right = {pair.kind: (pair.recompute.exact, pair.reuse.exact) for pair in short}
    assert right == dict.fromkeys(SHORT_KINDS, (1, 1))


def test_reuse_ran_and_its_first_tokens_are_nearly_those_of_recomputation(measured: Path) -> None:
    pairs = read_journal(measured / "results.jsonl")[1]
    assert all(pair.reuse.rows["omitted"] > 0 for pair in pairs)
    assert sum(pair.kl for pair in pairs) / len(pairs) < 0.1
    assert sum(pair.top1 for pair in pairs) >= len(pairs) - 1


def test_the_card_and_the_scores_agree() -> None:
    scores = json.loads((TRAINED / "scores.json").read_text(encoding="utf-8"))["exact_match"]
    card = (TRAINED / "README.md").read_text(encoding="utf-8")
    for length, by_kind in scores.items():
        assert f"| {length} | " + " | ".join(f"{share:.1%}" for share in by_kind.values()) + " |" in card
