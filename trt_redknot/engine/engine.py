"""The engine: opened from a directory, builds artifacts, answers requests. The package's public face."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, overload

import numpy as np
import torch

from trt_redknot.admission.admit import Admission, admit
from trt_redknot.admission.recompute import document_tokens
from trt_redknot.artifacts.contents import Part, artifact_parts
from trt_redknot.artifacts.store import ArtifactStore
from trt_redknot.collectives import Collectives, from_communicator
from trt_redknot.collectives.agreement import agree
from trt_redknot.collectives.device import connect
from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.engine.chunking import agreed_chunk_rows
from trt_redknot.engine.context import RankContext
from trt_redknot.engine.generate import Admitted, Generation
from trt_redknot.engine.loading import LoadedRank, default_device, find_device, load_rank, ops_for, stages_for
from trt_redknot.engine.manifest import EngineManifest
from trt_redknot.engine.pool import CachePool, PoolRows
from trt_redknot.engine.producer import Produced, Producer
from trt_redknot.engine.response import Response
from trt_redknot.engine.ropes import RopeTables
from trt_redknot.engine.steps import Steps, drain
from trt_redknot.engine.tensorrt.backend import PlanBackend
from trt_redknot.engine.tensorrt.starting import start_plans
from trt_redknot.engine.tiles import TileOptions, Tiles
from trt_redknot.engine.walk import LayerWalk
from trt_redknot.errors import EngineError, RedKnotError, RequestError, TooLongError
from trt_redknot.model.layers import Weights
from trt_redknot.ops.reference.backend import ReferenceOps
from trt_redknot.partition import even_split
from trt_redknot.request.layout import check_length, check_request, check_token_ids, lay_out
from trt_redknot.request.request import Artifact, Request

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


class Engine:
    """One rank of an opened engine. Every method is collective: all ranks call it with the same arguments.

    Open one with :meth:`Engine.open`.
    """

    def __init__(
        self,
        manifest: EngineManifest,
        geometry: ModelGeometry,
        layers: list[Weights],
        shared: Weights,
        collectives: Collectives,
        device: torch.device,
        tiles: TileOptions | None = None,
        plans: PlanBackend | None = None,
        watch: Callable[[ReferenceOps], ReferenceOps] | None = None,
        chunk_rows: int | None = None,
    ) -> None:
        self.manifest = manifest
        self.geometry = geometry
        self.collectives = collectives
        self.identity = manifest.artifact_identity(geometry)
        ops = ops_for(device, manifest, geometry, collectives)
        if watch is not None:
            ops = watch(ops)
        self._pool_limit = None if plans is None else plans.limits.pool_rows
        self._ropes = RopeTables(geometry, manifest.torch_dtype, device)
        experts = even_split(geometry.experts, collectives.size)[collectives.rank]
        stages = stages_for(geometry, layers, shared, self._ropes, ops, plans)
        self._context = RankContext(
            geometry=geometry,
            profile=manifest.profile,
            stages=stages,
            walk=LayerWalk(geometry, stages, ops, first_expert=experts.start),
            ops=ops,
            collectives=collectives,
            local_width=geometry.projected // collectives.size,
            chunk_rows=chunk_rows or manifest.chunk_rows,
            dtype=manifest.torch_dtype,
            device=device,
            tiles=Tiles(manifest.torch_dtype, device, tiles or TileOptions.default(device)),
            packed_cache=plans is not None and plans.specs[0].format.packed_cache,
        )

    @property
    def tiles(self) -> Tiles:
        """What this rank keeps of artifacts between requests, and how a request reads them."""
        return self._context.tiles

    @tiles.setter
    def tiles(self, tiles: Tiles) -> None:
        self._context = dataclasses.replace(self._context, tiles=tiles)

    @classmethod
    def open(
        cls,
        engine_dir: Path | str,
        comm: Intracomm | None = None,
        *,
        verify: bool = True,
        device: str | None = None,
        tiles: TileOptions | None = None,
        watch: Callable[[ReferenceOps], ReferenceOps] | None = None,
        chunk_rows: int | None = None,
    ) -> Engine:
        """Load this rank's part of an engine directory.

        Args:
            comm: an mpi4py communicator with as many ranks as the engine was built for; None: one rank.
            verify: compare the content of this rank's files with the manifest (sizes are always compared).
            device: where this rank computes, as torch names it; "cuda" is the GPU of the rank's number on its host. Our
                kernels serve bfloat16 engines on a GPU; anything else runs the torch references there. Ranks with a GPU
                each exchange rows over NCCL. Left out: "cuda" for engines of the tensorrt backend, else "cpu".
            tiles: how artifacts reach the device; left out: read ahead to a GPU, read in place on the host.
            watch: gets this rank's ops and returns what runs in their place, to see what passes through them.
            chunk_rows: rows that go through a stage together, at most. Left out: what the engine was built with; with
                our kernels on a GPU more, where every rank has the memory. Plans take what they were built for.

        Raises:
            EngineError: no engine, altered, of another backend, built for another number of ranks, or not the same
                one on every rank; on all ranks.
        """
        collectives = from_communicator(comm)
        loaded: LoadedRank | None = None
        failure: RedKnotError | None = None
        try:
            place = find_device(device or default_device(Path(engine_dir)), comm)
            loaded = load_rank(Path(engine_dir), collectives.rank, collectives.size, place, verify=verify)
        except RedKnotError as error:
            failure = error
        digests = agree(collectives, None if loaded is None else loaded.manifest.digest, failure)
        assert loaded is not None
        if len(set(digests)) > 1:
            differing = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
            raise EngineError(
                "the ranks opened different engines", expected=f"manifest {digests[0]} as on rank 0",
                found=f"{digests[differing]} on rank {differing}",
                remedy="Give every rank the same engine directory, or a copy of it.",
            )  # fmt: skip
        data_plane = connect(collectives, loaded.device)
        plans = None if loaded.plans is None else start_plans(loaded.plans, data_plane, loaded.device)
        rows = agreed_chunk_rows(loaded, collectives, chunk_rows)
        return cls(
            loaded.manifest, loaded.geometry, loaded.layers, loaded.shared, data_plane, loaded.device, tiles, plans,
            watch, rows,
        )  # fmt: skip

    @torch.inference_mode()
    def build_artifact(self, store: ArtifactStore, token_ids: Sequence[int], *, rebuild: bool = False) -> str:
        """Compute a document once and keep what its layers produced. Returns its id; what is there already is found.

        Args:
            token_ids: the document, at least one token, without the question.
            rebuild: make the next generation even where the artifact exists.

        Raises:
            RequestError: empty, a token outside the vocabulary, or longer than the engine's limit.
            StoreError: the store cannot be written or has no room; nothing is visible then.
        """
        self._check_document_length(len(token_ids), "the document")
        pool = self._pool([Producer.size(self.geometry, len(token_ids))])
        return drain(self.build_steps(store, token_ids, pool, rebuild=rebuild)).artifact_id

    def build_steps(
        self, store: ArtifactStore, token_ids: Sequence[int], pool: CachePool, *, rebuild: bool = False,
        wait_s: float = 600.0,
    ) -> Steps[Produced]:  # fmt: skip
        """`build_artifact` in steps, over a pool that has room for the document. Closing the generator drops the build.

        Args:
            wait_s: seconds to wait for another process that builds the same artifact.
        """
        self._check_document_length(len(token_ids), "the document")
        with store.begin(
            token_ids, identity=self.identity, geometry=self.geometry, profile=self.manifest.profile,
            collectives=self.collectives, rebuild=rebuild, wait_s=wait_s,
        ) as build:  # fmt: skip
            if not build.exists:
                self._ropes.grow(len(token_ids))
                producer = Producer(self._context, build, np.asarray(token_ids, dtype=np.int64), pool)
                try:
                    yield from producer.run()
                    self._context.stages.check()
                except EngineError as error:
                    # All ranks learn of it when they publish, and nothing becomes visible.
                    build.fail(error)
                finally:
                    producer.close()
            return Produced(artifact_id=build.publish(), built=not build.exists)

    def warm(self, store: ArtifactStore, artifact_id: str) -> int:
        """Bring an artifact into this rank's nearest tier. Local: no rank waits for another.

        Returns:
            Bytes of it that are in memory now; what does not fit stays in the store.

        Raises:
            StoreError: no such artifact, or it is not what its certificate says.
            ConfigError: the engine was opened without tiers.
        """
        with store.open(artifact_id, rank=self.collectives.rank) as lease:
            parts = artifact_parts(
                self.geometry, self.manifest.profile, lease.certificate.token_count, self.collectives.size
            )
            return self.tiles.warm(lease, [spec for spec in parts if spec.part is not Part.SALIENCE])

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self._context.device

    def check_document(self, token_ids: Sequence[int], what: str = "the document") -> None:
        """Raise RequestError where `build_artifact` would refuse `token_ids`. Local: no rank waits for another.

        Args:
            what: how the error names the document.
        """
        if len(check_token_ids(token_ids, self.geometry.vocab, what)) == 0:
            raise RequestError(f"{what} is empty", expected="at least one token")
        self._check_document_length(len(token_ids), what)

    def _check_document_length(self, length: int, what: str) -> None:
        limit = self.manifest.max_length
        if length > limit:
            raise TooLongError(
                f"{what} is too long", expected=f"at most {limit} tokens", found=length,
                remedy="Split it, or build the engine with a larger --max-length.",
            )  # fmt: skip

    @overload
    def generate(self, request: Request, *, store: ArtifactStore | None = None) -> Response: ...

    @overload
    def generate(self, request: Sequence[Request], *, store: ArtifactStore | None = None) -> list[Response]: ...

    @torch.inference_mode()
    def generate(
        self, request: Request | Sequence[Request], *, store: ArtifactStore | None = None
    ) -> Response | list[Response]:
        """Answer one request, or a batch of them whose tokens are decoded together.

        Args:
            store: where the requests' artifacts are; may be None for requests without any.

        Raises:
            RequestError: empty, too long, a token outside the vocabulary, an artifact that nobody has the tokens of.
        """
        requests = [request] if isinstance(request, Request) else list(request)
        batch: list[Admitted] = []
        try:
            for item in requests:
                batch.append(self.admit(item, store))
            pool = self._pool([Generation.size(self.geometry, item) for item in batch])
            responses = Generation(self._context, pool).run(batch)
            self.check_stages()
        finally:
            for admitted in batch:
                admitted.close()
        return responses[0] if isinstance(request, Request) else responses

    @torch.inference_mode()
    def open_generation(self, capacity: PoolRows) -> Generation:
        """For requests that come and go: over a pool of this size. `generate` is one with room for just its batch."""
        return Generation(self._context, self._pool([capacity]))

    def _pool(self, sizes: Sequence[PoolRows]) -> CachePool:
        wanted = PoolRows.sum(sizes).latents
        if self._pool_limit is not None and wanted > self._pool_limit:
            raise RequestError(
                "the engine's plans hold fewer tokens than are to be open together",
                expected=f"at most {self._pool_limit} tokens, prompts and answers", found=wanted,
                remedy="Ask for less at a time, or build the engine with a larger --pool-tokens.",
            )  # fmt: skip
        return CachePool(
            self.geometry,
            PoolRows.sum(sizes),
            dtype=self._context.dtype,
            device=self._context.device,
            packed=self._context.packed_cache,
        )

    def check_stages(self) -> None:
        """What a rank's stages noted fails all ranks. Collective; may wait for the device.

        Raises:
            EngineError: a fault that a stage could only note; on all ranks.
        """
        failure: RedKnotError | None = None
        try:
            self._context.stages.check()
        except RedKnotError as error:
            failure = error
        agree(self.collectives, None, failure)

    def admit(self, request: Request, store: ArtifactStore | None, *, deadline_s: float | None = None) -> Admitted:
        """A request's agreed way through the engine: tokens, segments, leases. The caller closes it. Collective.

        Args:
            deadline_s: seconds that are left of those the request's policy allows; left out: all of them.

        Raises:
            RequestError, StoreError: as `generate`; on all ranks.
        """
        check_request(request, self.geometry)
        named = [part for part in request.segments if isinstance(part, Artifact)]
        if named and store is None:
            raise RequestError(
                "the request names artifacts but no store was given", remedy="Pass store=ArtifactStore(...)."
            )
        started = time.perf_counter()
        admission: Admission | None = None
        documents = []
        if named and store is not None:
            if request.reuse is None:
                documents = document_tokens(
                    named, store, identity=self.identity, collectives=self.collectives, vocab=self.geometry.vocab
                )
            else:
                admission = admit(
                    named, store, identity=self.identity, geometry=self.geometry, profile=self.manifest.profile,
                    collectives=self.collectives,
                    deadline_s=request.reuse.deadline_s if deadline_s is None else deadline_s,
                )  # fmt: skip
                documents = [document.tokens for document in admission.documents]
        admission_s = time.perf_counter() - started
        try:
            layout = lay_out(request, documents, self.geometry)
            check_length(layout, request, self.manifest.max_length)
            self._ropes.grow(len(layout.tokens) + request.max_new_tokens)
        except BaseException:
            if admission is not None:
                admission.close()
            raise
        reuses = admission is not None and admission.admitted
        return Admitted(
            request=request,
            layout=layout if reuses else layout.as_fresh(),
            admission=admission,
            admission_s=admission_s,
        )
