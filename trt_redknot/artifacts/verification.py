"""Everything that is wrong with one generation on disk: every file is read, nothing is taken from memory."""

from __future__ import annotations

import os
from collections.abc import Iterator

from trt_redknot.artifacts.certificate import Certificate
from trt_redknot.artifacts.checks import VerifiedFiles, check_digest, open_certified
from trt_redknot.artifacts.faults import ArtifactError, ArtifactFault
from trt_redknot.artifacts.files import walk_files
from trt_redknot.artifacts.folder import Published, StoreFolder
from trt_redknot.artifacts.names import CERTIFICATE, LEASE_LOCK


def faults_of(store: StoreFolder, found: Published) -> Iterator[str]:
    """One line per fault: missing, extra, of wrong size or content, malformed certificate. OSError passes."""
    try:
        with store.open_generation(found) as folder:
            certificate = store.read_certificate(folder.fd, found.artifact_id, found.generation)
            yield from _file_faults(store, found, folder.fd, certificate)
    except ArtifactError as error:
        yield f"{error.fault}: {error}"


def _file_faults(store: StoreFolder, found: Published, folder: int, certificate: Certificate) -> Iterator[str]:
    known = {file.path for file in certificate.files} | {CERTIFICATE, LEASE_LOCK}
    if not os.path.lexists(found.path / LEASE_LOCK):
        yield f"{ArtifactFault.FILE_MISSING}: the lease lock is missing, in {found.path / LEASE_LOCK}"
    for path, _, _ in walk_files(found.path):
        if path not in known:
            yield f"{ArtifactFault.FILE_EXTRA}: not in the certificate, in {found.path / path}"
    for file in certificate.files:
        label = str(found.path / file.path)
        try:
            with open_certified(store.files, folder, file, label=label) as target:
                check_digest(store.files, target.fd, file, label=label, verified=VerifiedFiles())
        except ArtifactError as error:
            yield f"{error.fault}: {error}"
