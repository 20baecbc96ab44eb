"""`artifacts build`, `explain`, `quota`, `adopt`, metrics and logs, with a real engine: resumed, skipped, explained."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.artifacts.processes import Child
from tests.support.networks import NetworkOptions, build_engine, network, write_network
from trt_redknot.artifacts import ArtifactStore
from trt_redknot.cli.artifacts import artifacts
from trt_redknot.cli.checks import Status
from trt_redknot.cli.checks_store import check_store
from trt_redknot.engine.engine import Engine
from trt_redknot.errors import EngineError, RequestError, StoreError

WORDS = ["[UNK]", *(f"word{number}" for number in range(90))]
TEXTS = {"a.txt": "word1 word2 word3 " * 9, "b.md": "word7 " * 21, "d.txt": "word5 strange word6 " * 5}
IDS = [5, 6, 7, 8] * 6


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    checkpoint = write_network(network(NetworkOptions(kinds="schchc")), folder / "checkpoint")
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    return build_engine(checkpoint, folder / "engine")


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    folder = tmp_path / "documents"
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    (folder / "c.json").write_text(json.dumps(IDS))
    (folder / "ignored.pdf").write_text("x")
    return folder


def run(*arguments: object) -> Result:
    return CliRunner().invoke(artifacts, [str(argument) for argument in arguments])


def answer(*arguments: object, code: int = 0) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == code, (result.output, result.exception)
    return json.loads(result.stdout)


def samples(path: Path) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(path.read_text())
        for sample in family.samples
    }


def test_a_folder_is_built_once_in_order_of_name(engine_dir: Path, documents: Path, tmp_path: Path) -> None:
    place = ("--engine", engine_dir, "--store", tmp_path / "store")
    prom, log = tmp_path / "build.prom", tmp_path / "log.jsonl"
    rows = answer("--log", log, "build", *place, documents, "--metrics", prom, "--list", tmp_path / "ids.json")
    assert [(Path(row["document"]).name, row["tokens"], row["state"]) for row in rows] == [
        ("a.txt", 27, "built"), ("b.md", 21, "built"), ("c.json", 24, "built"), ("d.txt", 15, "built"),
    ]  # fmt: skip
    assert json.loads((tmp_path / "ids.json").read_text())["c.json"] == rows[2]["artifact_id"]
    counted = samples(prom)
    assert counted["redknot_build_seconds_count",] == 4
    assert counted["redknot_store_artifacts", "default"] == 4
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert [event["artifact_id"] for event in events if event["event"] == "built"] == [r["artifact_id"] for r in rows]
    again = answer("build", *place, documents, documents / "c.json")
    assert [row["state"] for row in again] == ["found"] * 5
    assert {row["artifact_id"] for row in again} == {row["artifact_id"] for row in rows}
    (rebuilt,) = answer("build", *place, documents / "c.json", "--rebuild")
    assert rebuilt["state"] == "built"
    table = run("build", *place, documents)
    assert table.exit_code == 0
    assert all(row["artifact_id"] in table.stdout for row in rows)
    assert "building artifacts: 87/87" in table.stderr


def test_an_interrupted_run_goes_on_where_it_was_killed(engine_dir: Path, documents: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    place = ("--engine", engine_dir, "--store", tmp_path / "store")

    def killed_in_the_third(_: object) -> None:
        built, build_artifact = [], Engine.build_artifact

        def counting(engine: Engine, store: ArtifactStore, token_ids: list[int], **options: Any) -> str:
            if len(built) == 2:
                engine._context.walk._attend = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign, assignment]
            built.append(build_artifact(engine, store, token_ids, **options))
            return built[-1]

        Engine.build_artifact = counting  # type: ignore[method-assign, assignment]
        run("build", *place, documents)

    assert Child(killed_in_the_third).wait() == -signal.SIGKILL
    store = ArtifactStore(tmp_path / "store")
    assert len(store.ls()) == 2
    assert store.stat().reserved_bytes > 0
    rows = answer("build", *place, documents)
    assert [row["state"] for row in rows] == ["found", "found", "built", "built"]
    assert all(verdict.sound for verdict in store.verify())
    assert answer("gc", "--store", store.root)["orphans"]["folders"] == 1
    assert store.stat().reserved_bytes == 0


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("x.json", "[1, 2", "not JSON"),
        ("x.json", '[1, "2"]', "ill-formed"),
        ("x.json", "[1, true]", "ill-formed"),
        ("x.json", "[]", "empty"),
        ("x.json", "[96, 97]", "outside the vocabulary"),
        ("x.txt", "", "empty"),
        ("x.bin", "x", "unknown kind"),
        ("x.txt", None, "no such document"),
    ],
)
def test_bad_documents_are_one_line(
    engine_dir: Path, tmp_path: Path, name: str, content: str | None, problem: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    result = run("build", "--engine", engine_dir, "--store", tmp_path / "store", tmp_path / name)
    assert isinstance(result.exception, RequestError)
    assert problem in str(result.exception)
    assert not (tmp_path / "store" / "default").exists()


def test_explain_from_documents_and_from_a_request(engine_dir: Path, documents: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    place = ("--engine", engine_dir, "--store", store)
    (row,) = answer("build", *place, documents / "a.txt")
    told = answer("explain", *place, documents, code=1)
    assert [document["fits"] for document in told["documents"]] == [True, False, False, False]
    assert told["reason"] == "missing_artifact"
    assert answer("explain", *place, documents / "a.txt")["admitted"] is True
    request = tmp_path / "request.json"
    request.write_text(
        json.dumps({"segments": [{"text": "hello"}, {"artifact": row["artifact_id"]}, {"artifact": "0" * 32}]})
    )
    told = answer("explain", *place, "--request", request, code=1)
    assert [document["document"] for document in told["documents"]] == ["segment 1", "segment 2"]
    shown = run("explain", *place, "--request", request)
    assert shown.exit_code == 1
    for text in ("reused", "missing_artifact", "All ranks would recompute", row["artifact_id"][:16]):
        assert text in shown.stdout, shown.stdout
    request.write_text(json.dumps({"segments": [{"artifact": row["artifact_id"]}], "reuse": None}))
    assert "asks for recomputation" in run("explain", *place, "--request", request).stdout
    request.write_text(json.dumps({"segments": [{"text": "hello"}]}))
    assert "names no artifact" in run("explain", *place, "--request", request).stdout
    assert run("explain", *place).exit_code == 2
    assert run("explain", *place, documents, "--request", request).exit_code == 2
    refused = run("explain", "--engine", tmp_path / "none", "--store", store, documents)
    assert isinstance(refused.exception, EngineError)


def test_quota_is_shown_set_and_removed(tmp_path: Path, engine_dir: Path, documents: Path) -> None:
    store = ("--store", tmp_path / "store")
    assert answer("quota", *store) == {"namespace": "default", "capacity_bytes": None}
    assert answer("quota", *store, "1000")["capacity_bytes"] == 1000
    assert "1000 bytes" in run("quota", *store).stdout
    result = run("build", "--engine", engine_dir, *store, documents)
    assert isinstance(result.exception, StoreError)
    assert "at most 1000 bytes" in str(result.exception)
    for wrong in ("-1", "0", "much", "1e9"):
        assert isinstance(run("quota", *store, "--", wrong).exception, StoreError)
    assert answer("quota", *store, "none")["capacity_bytes"] is None
    assert answer("quota", *store, "--namespace", "else")["capacity_bytes"] is None


def test_adopt_needs_a_store(tmp_path: Path) -> None:
    assert isinstance(run("adopt", "--store", tmp_path / "none").exception, StoreError)
    ArtifactStore(tmp_path / "store").set_quota(1)
    assert run("adopt", "--store", tmp_path / "store").exit_code == 0
    assert json.loads((tmp_path / "store" / ".locks" / "kernel.json").read_text())["host"] == os.uname().nodename


def test_metrics_of_a_command_that_fails_are_written(tmp_path: Path, engine_dir: Path, documents: Path) -> None:
    store, prom = tmp_path / "store", tmp_path / "verify.prom"
    answer("build", "--engine", engine_dir, "--store", store, documents / "a.txt")
    next(store.rglob("streams.safetensors")).unlink()
    assert run("verify", "--store", store, "--metrics", prom).exit_code == 1
    counted = samples(prom)
    assert counted["redknot_quarantines_total",] == 1
    assert counted["redknot_store_quarantined", "default"] == 1
    checks = {check.name: check for check in check_store(store)}
    assert checks["store locks"].status in (Status.OK, Status.WARN)
    assert checks["store namespace default"].status is Status.WARN
    assert "1 in quarantine" in checks["store namespace default"].found
    (store / ".quotas").mkdir()
    (store / ".quotas" / "default.json").write_text("{}")
    assert {check.name: check for check in check_store(store)}["store namespace default"].status is Status.FAIL
    assert list(check_store(tmp_path / "none")) == []
