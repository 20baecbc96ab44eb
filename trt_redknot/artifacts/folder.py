"""The store's folder: where things lie, what is there, and how a generation leaves it. The disk is the only truth.

<root>/<namespace>/<artifact id>/gen-00000001/    a published generation (docs/artifact-format.md)
<root>/<namespace>/<artifact id>/pinned           present while the artifact is pinned
<root>/.building/<name>/                          an unpublished build; its build.lock is held while it lives
<root>/.trash/<name>/                             removed with one rename, not yet deleted
<root>/.quarantine/<name>/                        a corrupt generation and reason.json
<root>/.quotas/<namespace>.json                   quota of a namespace
<root>/.locks/                                    store.lock (short changes), <namespace>/<id>.lock (one build),
                                                  clock (time of the latest use), kernel.json (see hosts.py)
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trt_redknot.artifacts.certificate import (
    MAX_CERTIFICATE_BYTES,
    NAMESPACE_PATTERN,
    Certificate,
    parse_certificate,
)
from trt_redknot.artifacts.faults import ArtifactError, ArtifactFault, MisplacedError
from trt_redknot.artifacts.files import (
    Descriptor,
    Files,
    ensure_folder,
    read_exactly,
    real_folders,
    tree_bytes,
)
from trt_redknot.artifacts.hosts import Host, HostGuard
from trt_redknot.artifacts.locks import FileLock, acquire, try_lock_path
from trt_redknot.artifacts.names import CERTIFICATE, LEASE_LOCK
from trt_redknot.errors import StoreError
from trt_redknot.observability.events import StoreEvents

ARTIFACT_ID_PATTERN = re.compile(r"[0-9a-f]{32}")
BUILD_LOCK = "build.lock"
RESERVATION = "reservation.json"
GENERATION_FOLDER = "generation"
REASON_FILE = "reason.json"
PIN_FILE = "pinned"
_GENERATION_PATTERN = re.compile(r"gen-(?P<number>\d{8})")
_QUARANTINE_PATTERN = re.compile(r"(.+)\.([0-9a-f]{32})\.gen-(?P<number>\d{8})\.[0-9a-f]{8}")
_MAX_NOTE_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Published:
    """A generation on disk. `last_used` is in seconds since the epoch; `superseded`: readers take another one."""

    artifact_id: str
    generation: int
    path: Path
    bytes: int
    last_used: float
    pinned: bool
    superseded: bool


class StoreFolder:
    """One namespace of a store's root.

    Args:
        events: told what happens here.

    Raises:
        StoreError: the namespace's name is not one, or the root is not a folder.
    """

    def __init__(
        self,
        root: Path,
        namespace: str,
        *,
        files: Files,
        lock_timeout_s: float,
        events: StoreEvents,
        host: Host,
    ) -> None:
        if not isinstance(namespace, str) or not re.fullmatch(NAMESPACE_PATTERN.strip("^$"), namespace):
            raise StoreError(
                "the namespace's name cannot be used",
                expected="1 to 64 of A-Z a-z 0-9 . _ - that start with a letter or digit",
                found=repr(namespace),
            )
        if root.exists() and not root.is_dir():
            raise StoreError("the artifact store is not a folder", path=root, remedy="Name a folder or a new path.")
        self.root = root.absolute()
        self.namespace = namespace
        self.files = files
        self.lock_timeout_s = lock_timeout_s
        self.events = events
        self.hosts = HostGuard(self.root, self.locks / "kernel.json", files=files, host=host)

    @property
    def home(self) -> Path:
        return self.root / self.namespace

    @property
    def locks(self) -> Path:
        return self.root / ".locks"

    @property
    def building(self) -> Path:
        return self.root / ".building"

    @property
    def trash(self) -> Path:
        return self.root / ".trash"

    @property
    def quarantine(self) -> Path:
        return self.root / ".quarantine"

    def artifact(self, artifact_id: str) -> Path:
        return self.home / artifact_id

    def generation(self, artifact_id: str, generation: int) -> Path:
        return self.artifact(artifact_id) / generation_name(generation)

    def mutex(self, wait_s: float | None = None) -> FileLock:
        """Held for short changes of what is visible or reserved.

        Args:
            wait_s: seconds to wait at most; the store's `lock_timeout_s` holds where it is shorter.
        """
        self.hosts.check(claim=True)
        path = self.locks / "store.lock"
        timeout_s = self.lock_timeout_s if wait_s is None else min(wait_s, self.lock_timeout_s)
        return acquire(self.files, path, what="the artifact store", timeout_s=timeout_s)

    def build_lock(self, artifact_id: str, wait_s: float) -> FileLock:
        """Held by the one build of an artifact, for as long as it takes."""
        self.hosts.check(claim=True)
        path = self.locks / self.namespace / f"{artifact_id}.lock"
        return acquire(self.files, path, what=f"the build of artifact {artifact_id}", timeout_s=wait_s)

    def artifact_ids(self) -> Iterator[str]:
        for folder in real_folders(self.home):
            if ARTIFACT_ID_PATTERN.fullmatch(folder.name):
                yield folder.name

    def generations(self, artifact_id: str, *, certified: bool = True) -> list[int]:
        """Generation numbers on disk, ascending; with `certified` only those that have a certificate."""
        if not ARTIFACT_ID_PATTERN.fullmatch(artifact_id):
            return []
        found = []
        for folder in real_folders(self.artifact(artifact_id)):
            match = _GENERATION_PATTERN.fullmatch(folder.name)
            if match and (not certified or os.path.lexists(folder / CERTIFICATE)):
                found.append(int(match[1]))
        return found

    def next_generation(self, artifact_id: str) -> int:
        """The first number above every name that looks like a generation, be it a folder, a file or a link.

        Those in quarantine count: who still means to set one of them aside must not find another of its number.
        """
        names: list[str] = []
        with contextlib.suppress(FileNotFoundError):
            names = os.listdir(self.artifact(artifact_id))
        matches = [_GENERATION_PATTERN.fullmatch(name) for name in names]
        matches += [_QUARANTINE_PATTERN.fullmatch(place.name) for place in self.quarantined(artifact_id)]
        return max((int(match["number"]) for match in matches if match), default=0) + 1

    def refuse_links(self, artifact_id: str) -> None:
        """Raise StoreError where a link would lead a publication out of the root."""
        for path in (self.home, self.artifact(artifact_id)):
            if path.is_symlink():
                raise StoreError("a link lies where an artifact belongs", path=path, remedy="Remove the link.")

    def published(self, artifact_id: str, *, certified: bool = True) -> list[Published]:
        """The generations of an artifact, ascending; without `certified` also those that lost their certificate."""
        numbers = self.generations(artifact_id, certified=certified)
        newest = max(self.generations(artifact_id), default=None)
        pinned = (self.artifact(artifact_id) / PIN_FILE).exists()
        return [
            Published(
                artifact_id=artifact_id,
                generation=number,
                path=self.generation(artifact_id, number),
                bytes=tree_bytes(self.generation(artifact_id, number)),
                last_used=_last_used(self.generation(artifact_id, number)),
                pinned=pinned,
                superseded=number != newest,
            )
            for number in numbers
        ]

    def quarantined(self, artifact_id: str | None = None) -> Iterator[Path]:
        """Folders of this namespace's quarantine, of one artifact or of all; each has a reason and a generation."""
        for place in real_folders(self.quarantine):
            match = _QUARANTINE_PATTERN.fullmatch(place.name)
            if match and match[1] == self.namespace and artifact_id in (None, match[2]):
                yield place

    def all_published(self, *, certified: bool = True) -> list[Published]:
        return [
            each for artifact_id in self.artifact_ids() for each in self.published(artifact_id, certified=certified)
        ]

    def open_generation(self, found: Published) -> Descriptor:
        parts = [self.namespace, found.artifact_id, generation_name(found.generation)]
        with self.open_root() as root:
            return Descriptor(self.files.open_beneath(root.fd, parts, os.O_RDONLY | os.O_DIRECTORY))

    def open_root(self) -> Descriptor:
        return Descriptor(os.open(self.root, os.O_RDONLY | os.O_DIRECTORY))

    def read_certificate(self, folder: int, artifact_id: str, generation: int) -> Certificate:
        """The certificate in an open generation folder; ArtifactError where it is malformed or belongs elsewhere."""
        label = str(self.generation(artifact_id, generation) / CERTIFICATE)
        try:
            with Descriptor(self.files.open_beneath(folder, [CERTIFICATE], os.O_RDONLY | os.O_NONBLOCK)) as target:
                size = min(os.fstat(target.fd).st_size, MAX_CERTIFICATE_BYTES + 1)
                raw = read_exactly(self.files, target.fd, size)
        except FileNotFoundError as error:
            raise ArtifactError(
                ArtifactFault.CERTIFICATE_MISSING, "an artifact has no certificate", path=label
            ) from error
        except (OSError, EOFError) as error:
            raise ArtifactError(
                ArtifactFault.FILE_UNREADABLE, f"a certificate cannot be read: {error}", path=label
            ) from error
        certificate = parse_certificate(raw, label=label)
        _check_place(certificate, (self.namespace, artifact_id, generation), label)
        return certificate

    def try_own(self, path: Path) -> FileLock | None:
        """The exclusive lock of a generation, None where it is leased. OSError where it has no usable lock file."""
        return try_lock_path(path / LEASE_LOCK, exclusive=True)

    def discard(self, path: Path) -> None:
        """Make a folder invisible with one rename, then delete it. What a crash leaves in the trash, gc collects."""
        ensure_folder(self.files, self.trash)
        doomed = self.trash / uuid.uuid4().hex
        self.files.rename(path, doomed)
        self.files.remove_tree(doomed)

    def unique_name(self, artifact_id: str, generation: int) -> str:
        return f"{self.namespace}.{artifact_id}.{generation_name(generation)}.{uuid.uuid4().hex[:8]}"

    def read_note(self, path: Path) -> dict[str, object]:
        """A small JSON object of the store's own (reservation, reason); empty where it is missing or malformed."""
        try:
            with Descriptor(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as target:
                text = os.pread(target.fd, _MAX_NOTE_BYTES, 0)
            note = json.loads(text)
        except (OSError, ValueError, RecursionError):
            return {}
        return note if isinstance(note, dict) else {}


def _check_place(certificate: Certificate, here: tuple[str, str, int], label: str) -> None:
    there = (certificate.namespace, certificate.artifact_id, certificate.generation)
    if here == there:
        return
    expected, found = "/".join(map(str, here)), "/".join(map(str, there))
    if here[:2] != there[:2]:
        raise MisplacedError(certificate, expected=expected, found=found, path=label)
    raise ArtifactError(
        ArtifactFault.CERTIFICATE_GENERATION,
        "a certificate belongs to another generation",
        expected=expected,
        found=found,
        path=label,
    )


def generation_name(generation: int) -> str:
    return f"gen-{generation:08d}"


def _last_used(path: Path) -> float:
    for name in (LEASE_LOCK, CERTIFICATE):
        with contextlib.suppress(OSError):
            return (path / name).stat(follow_symlinks=False).st_mtime
    return 0.0
