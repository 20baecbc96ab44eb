"""Frozen record sets: which records are evaluated, pinned by digest, so that two runs are about the same questions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from trt_redknot.config.documents import read_json_object, validated_json
from trt_redknot.digests import digest_file, digest_json
from trt_redknot.errors import ConfigError
from trt_redknot.evaluation.records import Record, RecordError, read_records
from trt_redknot.textfile import replace_text

MANIFEST = "records.json"
SHORT, LONGER = 10, 5


class FrozenFile(BaseModel):
    """One file of a set: `short` records with short answers come first, then `longer` ones."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+\.jsonl$")
    bytes: int = Field(ge=1)
    digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    short: int = Field(ge=0)
    longer: int = Field(ge=0)


class FrozenSet(BaseModel):
    """The manifest of a set."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal[1] = 1
    name: str
    files: tuple[FrozenFile, ...] = Field(min_length=1)

    @property
    def digest(self) -> str:
        """Of the content that the manifest pins."""
        return digest_json([file.model_dump(mode="json") for file in self.files])


class Question(BaseModel):
    """A record of a set, where it came from, and whether its answer is a longer one."""

    model_config = ConfigDict(frozen=True)

    file: str
    record: Record
    longer: bool


def freeze(directory: Path, name: str, files: Sequence[Path], *, short: int = SHORT, longer: int = LONGER) -> FrozenSet:
    """Write the manifest of record files that lie in `directory`; each has `short` + `longer` records.

    Raises:
        RecordError: a file lies elsewhere, is named twice, is ill-formed or has another number of records, two files
            have a record, or the manifest cannot be written.
    """
    pinned: list[FrozenFile] = []
    read: list[tuple[Path, Record]] = []
    for path in files:
        if path.name in {file.name for file in pinned}:
            raise RecordError("a record file is named twice", path=path, remedy="Name it once.")
        if path.parent.resolve() != directory.resolve():
            raise RecordError("the file does not lie beside the manifest", expected=directory, found=path.parent)
        records = read_records(path)
        read += [(path, record) for record in records]
        count = len(records)
        if count != short + longer:
            raise RecordError(
                "the file has another number of records", expected=f"{short} short and {longer} longer ones",
                found=count, path=path,
            )  # fmt: skip
        size, digest = path.stat().st_size, digest_file(path)
        pinned.append(FrozenFile(name=path.name, bytes=size, digest=digest, short=short, longer=longer))
    _refuse_repeated(read)
    frozen = FrozenSet(name=name, files=tuple(pinned))
    path = directory / MANIFEST
    try:
        replace_text(path, json.dumps(frozen.model_dump(mode="json"), indent=1) + "\n")
    except OSError as error:
        raise RecordError(f"the manifest cannot be written: {error.strerror or error}", path=path) from error
    return frozen


def open_frozen(directory: Path, only: Sequence[str] = ()) -> tuple[FrozenSet, list[Question]]:
    """A set's manifest and its questions, every file compared with its digest.

    Args:
        only: names of files; left out: all.

    Raises:
        RecordError: no manifest, ill-formed, a file missing or altered (with both digests), two files have a record.
    """
    path = directory / MANIFEST
    try:
        frozen = validated_json(FrozenSet, read_json_object(path, error=RecordError), path)
    except ConfigError as error:
        raise RecordError(f"the manifest is ill-formed: {error.problem}", path=path) from error
    unknown = set(only) - {file.name for file in frozen.files}
    if unknown:
        raise RecordError(
            "the set has no such file", expected=[file.name for file in frozen.files], found=sorted(unknown), path=path
        )
    questions: list[Question] = []
    for file in frozen.files:
        if not only or file.name in only:
            questions += _questions(directory / file.name, file)
    _refuse_repeated((directory / question.file, question.record) for question in questions)
    return frozen, questions


def _refuse_repeated(records: Iterable[tuple[Path, Record]]) -> None:
    """Raise RecordError for an id in two files: results are told apart by it, and LongBench-E repeats LongBench's."""
    seen: dict[str, Path] = {}
    for path, record in records:
        if record.id in seen:
            raise RecordError(
                "the file repeats a record of another one", expected="an id of its own in the set",
                found=f"{record.id!r} of {seen[record.id].name}", path=path,
                remedy="Leave one of the files out, or freeze a set of its own for each.",
            )  # fmt: skip
        seen[record.id] = path


def _questions(path: Path, file: FrozenFile) -> list[Question]:
    try:
        size, digest = path.stat().st_size, digest_file(path)
    except OSError as error:
        raise RecordError("a record file is missing", found=error.strerror or error, path=path) from error
    if (size, digest) != (file.bytes, file.digest):
        raise RecordError(
            "the record file was altered", expected=f"{file.bytes} bytes, digest {file.digest}",
            found=f"{size} bytes, digest {digest}", path=path,
            remedy="Restore the file, or freeze a new set: figures of both are not comparable.",
        )  # fmt: skip
    records = read_records(path)
    if len(records) != file.short + file.longer:
        raise RecordError(
            "the record file has another number of records", expected=file.short + file.longer, found=len(records),
            path=path,
        )  # fmt: skip
    return [Question(file=file.name, record=record, longer=index >= file.short) for index, record in enumerate(records)]
