"""Logs: one JSON object a line whatever the text, the fields of the event, and nothing left behind."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.artifacts.support import build_artifact
from trt_redknot.artifacts import ArtifactError, ArtifactStore
from trt_redknot.collectives import LocalCollectives
from trt_redknot.errors import StoreError
from trt_redknot.observability.logs import JsonLines, json_log

LOCAL = LocalCollectives()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@given(st.text(), st.text(), st.integers(0, 99))
def test_any_text_is_one_line(message: str, field: str, rank: int) -> None:
    record = logging.makeLogRecord({"name": "x", "levelname": "INFO", "msg": message, "detail": field})
    text = JsonLines(rank).format(record)
    assert len(text.splitlines()) == 1
    told = json.loads(text)
    assert (told["message"], told["detail"], told["rank"], told["level"]) == (message, field, rank, "info")


def test_an_event_cannot_pass_for_another_rank_or_time() -> None:
    record = logging.makeLogRecord({"msg": "m", "rank": 7, "time": "never", "level": "none"})
    told = json.loads(JsonLines(1).format(record))
    assert told["rank"] == 1
    assert told["time"].startswith("20")


def test_a_traceback_stays_on_its_line() -> None:
    try:
        raise ZeroDivisionError("why")
    except ZeroDivisionError as error:
        record = logging.makeLogRecord({"msg": "m", "exc_info": (type(error), error, error.__traceback__)})
    text = JsonLines().format(record)
    assert "\n" not in text
    assert "ZeroDivisionError: why" in json.loads(text)["traceback"]


def test_store_events_are_told_with_their_fields(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    store = ArtifactStore(tmp_path / "store", namespace="tenant")
    with json_log(log, rank=3, level=logging.DEBUG):
        artifact_id = build_artifact(store, [1, 2, 3], LOCAL)
        with pytest.raises(ArtifactError):
            store.open("f" * 32)
        next((tmp_path / "store" / "tenant" / artifact_id).rglob("streams.safetensors")).unlink()
        store.verify()
    build_artifact(store, [1, 2, 3], LOCAL)
    told = lines(log)
    assert [each["event"] for each in told] == ["lookup", "lookup", "built", "lookup", "quarantined"]
    assert {each["namespace"] for each in told} == {"tenant"}
    assert {each["rank"] for each in told} == {3}
    assert told[2]["artifact_id"] == artifact_id
    assert told[2]["bytes"] > 0
    assert (told[3]["outcome"], told[3]["purpose"]) == ("miss", "read")
    assert told[4]["level"] == "warning"
    assert "streams.safetensors" in told[4]["reason"]


def test_the_logger_is_left_as_it_was(tmp_path: Path) -> None:
    logger, below = logging.getLogger("trt_redknot"), logging.getLogger("trt_redknot.store")
    before = (logger.level, logger.propagate, list(logger.handlers), below.isEnabledFor(logging.DEBUG))
    with json_log(tmp_path / "log", level=logging.DEBUG):
        assert not logger.propagate
        assert below.isEnabledFor(logging.DEBUG)
    assert (logger.level, logger.propagate, list(logger.handlers), below.isEnabledFor(logging.DEBUG)) == before
    with pytest.raises(StoreError, match="log cannot be written"), json_log(tmp_path / "no" / "log"):
        pass


def test_standard_error_is_named_by_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    with json_log("-"):
        logging.getLogger("trt_redknot.somewhere").warning("hello")
    assert json.loads(capsys.readouterr().err)["message"] == "hello"
