"""A coverage-guided fuzzer of the two parsers that read what may come from an enemy: certificates and tensor files.

Inputs are changed as bytes, as numbers and as JSON (then signed or padded again, so that the change gets past the
digest and the length). What reaches a new line, a new step from line to line or a new kind of refusal joins the corpus.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from tests.artifacts.test_certificate import signed
from trt_redknot.artifacts import certificate, tensorfile
from trt_redknot.artifacts.certificate import Certificate, parse_certificate
from trt_redknot.artifacts.faults import ArtifactError, ArtifactFault
from trt_redknot.artifacts.files import Files
from trt_redknot.artifacts.formats import ArtifactFormat
from trt_redknot.artifacts.identity import ArtifactIdentity, artifact_id_of
from trt_redknot.artifacts.tensorfile import TensorFile
from trt_redknot.digests import digest_bytes

CORPUS = Path(__file__).parents[1] / "data" / "fuzz"
# One input must never cost more; the slowest honest one takes milliseconds.
SLOWEST_S = 5.0
_LARGEST = 4096
_POWERS = (20, 31, 47, 48, 62, 63)
_NUMBERS = (0, 1, -1, 7, 8, 255, (1 << 20) + 8, (1 << 31) - 1, (1 << 64) - 1, *(1 << power for power in _POWERS))
_ODD = (None, True, False, "", "x", "..", "/", "a/../b", "\u0000", [], {}, [[]], 0.5, 1e308, -0.0, "9" * 400, 10**400)

Key = object


@dataclass(kw_only=True)
class FuzzTally:
    """What a run did. `problems` are inputs (as hex) that did anything but parse or be refused with a fault."""

    runs: int = 0
    accepted: int = 0
    keys: int = 0
    corpus: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Target:
    """A parser, what must hold of its outcome, and how its inputs are taken apart.

    Attributes:
        parse: returns the fault's name and text, or None where the input was accepted; raises AssertionError for what
            must not be.
        split: the JSON value in an input and the bytes after it, None where there is none.
        join: the input that holds a JSON value; with `sound` its digest or length is made right.
    """

    name: str
    parse: Callable[[bytes], tuple[str, str] | None]
    split: Callable[[bytes], tuple[Any, bytes] | None]
    join: Callable[[Any, bytes, bool], bytes]
    traced: str


def parse_as_certificate(raw: bytes) -> tuple[str, str] | None:
    try:
        parsed = parse_certificate(raw, label="fuzz")
    except ArtifactError as error:
        if not error.fault.startswith("certificate_"):
            raise AssertionError(f"not a fault of certificates: {error.fault}") from error
        return error.fault.value, error.problem
    assert parsed.encode() == raw, "accepted, and is not what we would write"
    for file in parsed.files:
        assert not file.path.startswith("/"), file.path
        assert ".." not in file.path.split("/"), file.path
    assert parsed.data_bytes >= 0
    return None


def parse_as_tile(raw: bytes) -> tuple[str, str] | None:
    fd = os.memfd_create("fuzz")
    try:
        os.write(fd, raw)
        try:
            file = TensorFile(fd, len(raw), label="fuzz", files=Files())
        except ArtifactError as error:
            if error.fault is not ArtifactFault.FILE_HEADER:
                raise AssertionError(f"not a fault of headers: {error.fault}") from error
            return error.fault.value, error.problem
        header = 8 + int.from_bytes(raw[:8], "little")
        read = b"".join(_bytes_of(file, name) for name in file.names())
        assert read == raw[header:], "accepted, and its tensors are not its bytes"
    finally:
        os.close(fd)
    return None


def _bytes_of(file: TensorFile, name: str) -> bytes:
    import torch

    return bytes(file.tensor(name).contiguous().reshape(-1).view(torch.uint8).numpy())


def _split_certificate(raw: bytes) -> tuple[Any, bytes] | None:
    return _json_of(raw, b"")


def _join_certificate(value: Any, rest: bytes, sound: bool) -> bytes:
    if not sound or not isinstance(value, dict):
        return json.dumps(value).encode()
    names = ("checkpoint_fingerprint", "profile_digest", "geometry_digest", "rope_digest")
    if all(isinstance(value.get(name), str) for name in (*names, "namespace", "token_digest")):
        fields = {name: value[name] for name in names}
        with contextlib.suppress(ValueError, TypeError):
            who = ArtifactIdentity(**fields, format=ArtifactFormat(value.get("artifact_format")))
            value = {**value, "artifact_id": artifact_id_of(value["namespace"], value["token_digest"], who)}
    return signed(value)


def _split_tile(raw: bytes) -> tuple[Any, bytes] | None:
    stop = 8 + int.from_bytes(raw[:8], "little")
    return _json_of(raw[8:stop], raw[stop:])


def _join_tile(value: Any, rest: bytes, sound: bool) -> bytes:
    text = json.dumps(value, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if sound:
        ends = [stop for stop in _ends(value) if 0 <= stop <= _LARGEST]
        rest = (rest + bytes(_LARGEST))[: max(ends, default=0)]
    return len(text).to_bytes(8, "little") + text + rest


def _ends(value: Any) -> Iterable[int]:
    entries = value.values() if isinstance(value, dict) else ()
    for entry in entries:
        offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
        if isinstance(offsets, list):
            yield from (each for each in offsets if type(each) is int)


def _json_of(text: bytes, rest: bytes) -> tuple[Any, bytes] | None:
    try:
        return json.loads(text), rest
    except (ValueError, RecursionError):
        return None


CERTIFICATE = Target(
    name="certificate", parse=parse_as_certificate, split=_split_certificate, join=_join_certificate,
    traced=certificate.__file__,
)  # fmt: skip
TILE = Target(name="tile", parse=parse_as_tile, split=_split_tile, join=_join_tile, traced=tensorfile.__file__)


def corpus_of(target: Target, folder: Path = CORPUS) -> list[bytes]:
    return [path.read_bytes() for path in sorted((folder / target.name).iterdir())]


def fuzz(target: Target, *, seconds: float, seed: int, corpus: Iterable[bytes], keep: Path | None = None) -> FuzzTally:
    """Run for a while.

    Args:
        corpus: inputs to start from; all of them are run first.
        keep: where inputs that reach something new are written.
    """
    draw, tally = random.Random(seed), FuzzTally()
    known: set[Key] = set()
    pool: list[bytes] = []
    end = time.monotonic() + seconds
    waiting = list(corpus)
    while waiting or time.monotonic() < end:
        raw = waiting.pop() if waiting else _changed(target, draw, pool)
        keys = _run(target, raw, tally)
        if not pool or (not keys <= known and len(raw) <= _LARGEST):
            known |= keys
            pool.append(raw)
            if keep is not None:
                keep.mkdir(parents=True, exist_ok=True)
                (keep / name_of(raw)).write_bytes(raw)
    tally.keys, tally.corpus = len(known), len(pool)
    return tally


def name_of(raw: bytes) -> str:
    return digest_bytes(raw)[:12]


def smallest(target: Target, inputs: Iterable[bytes]) -> list[bytes]:
    """A small part of `inputs` that reaches all that they reach: short ones first, none that adds nothing."""
    known: set[Key] = set()
    kept = []
    for raw in sorted(inputs, key=lambda raw: (len(raw), raw)):
        keys = _run(target, raw, FuzzTally())
        if not keys <= known:
            known |= keys
            kept.append(raw)
    return kept


def _run(target: Target, raw: bytes, tally: FuzzTally) -> set[Key]:
    keys: set[Key] = set()
    started = time.process_time()
    try:
        with _Trace(target.traced, keys):
            refusal = target.parse(raw)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what the fuzzer looks for
        tally.problems.append(f"{type(error).__name__}: {error}: {raw[:2000].hex()}")
        return set()
    finally:
        tally.runs += 1
    if time.process_time() - started > SLOWEST_S:
        tally.problems.append(f"slow: {raw[:2000].hex()}")
    if refusal is None:
        tally.accepted += 1
    else:
        tally.refused[refusal[0]] += 1
        # The kind of refusal and the key it is about, unless that is one that was made up.
        about = re.split(r"[.\d']|: (?=[A-Z])", refusal[1])[0]
        field = about.rpartition(": ")[2]
        keys.add((refusal[0], about if field == about or field in Certificate.model_fields else "a key"))
    return keys


class _Trace:
    """Collects steps between lines of one source file."""

    def __init__(self, path: str, keys: set[Key]) -> None:
        self._path = path
        self._keys = keys

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self._enter_frame)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _enter_frame(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        if frame.f_code.co_filename != self._path:
            return None
        last = [frame.f_lineno]

        def step(frame: FrameType, event: str, argument: object) -> Any:
            self._keys.add((last[0], frame.f_lineno, event == "exception"))
            last[0] = frame.f_lineno
            return step

        return step


def _changed(target: Target, draw: random.Random, pool: list[bytes]) -> bytes:
    raw = draw.choice(pool)
    if draw.random() < 0.5 and (parts := target.split(raw)) is not None:
        value, rest = parts
        for _ in range(draw.randint(1, 3)):
            value = _changed_json(draw, value)
        return target.join(value, rest, draw.random() < 0.8)
    data = bytearray(raw)
    for _ in range(draw.randint(1, 4)):
        draw.choice(_BYTE_CHANGES)(draw, data, pool)
    return bytes(data[: 4 * _LARGEST])


def _changed_json(draw: random.Random, value: Any) -> Any:
    value = copy.deepcopy(value)
    holder, key = _somewhere(draw, value)
    if holder is None:
        return draw.choice(_ODD)
    kind = draw.randrange(6)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[draw.choice(["", "x", "digest", "__metadata__", str(key) + "x"])] = copy.deepcopy(holder[key])
    elif kind == 1:
        holder.insert(key, copy.deepcopy(holder[key]))
    elif kind == 2:
        holder[key] = draw.choice(_NUMBERS)
    elif kind == 3:
        holder[key] = draw.choice(_ODD)
    elif kind == 4 and type(holder[key]) is int:
        holder[key] += draw.choice((-8, -4, -1, 1, 4, 8))
    else:
        holder[key] = [holder[key]] * draw.randint(0, 3)
    return value


def _somewhere(draw: random.Random, value: Any) -> tuple[Any, Any]:
    """A container inside `value` and one of its keys, at a random depth."""
    holder: Any = None
    key: Any = None
    while isinstance(value, dict | list) and value:
        holder = value
        key = draw.choice(list(value)) if isinstance(value, dict) else draw.randrange(len(value))
        value = value[key]
        if draw.random() < 0.3:
            break
    return holder, key


def _flip(draw: random.Random, data: bytearray, pool: list[bytes]) -> None:
    if data:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def _cut(draw: random.Random, data: bytearray, pool: list[bytes]) -> None:
    start = draw.randrange(len(data) + 1)
    del data[start : start + draw.choice((1, 8, 64, len(data)))]


def _repeat(draw: random.Random, data: bytearray, pool: list[bytes]) -> None:
    start = draw.randrange(len(data) + 1)
    data[start:start] = data[start : start + draw.choice((1, 8, 64))] * draw.randint(1, 9)


def _splice(draw: random.Random, data: bytearray, pool: list[bytes]) -> None:
    other = draw.choice(pool)
    data[draw.randrange(len(data) + 1) :] = other[draw.randrange(len(other) + 1) :]


def _length(draw: random.Random, data: bytearray, pool: list[bytes]) -> None:
    number = draw.choice((*_NUMBERS, len(data), len(data) - 8)) % (1 << 64)
    at = 0 if draw.random() < 0.7 else draw.randrange(len(data) + 1)
    data[at : at + 8] = number.to_bytes(8, "little")


def _digits(draw: random.Random, data: bytearray, pool: list[bytes]) -> None:
    found = list(re.finditer(rb"-?\d+", bytes(data)))
    if found:
        match = draw.choice(found)
        text = draw.choice((*map(str, _NUMBERS), "1e999", "9" * 5000, "00", "NaN"))
        data[match.start() : match.end()] = text.encode()


_BYTE_CHANGES = (_flip, _cut, _repeat, _splice, _length, _digits)
