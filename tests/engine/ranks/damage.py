"""What may befall one rank's copy of a store, and the reason for which all ranks must then recompute."""

from __future__ import annotations

import dataclasses
import errno
import os
import random
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file

from trt_redknot import Engine
from trt_redknot.admission import FallbackReason
from trt_redknot.artifacts.certificate import parse_certificate
from trt_redknot.artifacts.files import Files
from trt_redknot.digests import digest_file

DEADLINE_S = 1.0
_STREAMS = "common/streams.safetensors"


@dataclass(kw_only=True)
class Scene:
    """One rank on which something is wrong.

    Attributes:
        store: this rank's own copy of the store.
        foreign: stores of other engines with artifacts of the same two documents, and their ids there.
        files: the file system that this rank's store uses.
    """

    store: Path
    ids: list[str]
    rank: int
    engine: Engine
    foreign: dict[str, tuple[Path, list[str]]]
    draw: random.Random
    files: Files

    def file(self, document: int, name: str) -> Path:
        return self.store / "default" / self.ids[document] / "gen-00000001" / name

    @property
    def own_group(self) -> Path:
        """The file with this rank's Local contributions of some document."""
        return self.file(self.draw.randrange(2), f"rank-{self.rank:04d}/group-000.safetensors")


def flip(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def cut(path: Path, draw: random.Random) -> None:
    os.truncate(path, draw.randrange(path.stat().st_size))


def edit_token(scene: Scene) -> None:
    path = scene.file(1, "tokens.safetensors")
    tokens = load_file(path)["tokens"].clone()
    position = scene.draw.randrange(len(tokens))
    tokens[position] = (tokens[position] + 1) % scene.engine.geometry.vocab
    save_file({"tokens": tokens}, path)


def swap_certificates(scene: Scene) -> None:
    one, two = (scene.file(document, "certificate.json") for document in (0, 1))
    kept = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(kept)


def foreign_artifact(name: str) -> Callable[[Scene], None]:
    """The whole artifact of the same document, made by another engine, in the place of ours."""

    def put(scene: Scene) -> None:
        store, ids = scene.foreign[name]
        place = scene.file(0, "")
        shutil.rmtree(place)
        shutil.copytree(store / "default" / ids[0] / "gen-00000001", place)

    return put


def foreign_certificate(name: str) -> Callable[[Scene], None]:
    def put(scene: Scene) -> None:
        store, ids = scene.foreign[name]
        shutil.copyfile(
            store / "default" / ids[1] / "gen-00000001" / "certificate.json", scene.file(1, "certificate.json")
        )

    return put


def other_engine(**identity: str) -> Callable[[Scene], None]:
    """This rank's engine itself says that it is another one."""

    def pretend(scene: Scene) -> None:
        scene.engine.identity = dataclasses.replace(scene.engine.identity, **identity)  # type: ignore[arg-type]

    return pretend


def other_values(scene: Scene) -> None:
    """Sound by its own certificate, but not what the other ranks have."""
    path = scene.file(0, _STREAMS)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    place = scene.file(0, "certificate.json")
    certificate = parse_certificate(place.read_bytes(), label=str(place))
    files = tuple(
        file.model_copy(update={"digest": digest_file(path)}) if file.path == _STREAMS else file
        for file in certificate.files
    )
    place.write_bytes(certificate.model_copy(update={"files": files}).encode())


class SlowFiles(Files):
    """The first read takes longer than the request may."""

    slept = False

    def read_into(self, fd: int, buffer: memoryview, offset: int) -> int:
        if not self.slept:
            self.slept = True
            time.sleep(DEADLINE_S + 0.2)
        return super().read_into(fd, buffer, offset)


class BrokenFiles(Files):
    """Opening a common file fails as the operating system might."""

    def __init__(self, code: int) -> None:
        self.code = code

    def open_beneath(self, folder: int, parts: Iterable[str], flags: int) -> int:
        names = list(parts)
        if names[0] == "common":
            raise OSError(self.code, os.strerror(self.code))
        return super().open_beneath(folder, names, flags)


def with_files(make: Callable[[], Files]) -> Callable[[Scene], None]:
    def change(scene: Scene) -> None:
        scene.files = make()

    return change


def nothing(scene: Scene) -> None:
    assert scene.store.is_dir()


@dataclass(frozen=True, kw_only=True)
class Case:
    """`change` runs on the one rank; `newer`: the other ranks hold a generation that this one has not.

    `lasting`: the damage is on the disk, so that a request over the same store falls back again.
    """

    change: Callable[[Scene], None]
    reason: FallbackReason
    newer: bool = False
    lasting: bool = True


CASES: dict[str, Case] = {
    "rank file deleted": Case(change=lambda s: s.own_group.unlink(), reason=FallbackReason.MISSING_LAYER),
    "rank file truncated": Case(change=lambda s: cut(s.own_group, s.draw), reason=FallbackReason.CORRUPT_FILE),
    "rank file bit flipped": Case(change=lambda s: flip(s.own_group, s.draw), reason=FallbackReason.CORRUPT_FILE),
    "common file bit flipped": Case(
        change=lambda s: flip(s.file(1, "common/group-000.safetensors"), s.draw), reason=FallbackReason.CORRUPT_FILE
    ),
    "artifact deleted": Case(
        change=lambda s: shutil.rmtree(s.file(0, "").parent), reason=FallbackReason.MISSING_ARTIFACT
    ),
    "token edited": Case(change=edit_token, reason=FallbackReason.TOKEN_MISMATCH),
    "certificates swapped": Case(change=swap_certificates, reason=FallbackReason.TOKEN_MISMATCH),
    "artifact of another checkpoint": Case(
        change=foreign_artifact("checkpoint"), reason=FallbackReason.CHECKPOINT_MISMATCH
    ),
    "certificate of another checkpoint": Case(
        change=foreign_certificate("checkpoint"), reason=FallbackReason.CHECKPOINT_MISMATCH
    ),
    "engine of another checkpoint": Case(
        change=other_engine(checkpoint_fingerprint="f" * 64), reason=FallbackReason.CHECKPOINT_MISMATCH, lasting=False
    ),
    "artifact of another profile": Case(change=foreign_artifact("profile"), reason=FallbackReason.PROFILE_MISMATCH),
    "engine of another profile": Case(
        change=other_engine(profile_digest="e" * 64), reason=FallbackReason.PROFILE_MISMATCH, lasting=False
    ),
    "artifact of another TP size": Case(
        change=foreign_artifact("ranks"), reason=FallbackReason.INCOMPATIBLE_TP_GEOMETRY
    ),
    "stale generation": Case(change=nothing, reason=FallbackReason.STALE_GENERATION, newer=True),
    "other values": Case(change=other_values, reason=FallbackReason.RANK_DISAGREEMENT),
    "slow rank": Case(change=with_files(SlowFiles), reason=FallbackReason.TIMEOUT, lasting=False),
    "out of memory": Case(
        change=with_files(lambda: BrokenFiles(errno.ENOMEM)), reason=FallbackReason.CAPACITY, lasting=False
    ),
    "out of descriptors": Case(
        change=with_files(lambda: BrokenFiles(errno.EMFILE)), reason=FallbackReason.CAPACITY, lasting=False
    ),
}
