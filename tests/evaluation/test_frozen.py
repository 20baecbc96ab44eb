"""Frozen sets: what is pinned stays pinned."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.evaluation.samples import record, write
from trt_redknot.cli.evaluate import evaluate_command
from trt_redknot.config.parse import load_geometry
from trt_redknot.digests import digest_file
from trt_redknot.evaluation.frozen import MANIFEST, freeze, open_frozen
from trt_redknot.evaluation.records import RecordError

SHIPPED = Path(__file__).resolve().parents[2] / "examples" / "nano" / "records"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = write(tmp_path / "one.jsonl", *(record(_id=f"r{index}") for index in range(3)))
    freeze(tmp_path, "mine", [path], short=2, longer=1)
    return tmp_path


def test_a_set_opens_as_it_was_frozen(folder: Path) -> None:
    frozen, questions = open_frozen(folder)
    assert frozen.name == "mine"
    assert [(q.record.id, q.longer, q.file) for q in questions] == [
        ("r0", False, "one.jsonl"), ("r1", False, "one.jsonl"), ("r2", True, "one.jsonl"),
    ]  # fmt: skip
    assert open_frozen(folder)[0].digest == frozen.digest


def test_an_altered_file_is_refused_with_both_digests(folder: Path) -> None:
    path = folder / "one.jsonl"
    before = digest_file(path)
    path.write_text(path.read_text().replace("Olin", "Otto"))
    with pytest.raises(RecordError) as caught:
        open_frozen(folder)
    for word in ("was altered", before, digest_file(path), str(path)):
        assert word in str(caught.value)


def test_a_longer_file_is_refused_with_both_digests(folder: Path) -> None:
    path = folder / "one.jsonl"
    before = digest_file(path)
    path.write_text(path.read_text() + "\n")
    with pytest.raises(RecordError, match=f"{before}.*{digest_file(path)}"):
        open_frozen(folder)


def test_a_manifest_is_written_whole_or_refused(folder: Path) -> None:
    path = folder / "one.jsonl"
    with pytest.raises(RecordError, match="named twice"):
        freeze(folder, "again", [path, folder / "." / "one.jsonl"], short=2, longer=1)
    assert open_frozen(folder)[0].name == "mine"
    (folder / MANIFEST).unlink()
    (folder / MANIFEST).mkdir()
    with pytest.raises(RecordError, match="the manifest cannot be written"):
        freeze(folder, "again", [path], short=2, longer=1)


def test_missing_files_and_manifests_are_refused(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(RecordError, match="cannot be read"):
        open_frozen(tmp_path_factory.mktemp("empty"))
    (folder / "one.jsonl").unlink()
    with pytest.raises(RecordError, match="a record file is missing"):
        open_frozen(folder)


def test_an_ill_formed_manifest_is_refused(folder: Path) -> None:
    path = folder / MANIFEST
    content = json.loads(path.read_text())
    for change in (
        {"more": 1},
        {"format": 2},
        {"files": []},
        {"files": [content["files"][0] | {"name": "../x.jsonl"}]},
    ):
        path.write_text(json.dumps(content | change))
        with pytest.raises(RecordError, match="the manifest is ill-formed"):
            open_frozen(folder)


def test_a_file_must_be_known_and_have_the_right_number(folder: Path) -> None:
    with pytest.raises(RecordError, match=r"no such file.*two.jsonl"):
        open_frozen(folder, ["two.jsonl"])
    with pytest.raises(RecordError, match="another number of records"):
        freeze(folder, "mine", [folder / "one.jsonl"], short=10, longer=5)
    with pytest.raises(RecordError, match="does not lie beside"):
        freeze(folder / "elsewhere", "mine", [folder / "one.jsonl"], short=2, longer=1)


def test_a_record_in_two_files_is_refused(folder: Path) -> None:
    """Results are told apart by the record's id: the second one would pass for done when a run goes on."""
    second = write(folder / "two.jsonl", *(record(_id=name, dataset="2wikimqa_e") for name in ("x", "r1", "y")))
    with pytest.raises(RecordError, match=r"repeats a record.*'r1' of one\.jsonl.*two\.jsonl"):
        freeze(folder, "both", [folder / "one.jsonl", second], short=2, longer=1)
    assert open_frozen(folder)[0].name == "mine"
    pinned = json.loads((folder / MANIFEST).read_text())
    file = {"name": second.name, "bytes": second.stat().st_size, "digest": digest_file(second)}
    pinned["files"].append(pinned["files"][0] | file)
    (folder / MANIFEST).write_text(json.dumps(pinned))
    with pytest.raises(RecordError, match="repeats a record"):
        open_frozen(folder)
    for name in ("one.jsonl", "two.jsonl"):
        assert len(open_frozen(folder, [name])[1]) == 3


def test_the_shipped_set_is_whole() -> None:
    frozen, questions = open_frozen(SHIPPED)
    assert [(file.short, file.longer) for file in frozen.files] == [(10, 5)] * len(frozen.files)
    assert len({question.record.id for question in questions}) == 15 * len(frozen.files)
    for question in questions:
        answer = question.record.answers[0]
        assert question.longer == question.record.input.startswith("Report ")
        assert answer in question.record.context or question.longer
        assert len(question.record.documents) >= 2


def test_the_command_freezes_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(folder / "two.jsonl", record(_id="x"), record(_id="y"))
    evaluate_command(None).main(
        ["freeze", "--name", "both", "--short", "1", "--longer", "1", str(path)], standalone_mode=False
    )
    frozen, questions = open_frozen(folder)
    assert (frozen.name, [q.longer for q in questions]) == ("both", [False, True])
    assert frozen.digest in capsys.readouterr().err.replace("\n", "")


def test_the_shipped_files_are_what_the_generator_writes(tmp_path: Path) -> None:
    script = SHIPPED.parent / "make_data.py"
    spec = importlib.util.spec_from_file_location("make_data", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(["--output", str(tmp_path)], standalone_mode=False)
    written = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    assert Path("records/records.json") in written
    for path in written:
        if path.name != "config.json":
            # The configuration names the release of transformers that wrote it.
            assert (tmp_path / path).read_bytes() == (SHIPPED.parent / path).read_bytes(), path
    assert load_geometry(tmp_path).digest == load_geometry(SHIPPED.parent).digest
