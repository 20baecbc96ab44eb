"""Prefill of one request: leading fence, row selection, reusable layers, trailing fence. One path for both arms."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from trt_redknot.config.geometry import AttentionKind
from trt_redknot.config.policy import ReusePolicy
from trt_redknot.engine.bundles import Bundle, BundleKey, RowGeometry
from trt_redknot.engine.context import RankContext
from trt_redknot.engine.documents import Documents
from trt_redknot.engine.placement import Boundary, Restoration
from trt_redknot.engine.pool import CachePool, SequenceState
from trt_redknot.engine.rowset import RowSet, redistribute
from trt_redknot.engine.step import LayerRows, Observation, Step, make_step, no_extra_raw, no_restore
from trt_redknot.engine.steps import Steps
from trt_redknot.engine.uploads import Arriving, upload
from trt_redknot.request.controller import Candidates, candidates, has_candidates, protect, select_windows
from trt_redknot.request.rows import RowPlan
from trt_redknot.request.segments import Protection, RowClass, Segment, SegmentKind


@dataclass(frozen=True, kw_only=True)
class _Planned:
    """What the layers of a row set share."""

    rows: RowSet
    step: Step
    boundary: Boundary
    restoration: Restoration


@dataclass(frozen=True, kw_only=True)
class Prefilled:
    """Own streams of the rows that ran the last layer, and what was done to get there."""

    streams: torch.Tensor
    rows: RowSet
    plan: RowPlan
    observation: Observation


class Prefill:
    """One request through all layers.

    Args:
        documents: the request's artifacts; none of them in the recompute arm and while an artifact is made.
        policy: None recomputes every row.
        observe: what to keep besides the streams.
    """

    def __init__(
        self,
        context: RankContext,
        pool: CachePool,
        state: SequenceState,
        tokens: NDArray[np.int64],
        documents: Documents,
        policy: ReusePolicy | None,
        observe: Observation,
    ) -> None:
        self._context = context
        self._pool = pool
        self._state = state
        self._tokens = tokens
        self._documents = documents
        self._policy = policy
        self._observe = observe
        geometry = context.geometry
        self._has_csa = AttentionKind.CSA in geometry.attention_kinds
        self._window = geometry.csa_ratio
        self._planned: dict[int, _Planned] = {}
        self._bundle: Bundle | None = None
        self._ranking: _Ranking | None = None

    def run(self) -> Steps[Prefilled]:
        """All phases in order, in steps. Collective."""
        profile, context, segments = self._context.profile, self._context, self._state.segments
        key = BundleKey.of(
            self._state, self._policy, chunk_rows=context.chunk_rows, rank=context.collectives.rank,
            size=context.collectives.size,
        )  # fmt: skip
        self._bundle = bundle = context.bundles.find(key, self._make_bundle)
        flags, leading = bundle.flags, bundle.rows
        own_tokens = upload(self._tokens[leading.positions[leading.own_rows]], self._context.device)
        streams = self._context.stages.embed(own_tokens)
        choice = has_candidates(segments, flags)
        scored = [layer for layer in range(profile.leading_fence) if self._is_csa(layer)] if choice else []
        if scored:
            self._observe.salience_layers = scored
            self._observe.salience_rows = (flags[leading.positions] & int(Protection.QUERY)) != 0
            self._ranking = _Ranking(bundle.windows, scored[-1])
            self._observe.after_salience = self._ranking.begin
        streams = yield from self._layers(range(profile.leading_fence), leading, streams)
        plan = self._select(flags, bundle.windows, choice=choice)

        live = self._live_rows(plan)
        if live.full_rows == leading.full_rows and np.array_equal(live.positions, leading.positions):
            live = leading
        idle = self._idle_rows(live, leading)
        streams = redistribute(self._context.collectives, streams, leading, live)
        streams = yield from self._layers(
            profile.reusable, live, streams, tau=self._policy.effective_tau if self._policy else 1.0, then=idle
        )

        trailing, filled = self._trailing(live, leading, streams, idle)
        if self._observe.before_trailing is not None:
            self._observe.before_trailing(filled, trailing)
        streams = yield from self._layers(range(profile.trailing_start, profile.layers), trailing, filled)
        return Prefilled(streams=streams, rows=trailing, plan=plan, observation=self._observe)

    def _is_csa(self, layer: int) -> bool:
        return self._context.geometry.attention_kinds[layer] is AttentionKind.CSA

    def _row_set(self, positions: NDArray[np.int64], full_rows: int) -> RowSet:
        return RowSet(
            sequences=np.zeros(len(positions), dtype=np.int64),
            positions=positions,
            full_rows=full_rows,
            rank=self._context.collectives.rank,
            size=self._context.collectives.size,
            chunk_rows=self._context.chunk_rows,
        )

    def _make_bundle(self) -> Bundle:
        """All that follows from the request's documents and policy alone."""
        segments = self._state.segments
        flags = protect(segments, self._policy, self._window, boundary=self._context.geometry.boundary)
        everywhere = _positions_outside_idle_prefix(segments, flags)
        rows = self._row_set(everywhere, len(everywhere))
        geometry = self._geometry(rows, self._documents.boundary(rows))
        return Bundle(flags=flags, rows=rows, windows=candidates(segments, flags, self._window), geometry=geometry)

    def _geometry(self, rows: RowSet, boundary: Boundary) -> RowGeometry:
        context = self._context
        extras = {context.geometry.csa_ratio: boundary.extras}
        # As it is now: the request's own grows with its answer, and tables may be asked for by a later request.
        state = dataclasses.replace(self._state, segments=list(self._state.segments))
        return RowGeometry(make_step(context.geometry, [state], rows, extras), context.device)

    def _select(self, flags: NDArray[np.uint8], windows: Candidates, *, choice: bool) -> RowPlan:
        policy, geometry, segments = self._policy, self._context.geometry, self._state.segments
        order = np.arange(len(windows.starts), dtype=np.int64)
        if self._ranking is not None:
            order = self._ranking.order()
        elif choice and self._has_csa:
            kept = self._documents.salience(self._window)
            order = np.argsort(-kept[windows.entries], kind="stable")
        top_entries = geometry.index_topk if policy is None or policy.top_entries is None else policy.top_entries
        return select_windows(
            segments,
            flags,
            policy,
            windows=windows,
            order=order,
            live_scores=self._ranking is not None,
            top_entries=top_entries,
        )

    def _live_rows(self, plan: RowPlan) -> RowSet:
        protected = np.flatnonzero(plan.classes == RowClass.PROTECTED)
        active = np.flatnonzero(plan.classes == RowClass.ACTIVE)
        return self._row_set(np.concatenate([protected, active]), len(protected))

    def _idle_rows(self, live: RowSet, leading: RowSet) -> Restoration | None:
        """Own rows that run in the fences and not between them: the trailing one takes their streams from artifacts."""
        if self._policy is None or self._policy.epilogue != "full":
            return None
        own = leading.positions[leading.own_rows]
        runs = np.zeros(self._state.length, dtype=bool)
        runs[live.positions] = True
        idle = np.flatnonzero(~runs[own])
        return self._documents.restoration(own[idle], idle)

    def _trailing(
        self, live: RowSet, leading: RowSet, streams: torch.Tensor, idle: Restoration | None
    ) -> tuple[RowSet, torch.Tensor]:
        """The rows of the trailing fence and their own streams."""
        if self._policy is None or self._policy.epilogue == "full":
            moved = redistribute(self._context.collectives, streams, live, leading)
            if idle is not None and idle.rows:
                self._documents.fill_streams(moved, idle)
            return leading, moved
        ordered = self._row_set(np.sort(live.positions), live.rows)
        moved = redistribute(self._context.collectives, streams, live, ordered)
        return ordered, moved

    def _layers(
        self,
        layers: range,
        rows: RowSet,
        streams: torch.Tensor,
        *,
        tau: float = 1.0,
        then: Restoration | None = None,
    ) -> Steps[torch.Tensor]:
        assert self._bundle is not None
        # As many rows as in the leading fence are all but an idle prefix's: other documents write theirs anew.
        only_prefix = rows.rows == self._bundle.rows.rows
        step = self._step(rows, layers, only_prefix=only_prefix, then=then)
        for layer in layers:
            if rows.rows < self._state.length:
                self._documents.load_layer(
                    layer, self._pool, self._state, self._context.stages, only_prefix=only_prefix
                )
            streams = yield from self._context.walk.run(
                layer, step, self._pool, streams, tau=tau, observe=self._observe
            )
            if self._observe.after_layer is not None:
                self._observe.after_layer(layer)
        return streams

    def _step(self, rows: RowSet, layers: range, *, only_prefix: bool, then: Restoration | None) -> Step:
        """The step of a row set. What its layers read of the documents is announced, and copied meanwhile."""
        planned = self._planned.get(id(rows))
        if planned is None:
            # Both fences may run the same rows: their tables are made once.
            planned = self._planned[id(rows)] = self._plan(rows)
        self._documents.announce(
            layers, idle=rows.rows < self._state.length, only_prefix=only_prefix, boundary=planned.boundary,
            restoration=planned.restoration, then=then,
        )  # fmt: skip
        return planned.step

    def _plan(self, rows: RowSet) -> _Planned:
        context, documents, pool = self._context, self._documents, self._pool
        boundary = documents.boundary(rows)
        restoration = documents.restoration(rows.positions[rows.full_rows :])
        idle = rows.rows < self._state.length
        bundle = self._bundle
        assert bundle is not None
        geometry = bundle.geometry if rows is bundle.rows else self._geometry(rows, boundary)
        step = geometry.arrays.step(
            upload(self._tokens[rows.positions], context.device),
            geometry.base,
            geometry.of_ratio,
            extra_raw=(lambda layer: documents.boundary_raw(layer, boundary)) if idle else no_extra_raw(pool),
            restore=(
                no_restore(context.local_width, context.dtype, context.device)
                if rows.full_rows == rows.rows
                else LayerRows(lambda layer: documents.restore_local(layer, restoration), rows)
            ),
        )
        return _Planned(rows=rows, step=step, boundary=boundary, restoration=restoration)


class _Ranking:
    """Candidates by their scores, best first. Queued with the last scores, it travels to the host, which goes on with
    it while the device is still busy with the rest of the fence.

    Args:
        last: the layer whose scores are the last.
    """

    def __init__(self, windows: Candidates, last: int) -> None:
        self._windows = windows
        self._last = last
        self._order: Arriving | None = None

    def begin(self, layer: int, scores: torch.Tensor) -> None:
        if layer == self._last:
            of_windows = scores[upload(self._windows.entries, scores.device)]
            self._order = Arriving(torch.argsort(-of_windows, stable=True))

    def order(self) -> NDArray[np.int64]:
        """The one wait of a prefill: which rows run next depends on these scores."""
        assert self._order is not None
        return self._order.wait()


def _positions_outside_idle_prefix(segments: Sequence[Segment], flags: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Rows of the leading fence: all but the unprotected rows of an exact prefix, which run in no layer."""
    runs = np.ones(len(flags), dtype=bool)
    for segment in segments:
        if segment.kind is SegmentKind.PREFIX:
            runs[segment.start : segment.stop] = flags[segment.start : segment.stop] != 0
    return np.flatnonzero(runs)
