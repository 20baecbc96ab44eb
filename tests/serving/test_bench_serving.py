"""The load generator: what it asks, what it counts, and when it refuses to compare."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from trt_redknot.config.policy import ReusePolicy
from trt_redknot.errors import RequestError, StoreError
from trt_redknot.serving.bench.command import bench
from trt_redknot.serving.bench.load import Load, Plan
from trt_redknot.serving.bench.records import Arm, Level, Loop, Record, write_log
from trt_redknot.serving.bench.report import page
from trt_redknot.serving.bench.statistics import Objective, bootstrap, refusal_of, summarise
from trt_redknot.serving.bench.workload import Workload, random_documents
from trt_redknot.serving.messages import DoneEvent, Event, ServingError, ServingFault, TokenEvent

WORKLOAD = Workload(
    documents=random_documents(3, 20, 50, seed=1), documents_a_prompt=2, question_tokens=5, vocab=50, output_tokens=4,
    policy=ReusePolicy(budget=0.2), seed=9,
)  # fmt: skip
IDS = ["a", "b", "c"]


def record(
    arm: Arm, prompt: int, *, ttft_s: float = 1.0, tokens: int = 4, level: Level | None = None, **more: object
) -> Record:
    values: dict[str, object] = {
        "arm": arm, "level": level or Level(loop=Loop.CLOSED, value=2), "round": 0, "prompt": prompt, "warm_up": False,
        "due_s": 10.0, "sent_s": 10.0, "first_s": 10.0 + ttft_s, "last_s": 10.0 + ttft_s + 0.3, "end_s": 10.5 + ttft_s,
        "tokens": tokens, "fault": None, "arm_run": arm.value,
    }  # fmt: skip
    return Record(**{**values, **more})  # type: ignore[arg-type]


def test_both_arms_ask_the_same_and_differ_only_in_reuse() -> None:
    for prompt in range(20):
        reuse, recompute = (WORKLOAD.request(prompt, arm, IDS) for arm in (Arm.REUSE, Arm.RECOMPUTE))
        assert reuse["segments"] == recompute["segments"]
        assert (reuse["reuse"], recompute["reuse"]) == (WORKLOAD.policy.model_dump(mode="json"), None)
        assert {**reuse, "reuse": None} == recompute
        assert (reuse["max_new_tokens"], reuse["stop_tokens"]) == (4, [])
    asked = [json.dumps(WORKLOAD.request(prompt, Arm.REUSE, IDS)) for prompt in range(20)]
    assert len(set(asked)) == 20
    again = replace(WORKLOAD, seed=WORKLOAD.seed + 1).request(0, Arm.REUSE, IDS)
    assert json.dumps(again) != asked[0]


@pytest.mark.parametrize("change", [{"documents_a_prompt": 4}, {"documents_a_prompt": 0}, {"output_tokens": 0}])
def test_workloads_that_cannot_be_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(RequestError):
        replace(WORKLOAD, **change)  # type: ignore[arg-type]


class Target:
    """Answers at once, watches how many ask together, fails where it is told to."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.lock = threading.Lock()
        self.asked: list[Mapping[str, object]] = []
        self.inside = self.most = 0
        self.fail_at = fail_at

    def events(self, request: Mapping[str, object]) -> Iterator[Event]:
        with self.lock:
            self.asked.append(request)
            number = len(self.asked)
            self.inside += 1
            self.most = max(self.most, self.inside)
        threading.Event().wait(0.005)
        try:
            if number == self.fail_at:
                raise ServingError(ServingFault.QUEUE_FULL, "come later")
            for index in range(4):
                yield TokenEvent(index=index, token=1, text="")
            arm = "recompute" if request["reuse"] is None else "reuse"
            yield DoneEvent(tokens=(1,) * 4, text="", tail="", finish_reason="length", report={"arm": arm})
        finally:
            with self.lock:
                self.inside -= 1

    def build(self, request: Mapping[str, object]) -> list[str]:
        return IDS


def run(target: Target, levels: Sequence[Level], **plan: int) -> tuple[list[Record], list[str]]:
    told: list[str] = []
    sizes = {"rounds": 2, "requests": 5, "warm_up": 1, **plan}
    load = Load(target, WORKLOAD, IDS, tell=told.append)
    return load.run(Plan(levels=tuple(levels), **sizes)), told


@pytest.mark.parametrize("clients", [1, 3, 16])
def test_closed_loop_has_so_many_clients_and_alternates_the_arms(clients: int) -> None:
    target = Target()
    records, told = run(target, [Level(loop=Loop.CLOSED, value=clients)])
    assert told == [f"closed loop, {clients} clients"]
    assert len(records) == 2 * (1 + 2 * 5)
    assert target.most <= min(clients, 5)
    assert target.most >= min(clients, 2)
    order = [(item.warm_up, item.round, item.arm) for item in records]
    assert list(dict.fromkeys(order)) == [
        (True, 0, Arm.REUSE), (True, 0, Arm.RECOMPUTE), (False, 0, Arm.REUSE), (False, 0, Arm.RECOMPUTE),
        (False, 1, Arm.RECOMPUTE), (False, 1, Arm.REUSE),
    ]  # fmt: skip
    for arm in Arm:
        own = sorted(item.prompt for item in records if item.arm is arm and not item.warm_up)
        assert own == list(range(1, 11))
    assert all(item.completed and item.tokens == 4 and item.arm_run == item.arm for item in records)
    assert all((item.ttft_s or 0) > 0 and item.latency_s >= (item.ttft_s or 0) for item in records)


def test_open_loop_has_the_same_arrivals_in_both_arms_and_counts_from_them() -> None:
    records, _ = run(Target(), [Level(loop=Loop.OPEN, value=200.0)], rounds=1, requests=12, warm_up=0)
    gaps = []
    for arm in Arm:
        due = sorted(item.due_s for item in records if item.arm is arm)
        gaps.append(np.diff(due))
        assert all(item.sent_s >= item.due_s for item in records)
    assert np.allclose(gaps[0], gaps[1])
    assert 0.2 / 200 < gaps[0].mean() < 5 / 200


def test_a_failed_request_is_counted_and_forbids_a_ratio() -> None:
    records, _ = run(Target(fail_at=4), [Level(loop=Loop.CLOSED, value=1)])
    [level] = summarise(records, Objective(), seed=0)
    assert level.arms[0].faults == {"queue_full": 1}
    assert level.arms[0].completed == level.arms[0].sent - 1
    assert level.ttft_ratio is None
    assert level.refusal == "requests failed: 1 with reuse, 0 with recomputation"


def pairs(count: int = 30) -> list[Record]:
    draw = random.Random(3)
    records = []
    for prompt in range(count):
        base = draw.uniform(1.0, 2.0)
        records.append(record(Arm.REUSE, prompt, ttft_s=base / 4))
        records.append(record(Arm.RECOMPUTE, prompt, ttft_s=base))
    return records


def test_figures_are_those_of_the_records() -> None:
    records = [*pairs(), record(Arm.REUSE, 99, ttft_s=50.0, warm_up=True)]
    [level] = summarise(records, Objective(ttft_s=0.45), seed=0)
    reuse, recompute = level.arms
    times = np.array([item.ttft_s for item in records if item.arm is Arm.REUSE and not item.warm_up])
    assert (reuse.sent, reuse.completed, reuse.tokens) == (30, 30, 120)
    for q, name in ((0.5, "p50"), (0.9, "p90"), (0.99, "p99")):
        figure = reuse.ttft_s[name]
        assert figure.value == pytest.approx(float(np.quantile(times, q)))
        assert figure.low <= figure.value <= figure.high
    assert reuse.tpot_s["p50"].value == pytest.approx(0.1)
    assert reuse.seconds == pytest.approx(0.5 + times.max())
    assert reuse.goodput == pytest.approx(float((times <= 0.45).sum()) / reuse.seconds)
    assert recompute.goodput == 0.0
    assert reuse.tokens_a_second == pytest.approx(120 / reuse.seconds)
    assert level.refusal is None
    assert level.ttft_ratio is not None
    # Every pair has the ratio 4, so chance can make nothing else of it.
    assert (level.ttft_ratio.value, level.ttft_ratio.low, level.ttft_ratio.high) == pytest.approx((4.0, 4.0, 4.0))


def test_an_interval_covers_what_it_should() -> None:
    covered = 0
    for seed in range(100):
        sample = np.random.default_rng(seed).normal(5.0, 2.0, 60)
        found = bootstrap(sample, lambda values: np.asarray(values.mean(axis=1)), seed)
        assert found.value == pytest.approx(sample.mean())
        covered += found.low <= 5.0 <= found.high
    assert 85 <= covered <= 100


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda items: [replace(items[0], tokens=3), *items[1:]], "different token counts: 119 with reuse, 120 with"),
        (lambda items: [replace(items[0], arm_run="recompute"), *items[1:]], "1 requests of the reuse arm were recomp"),
        (lambda items: items[1:], "different token counts: 116 with reuse, 120 with"),
        (lambda items: [replace(items[0], fault="deadline"), *items[1:]], "requests failed: 1 with reuse, 0 with"),
    ],
)
def test_arms_that_did_not_do_the_same_are_not_compared(changed: object, message: str) -> None:
    records = pairs()
    reuse = [item for item in records if item.arm is Arm.REUSE]
    recompute = [item for item in records if item.arm is Arm.RECOMPUTE]
    assert refusal_of(reuse, recompute) is None
    found = changed(reuse)  # type: ignore[operator]
    assert message in (refusal_of(found, recompute) or "")
    [level] = summarise([*found, *recompute], Objective(), seed=0)
    assert level.ttft_ratio is None
    assert "no ratio, because" in page([level], {"engine": "x"}, "any time")


def test_the_page_draws_every_level_and_escapes_what_it_is_given() -> None:
    levels = [Level(loop=Loop.CLOSED, value=1), Level(loop=Loop.CLOSED, value=8), Level(loop=Loop.OPEN, value=2.5)]
    records = [replace(item, level=level) for level in levels for item in pairs(5)]
    html = page(summarise(records, Objective(), seed=0), {"engine": "<script>"}, "any time")
    assert html.count("<svg") == 8
    assert html.count("<circle") == 4 * 2 * 3
    assert "8 clients" in html
    assert "2.5/s" in html
    assert "<script>" not in html
    assert "4.00 (4.00-4.00)" in html


def test_the_raw_log_has_a_line_for_each_request(tmp_path: Path) -> None:
    records = pairs(3)
    write_log(tmp_path / "log.jsonl", {"seed": 1}, records)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    assert lines[0] == {"bench": {"seed": 1}}
    assert [(line["arm"], line["prompt"]) for line in lines[1:]] == [(item.arm, item.prompt) for item in records]
    with pytest.raises(StoreError, match="cannot be written"):
        write_log(tmp_path / "no" / "log.jsonl", {}, records)


def invoke(engine_dir: Path, folder: Path, *options: str) -> Result:
    log = ["--log", str(folder / "log.jsonl")]
    return CliRunner().invoke(bench, ["--engine", str(engine_dir), *log, *options], standalone_mode=False)


def test_a_service_of_this_process_is_measured(engine_dir: Path, tmp_path: Path) -> None:
    sizes = ("--random", "2x30", "--question-tokens", "4", "--output-tokens", "3", "--rounds", "2", "--requests", "2")
    levels = ("--concurrency", "2", "--rate", "50", "--warm-up", "1")
    found = invoke(engine_dir, tmp_path, "--store", str(tmp_path / "store"), *sizes, *levels, "--json",
                   "--page", str(tmp_path / "page.html"))  # fmt: skip
    assert found.exception is None, found.output
    report = json.loads(found.stdout)
    assert [level["level"] for level in report["levels"]] == [
        {"loop": "closed", "value": 2.0}, {"loop": "open", "value": 50.0},
    ]  # fmt: skip
    for level in report["levels"]:
        assert [(arm["arm"], arm["completed"], arm["tokens"]) for arm in level["arms"]] == [
            ("reuse", 4, 12), ("recompute", 4, 12),
        ]  # fmt: skip
        assert level["refusal"] is None
        assert level["ttft_ratio"]["low"] <= level["ttft_ratio"]["value"] <= level["ttft_ratio"]["high"]
    assert len((tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines()) == 1 + 2 * 2 * 5
    assert "<svg" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_level_that_is_named_twice_runs_once(engine_dir: Path, tmp_path: Path) -> None:
    """Rounds of two runs of one level would be taken for one round that lasts from the first to the second."""
    sizes = ("--random", "2x30", "--question-tokens", "4", "--output-tokens", "2", "--rounds", "1", "--requests", "2")
    levels = ("--concurrency", "2", "--concurrency", "2", "--rate", "50", "--rate", "50.0", "--warm-up", "0")
    found = invoke(engine_dir, tmp_path, "--store", str(tmp_path / "store"), *sizes, *levels, "--json")
    assert found.exception is None, found.output
    report = json.loads(found.stdout)
    assert [level["level"]["value"] for level in report["levels"]] == [2.0, 50.0]
    assert [arm["sent"] for level in report["levels"] for arm in level["arms"]] == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "a bench needs documents"),
        (("--random", "2x"), "COUNTxTOKENS"),
        (("--random", "2x9"), "--store, or --url"),
        (("--random", "2x9", "--store", "s", "--url", "http://h:1"), "--store, or --url"),
        (("--random", "1x9", "--store", "s"), "cannot have so many documents"),
        (("--random", "2x9", "--store", "s", "--no-closed"), "nothing to run"),
    ],
)
def test_what_cannot_be_measured_is_told(
    engine_dir: Path, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    assert message in str(invoke(engine_dir, tmp_path, *options).exception)
