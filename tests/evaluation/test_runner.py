"""The runner: what a run is told apart by, and records that a variant cannot cut are left out with a reason."""

from __future__ import annotations

import dataclasses
import html
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from tests.evaluation.conftest import RECORDS, Nano
from tests.evaluation.samples import record
from trt_redknot.config.policy import ReusePolicy
from trt_redknot.evaluation.arms import ArmRunner
from trt_redknot.evaluation.evidence import Evidence
from trt_redknot.evaluation.frozen import FrozenSet, Question, open_frozen
from trt_redknot.evaluation.journal import RESULTS, Journal, JournalError, read_journal
from trt_redknot.evaluation.markdown import overall_markdown
from trt_redknot.evaluation.page import render_evaluation
from trt_redknot.evaluation.records import Record
from trt_redknot.evaluation.runner import Evaluation
from trt_redknot.evaluation.summary import Summary, summarise
from trt_redknot.evaluation.tables import left_out_table
from trt_redknot.evaluation.variants import Variant, single, sweep

POLICY = ReusePolicy(budget=0.2, boundary=4, tail=0, top_entries=2)


@pytest.fixture(scope="module")
def frozen() -> FrozenSet:
    return open_frozen(RECORDS, ["nano-256.jsonl"])[0]


@pytest.fixture(scope="module")
def runner(nano: Nano) -> ArmRunner:
    return ArmRunner(engine=nano.engine, tokenizer=nano.tokenizer, store=nano.store, short_tokens=1, longer_tokens=1)


def asked(name: str, context: str) -> Question:
    made = record(_id=name, dataset="nano", context=context)
    return Question(file="one.jsonl", record=Record.model_validate_json(json.dumps(made)), longer=False)


def evaluation(
    frozen: FrozenSet, runner: ArmRunner, questions: list[Question], variants: list[Variant] | None = None
) -> Evaluation:
    return Evaluation(
        frozen=frozen, questions=questions, variants=variants or single(POLICY), runners={"base": runner}
    )  # fmt: skip


@pytest.mark.parametrize(
    "change", [{"experts": "fp8"}, {"tp_size": 8}, {"backend": "tensorrt"}, {"checkpoint_fingerprint": "f" * 64}]
)
def test_results_of_another_engine_are_refused(
    frozen: FrozenSet, runner: ArmRunner, tmp_path: Path, change: dict[str, Any]
) -> None:
    refuses_results_of(frozen, runner, tmp_path / RESULTS, manifest=runner.engine.manifest.model_copy(update=change))


def test_results_of_another_device_are_refused(frozen: FrozenSet, runner: ArmRunner, tmp_path: Path) -> None:
    """Kernels round otherwise than the reference, and a bfloat16 engine is opened on either."""
    refuses_results_of(frozen, runner, tmp_path / RESULTS, device=torch.device("cuda", 1))


def refuses_results_of(frozen: FrozenSet, runner: ArmRunner, path: Path, **change: Any) -> None:
    """A run goes on with the same engine, and with none that differs in `change`."""
    own = runner.engine
    values = {"manifest": own.manifest, "geometry": own.geometry, "device": own.device, **change}
    other = dataclasses.replace(runner, engine=SimpleNamespace(**values))  # type: ignore[arg-type]
    Journal(path, evaluation(frozen, runner, []).describe()).close()
    with pytest.raises(JournalError, match=r"of another run.*'engines'"):
        Journal(path, evaluation(frozen, other, []).describe())
    Journal(path, evaluation(frozen, runner, []).describe()).close()


LONG, SHORT = "Passage 1:\n" + "The boat of Mara is red. " * 8, "Passage 1:\nThe boat of Mara is red."


@pytest.fixture(scope="module")
def swept(frozen: FrozenSet, runner: ArmRunner, tmp_path_factory: pytest.TempPathFactory) -> Summary:
    """A sweep of a long record and of one that is too short to be cut at multiples."""
    variants = sweep(POLICY, ["alignment"], multiple=32)
    found = evaluation(frozen, runner, [asked("short", SHORT), asked("long", LONG)], variants)
    output = tmp_path_factory.mktemp("out")
    done: list[int] = []
    found.run(output, done.append)
    assert sum(done) == 4
    # Nothing is left to do, and what was left out belongs to the run.
    again = dataclasses.replace(found)
    again.run(output)
    work = again.workload(0)
    assert work.pairs == 3
    return summarise(*read_journal(output / RESULTS), Evidence.MEASURED)


def test_a_record_too_short_for_a_cutting_is_left_out(swept: Summary) -> None:
    assert sorted((pair.variant, pair.id) for pair in swept.pairs) == [
        ("alignment=32", "long"), ("alignment=as cut", "long"), ("alignment=as cut", "short"),
    ]  # fmt: skip
    (entry,) = swept.left_out
    assert (entry["variant"], entry["id"]) == ("alignment=32", "short")
    assert "at least 32 tokens" in entry["reason"]


def test_reports_say_what_was_left_out_and_why(swept: Summary) -> None:
    (entry,) = swept.left_out
    assert swept.to_json()["run"]["left_out"] == [entry]
    table = left_out_table(swept)
    assert table is not None
    console = Console(file=io.StringIO(), width=240)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    page = html.unescape(render_evaluation(swept, "Title"))
    for text in (page, overall_markdown(swept, "alignment"), console.file.getvalue()):
        assert entry["reason"] in text
        assert "Left out" in text


def test_reports_of_older_runs_left_nothing_out(swept: Summary) -> None:
    run = {key: value for key, value in swept.run.items() if key != "left_out"}
    older = summarise(run, swept.pairs, Evidence.ARCHIVED)
    assert left_out_table(older) is None
    assert "Left out" not in render_evaluation(older, "Title")
