"""`artifacts ...`: tables for people, JSON for machines, exit codes, one line for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.artifacts.support import build_artifact
from trt_redknot.artifacts import ArtifactStore
from trt_redknot.cli.artifacts import artifacts, human_bytes
from trt_redknot.collectives import LocalCollectives
from trt_redknot.errors import StoreError

TOKENS = list(range(21))


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(artifacts, [str(argument) for argument in arguments])


def answer(*arguments: str | Path, code: int = 0) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == code, result
    return json.loads(result.stdout)


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    made = ArtifactStore(tmp_path / "store")
    build_artifact(made, TOKENS, LocalCollectives())
    build_artifact(made, TOKENS[:7], LocalCollectives())
    return made


def test_ls_and_inspect(store: ArtifactStore) -> None:
    listed = answer("ls", "--store", store.root)
    assert sorted(each["tokens"] for each in listed) == [7, 21]
    assert all(each["fault"] is None and not each["leased"] and each["format"] == "float32" for each in listed)
    table = run("ls", "--store", store.root)
    assert table.exit_code == 0
    for each in listed:
        assert each["artifact_id"] in table.stdout
        assert human_bytes(each["bytes"]) in table.stdout
        (inspected,) = answer("inspect", each["artifact_id"], "--store", store.root)
        assert inspected["certificate"]["token_count"] == each["tokens"]
        shown = run("inspect", each["artifact_id"], "--store", store.root)
        assert "common/streams.safetensors" in shown.stdout


def test_verify_tells_by_its_status(store: ArtifactStore) -> None:
    assert all(verdict["sound"] for verdict in answer("verify", "--store", store.root))
    broken = store.ls()[0].published
    (broken.path / "common" / "streams.safetensors").unlink()
    assert run("verify", "--store", store.root, "--keep").exit_code == 1
    (verdict,) = answer("verify", broken.artifact_id, "--store", store.root, code=1)
    assert "streams.safetensors" in verdict["faults"][0]
    assert Path(verdict["quarantined"]).is_dir()
    assert answer("stat", "--store", store.root)["quarantined"] == 1
    assert answer("gc", "--store", store.root, "--quarantine")["quarantined"] == 1
    assert len(answer("verify", "--store", store.root)) == 1


def test_pin_unpin_rm_gc_stat(store: ArtifactStore) -> None:
    first, second = (listed.published.artifact_id for listed in store.ls())
    assert answer("pin", first, "--store", store.root) == {"artifact_id": first, "pinned": True}
    assert "pinned" in run("ls", "--store", store.root).stdout
    refused = run("rm", first, "--store", store.root)
    assert isinstance(refused.exception, StoreError)
    assert "pinned" in str(refused.exception)
    assert run("unpin", first, "--store", store.root).exit_code == 0
    removed = answer("rm", first, second, "--store", store.root)
    assert {each["artifact_id"] for each in removed} == {first, second}
    assert answer("stat", "--store", store.root)["artifacts"] == 0
    assert answer("ls", "--store", store.root) == []
    assert run("gc", "--store", store.root).exit_code == 0
    assert run("stat", "--store", store.root).exit_code == 0


@pytest.mark.parametrize("command", ["ls", "verify", "gc", "stat"])
def test_a_wrong_folder_or_namespace_is_told(command: str, tmp_path: Path, store: ArtifactStore) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for folder in ("nowhere", "empty", "file"):
        result = run(command, "--store", tmp_path / folder)
        assert isinstance(result.exception, StoreError)
        assert folder in str(result.exception)
    assert not (tmp_path / "nowhere").exists()
    result = run(command, "--store", store.root, "--namespace", "nobody")
    assert "default" in str(result.exception)


@pytest.mark.parametrize("command", ["inspect", "rm", "pin", "unpin", "verify"])
def test_an_unknown_artifact_is_told(command: str, store: ArtifactStore) -> None:
    for artifact_id in ("0" * 32, "../default", "x"):
        result = run(command, artifact_id, "--store", store.root)
        assert isinstance(result.exception, StoreError)
        assert artifact_id in str(result.exception)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 40, "3.0 TiB"), (5 << 50, "5120.0 TiB")]
)
def test_byte_counts_for_people(count: int, text: str) -> None:
    assert human_bytes(count) == text
