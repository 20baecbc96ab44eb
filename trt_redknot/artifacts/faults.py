"""The closed list of what can be wrong with an artifact on disk (docs/artifact-format.md)."""

from __future__ import annotations

import shlex
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from trt_redknot.errors import StoreError

if TYPE_CHECKING:
    from trt_redknot.artifacts.certificate import Certificate


class ArtifactFault(StrEnum):
    """Why an artifact, or one of its files, is refused."""

    MISSING = "missing"
    CERTIFICATE_MISSING = "certificate_missing"
    CERTIFICATE_TOO_LARGE = "certificate_too_large"
    CERTIFICATE_NOT_JSON = "certificate_not_json"
    CERTIFICATE_VERSION = "certificate_version"
    CERTIFICATE_FIELDS = "certificate_fields"
    CERTIFICATE_PATH = "certificate_path"
    CERTIFICATE_NOT_CANONICAL = "certificate_not_canonical"
    CERTIFICATE_DIGEST = "certificate_digest"
    CERTIFICATE_GENERATION = "certificate_generation"
    CERTIFICATE_MISPLACED = "certificate_misplaced"
    FILE_MISSING = "file_missing"
    FILE_EXTRA = "file_extra"
    FILE_NOT_REGULAR = "file_not_regular"
    FILE_SIZE = "file_size"
    FILE_DIGEST = "file_digest"
    FILE_HEADER = "file_header"
    FILE_UNREADABLE = "file_unreadable"
    TOKENS = "tokens"


class ArtifactError(StoreError):
    """An artifact cannot be served. `fault` says why, `path` which file, relative to the store's root."""

    def __init__(
        self,
        fault: ArtifactFault,
        problem: str,
        *,
        expected: object | None = None,
        found: object | None = None,
        path: Path | str | None = None,
        remedy: str | None = None,
    ) -> None:
        super().__init__(problem, expected=expected, found=found, path=path, remedy=remedy)
        self.fault = fault

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (self.fault, self.problem, self.expected, self.found, self.path, self.remedy))


class MisplacedError(ArtifactError):
    """A sound certificate lies where another artifact's belongs. `certificate` says what it really certifies."""

    def __init__(self, certificate: Certificate, *, expected: object, found: object, path: Path | str) -> None:
        super().__init__(
            ArtifactFault.CERTIFICATE_MISPLACED,
            "a certificate belongs to another artifact",
            expected=expected,
            found=found,
            path=path,
        )
        self.certificate = certificate


def build_command(root: Path, namespace: str, engine: Path | str = "ENGINE") -> str:
    """What to type to put a document into a store."""
    options = ["--engine", str(engine), "--store", str(root), "--namespace", namespace]
    return shlex.join(["python", "-m", "trt_redknot", "artifacts", "build", *options, "DOCUMENT"])


def _rebuild(
    fault: ArtifactFault, problem: str, expected: object, found: object, path: Path | str | None, remedy: str | None
) -> ArtifactError:
    return ArtifactError(fault, problem, expected=expected, found=found, path=path, remedy=remedy)
