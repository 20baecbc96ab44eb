"""The artifact store: find, open, build. Everything it knows it reads from disk; see docs/artifact-format.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trt_redknot.artifacts.begin import begin_build
from trt_redknot.artifacts.build import ArtifactBuild
from trt_redknot.artifacts.certificate import Certificate, certified_ranks
from trt_redknot.artifacts.checks import VerifiedFiles, nothing_between
from trt_redknot.artifacts.documents import recover_tokens
from trt_redknot.artifacts.faults import ArtifactError, ArtifactFault
from trt_redknot.artifacts.files import Files
from trt_redknot.artifacts.folder import StoreFolder
from trt_redknot.artifacts.hosts import Host
from trt_redknot.artifacts.identity import ArtifactIdentity, TpGeometry, artifact_id_of
from trt_redknot.artifacts.lease import Lease
from trt_redknot.artifacts.leasing import present_generations, take_lease
from trt_redknot.artifacts.maintenance import Maintenance
from trt_redknot.collectives.base import Collectives
from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.config.profile import SplitProfile
from trt_redknot.digests import digest_tokens
from trt_redknot.errors import RequestError, StoreError
from trt_redknot.observability.events import Lookup, Purpose, StoreEvents
from trt_redknot.observability.logs import StoreLog


class ArtifactStore(Maintenance):
    """A folder of artifacts, shared by any number of processes.

    Args:
        root: the store's folder. It is created by the first build.
        capacity_bytes: quota of this namespace, artifacts and running builds together; None: only the disk limits it.
        namespace: the tenant. It is part of every artifact's id, so tenants never see each other's artifacts.
        files: the file system; tests hand in one that fails.
        lock_timeout_s: seconds to wait for another process's short change before StoreError names the holder.
        events: told what happens (see :mod:`trt_redknot.observability`); left out: the log of this package.
        host: the kernel and its mounts; tests hand in another one.

    Raises:
        StoreError: `root` is not a folder, `namespace` is not a name, `capacity_bytes` is not positive.
    """

    def __init__(
        self,
        root: Path | str,
        capacity_bytes: int | None = None,
        namespace: str = "default",
        *,
        files: Files | None = None,
        lock_timeout_s: float = 30.0,
        events: StoreEvents | None = None,
        host: Host | None = None,
    ) -> None:
        if capacity_bytes is not None and capacity_bytes < 1:
            raise StoreError("the store's capacity is not positive", expected="bytes > 0", found=capacity_bytes)
        folder = StoreFolder(
            Path(root),
            namespace,
            files=files or Files(),
            lock_timeout_s=lock_timeout_s,
            events=events or StoreLog(namespace),
            host=host or Host.here(),
        )
        super().__init__(folder, capacity_bytes)
        self._verified = VerifiedFiles()

    @property
    def root(self) -> Path:
        return self._folder.root

    @property
    def namespace(self) -> str:
        return self._folder.namespace

    @property
    def lock_timeout_s(self) -> float:
        """Seconds that another process is waited for where nobody says otherwise."""
        return self._folder.lock_timeout_s

    @property
    def events(self) -> StoreEvents:
        return self._folder.events

    def artifact_id(self, tokens: Sequence[int] | NDArray[np.int64], identity: ArtifactIdentity) -> str:
        """The id that the artifact of these tokens has in this namespace, built or not. RequestError: not token ids."""
        try:
            ids = np.asarray(tokens, dtype=np.int64)
        except (TypeError, ValueError, OverflowError) as error:
            raise RequestError("a document is not a list of token ids", found=error) from error
        return artifact_id_of(self.namespace, digest_tokens(ids), identity)

    def find(self, artifact_id: str, *, identity: ArtifactIdentity, tp: TpGeometry) -> Certificate | None:
        """The newest generation's certificate where it fits this engine and all files have their size, else None."""
        found: Certificate | None = None
        outcome = Lookup.MISS
        try:
            with self._lease(artifact_id) as lease:
                certificate = lease.certificate
                if certificate.identity == identity and certificate.ranks == certified_ranks(tp):
                    lease.check_sizes()
                    found, outcome = certificate, Lookup.HIT
        except ArtifactError as error:
            outcome = _outcome(error)
        self.events.looked_up(artifact_id, outcome, Purpose.BUILD)
        return found

    def open(
        self,
        artifact_id: str,
        *,
        rank: int | None = None,
        generation: int | None = None,
        verify: bool = True,
        timeout_s: float | None = None,
        between: Callable[[], None] = nothing_between,
    ) -> Lease:
        """Lease a generation, by default the newest published one.

        Args:
            rank: whose Local contributions will be read.
            verify: check all files this rank needs now; otherwise each file is checked when it is first read.
            timeout_s: seconds to wait for a process that is removing it; left out: the store's `lock_timeout_s`.
            between: called between files and chunks while verifying; what it raises passes through.

        Raises:
            ArtifactError: there is none, or it is corrupt.
            StoreError: it cannot be locked.
        """
        lease: Lease | None = None
        outcome = Lookup.REFUSED
        try:
            lease = self._lease(artifact_id, rank=rank, generation=generation, timeout_s=timeout_s)
            if verify:
                lease.verify(between)
            outcome = Lookup.HIT
        except BaseException as error:
            if lease is not None:
                lease.close()
            outcome = _outcome(error)
            raise
        finally:
            self.events.looked_up(artifact_id, outcome, Purpose.READ)
        return lease

    def _lease(
        self,
        artifact_id: str,
        *,
        rank: int | None = None,
        generation: int | None = None,
        timeout_s: float | None = None,
    ) -> Lease:
        return take_lease(
            self._folder, self._verified, artifact_id, rank=rank, generation=generation, timeout_s=timeout_s
        )

    def newest(self, artifact_id: str) -> int | None:
        """The newest generation that has a certificate, None where there is none; ArtifactError if it is unreadable."""
        return max(present_generations(self._folder, artifact_id), default=None)

    def read_tokens(self, artifact_id: str, identity: ArtifactIdentity) -> NDArray[np.int64] | None:
        """A document's token ids although its artifact may be corrupt: ids that give this artifact id prove themselves.

        Looks at every generation, the quarantine included, and needs no certificate. None where nothing proves itself.
        """
        return recover_tokens(self._folder, artifact_id, identity)

    def begin(
        self,
        tokens: Sequence[int] | NDArray[np.int64],
        *,
        identity: ArtifactIdentity,
        geometry: ModelGeometry,
        profile: SplitProfile,
        collectives: Collectives,
        rebuild: bool = False,
        wait_s: float = 600.0,
    ) -> ArtifactBuild:
        """Start building a document's artifact. Collective: all ranks call it with the same arguments.

        Args:
            tokens: the document's token ids, at least one.
            rebuild: build the next generation even where a fitting artifact exists.
            wait_s: seconds to wait for another process that builds the same artifact; its result is then found.

        Returns:
            The build; `exists` is set where the artifact is there and nothing is to be done.

        Raises:
            RequestError: no token, or one outside the vocabulary.
            CapacityError: no room for the artifact's exact size.
            StoreError: the store cannot be written, or another process builds the same artifact for too long.
            ConfigError: the output groups cannot be split over the ranks.
            CollectiveError: the ranks were given different documents.
        """

        def find(draft: Certificate) -> Certificate | None:
            return None if rebuild else self.find(draft.artifact_id, identity=identity, tp=draft.tp)

        return begin_build(
            self._folder,
            self.capacity_bytes,
            find,
            tokens=tokens,
            identity=identity,
            geometry=geometry,
            profile=profile,
            collectives=collectives,
            wait_s=wait_s,
        )


def _outcome(error: BaseException) -> Lookup:
    missing = isinstance(error, ArtifactError) and error.fault is ArtifactFault.MISSING
    return Lookup.MISS if missing else Lookup.REFUSED
