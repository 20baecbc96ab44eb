"""Records in the format of LongBench: JSON lines, one question about one long context each."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from trt_redknot.config.documents import parse_json_object, validated_json
from trt_redknot.errors import ConfigError, RedKnotError

_LIMIT = 1 << 30
_MOST_RECORDS = 100_000
_PASSAGE = re.compile(r"^Passage (\d+):", re.MULTILINE)

# Dataset -> whether its context is a list of passages. LongBench-E has the same records under names that end in _e.
PASSAGED = {"2wikimqa": True, "hotpotqa": True, "multifieldqa_en": False, "nano": True}


class RecordError(RedKnotError):
    """A record file is missing, ill-formed, altered, or holds a record of an unknown dataset."""


class Record(BaseModel):
    """One line of a LongBench file.

    Attributes:
        input: the question.
        context: the documents as one text.
        answers: references; the best match counts.
        length: words of the context, as the data set counts them.
        all_classes: labels of classification tasks; question answering has none.
        id: the key `_id`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    input: str = Field(min_length=1)
    context: str = Field(min_length=1)
    answers: tuple[str, ...] = Field(min_length=1)
    length: int = Field(ge=0)
    dataset: str
    language: str
    all_classes: tuple[str, ...] | None
    id: str = Field(alias="_id", min_length=1)

    @property
    def kind(self) -> str:
        """Groups records in reports: the question kind of a nano record, else the data set."""
        return self.id.split("-", 1)[0] if self.dataset == "nano" else self.dataset

    @property
    def documents(self) -> tuple[str, ...]:
        """The context cut at "Passage N:" headers where the data set has them. Joined, they are the context again."""
        if not PASSAGED[self.dataset.removesuffix("_e")]:
            return (self.context,)
        starts = [match.start() for match in _PASSAGE.finditer(self.context)]
        starts = sorted({0, *starts})
        return tuple(self.context[a:b] for a, b in zip(starts, [*starts[1:], len(self.context)], strict=True))


def read_records(path: Path) -> list[Record]:
    """Every record of a file, in order.

    Raises:
        RecordError: unreadable, no records, not JSON lines, a key missing or unknown, an unknown data set, an id twice;
            with the line's number.
    """
    try:
        size = path.stat().st_size
        if size > _LIMIT:
            raise RecordError("the record file is too large", expected=f"at most {_LIMIT} bytes", found=size, path=path)
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise RecordError(
            "the record file cannot be read", found=error.strerror or error, path=path,
            remedy="Name a file of JSON lines in the format of LongBench.",
        ) from error  # fmt: skip
    if len(lines) > _MOST_RECORDS:
        raise RecordError("too many lines", expected=f"at most {_MOST_RECORDS}", found=len(lines), path=path)
    records: list[Record] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        record = _record(line, path, number)
        if record.id in seen:
            raise RecordError(
                f"line {number} repeats an id", expected="an id of its own",
                found=f"{record.id!r} of line {seen[record.id]}", path=path,
            )  # fmt: skip
        seen[record.id] = number
        records.append(record)
    if not records:
        raise RecordError("the record file is empty", expected="at least one record", path=path)
    return records


def _record(line: bytes, path: Path, number: int) -> Record:
    try:
        record = validated_json(Record, parse_json_object(line), path)
    except ValueError as error:
        raise RecordError(f"line {number} is ill-formed", found=error, path=path) from error
    except ConfigError as error:
        raise RecordError(
            f"line {number} is not a LongBench record: {error.problem}", path=path, remedy="Correct the keys named."
        ) from error
    if record.dataset.removesuffix("_e") not in PASSAGED:
        raise RecordError(
            f"line {number} is of an unknown data set", expected=f"one of {', '.join(PASSAGED)}", found=record.dataset,
            path=path,
        )  # fmt: skip
    if record.language != "en":
        raise RecordError(
            f"line {number} is in another language", expected="en", found=record.language, path=path,
            remedy="Scores are defined for English only.",
        )  # fmt: skip
    return record
