"""The reuse arm once more, slowly: which rows run, what they see, what comes from artifacts, written down row by row.

Of the engine it takes weights, rope tables and the layer functions; none of its tables, row sets, pools or loaders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import torch

from trt_redknot import Artifact, ArtifactStore, Engine, Request, Tokens
from trt_redknot.artifacts.contents import Part
from trt_redknot.artifacts.lease import Lease
from trt_redknot.config.geometry import AttentionKind
from trt_redknot.engine.executor import OpsExecutor
from trt_redknot.engine.pool import raw_widths
from trt_redknot.model import layers as model
from trt_redknot.model.spec import LayerSpec
from trt_redknot.ops.reference.indexer import index_scores
from trt_redknot.ops.reference.numerics import rotate
from trt_redknot.ops.tables import AttentionTable, CompressTable

F64 = torch.float64
PROTECTED, ACTIVE, OMITTED = range(3)


@dataclass(frozen=True, kw_only=True)
class _Segment:
    start: int
    tokens: list[int]
    lease: Lease | None = None
    edited: frozenset[int] = frozenset()

    @property
    def rows(self) -> range:
        return range(self.start, self.start + len(self.tokens))

    @property
    def exact(self) -> bool:
        return self.lease is not None and self.start == 0 and not self.edited

    def windows(self, ratio: int) -> list[range]:
        """Rows of each entry: documents pool what is left at their end, fresh tokens wait for the whole window."""
        cut = [self.rows[first : first + ratio] for first in range(0, len(self.tokens), ratio)]
        return [rows for rows in cut if self.lease is not None or len(rows) == ratio]


@dataclass(kw_only=True)
class _Rows:
    """Why rows run: `protected` grows while rows are chosen."""

    protected: set[int] = field(default_factory=set)
    query: set[int] = field(default_factory=set)


class Direct:
    """One request in the reuse arm of a one-rank fp64 engine.

    Args:
        documents: by artifact id, the tokens without edits.
    """

    def __init__(
        self, engine: Engine, store: ArtifactStore, request: Request, documents: Mapping[str, Sequence[int]]
    ) -> None:
        assert isinstance(engine._context.stages, OpsExecutor)
        assert request.reuse is not None
        self.geometry, self.profile = engine.geometry, engine.manifest.profile
        self.stages, self.ops = engine._context.stages, engine._context.ops
        self.policy = request.reuse
        self.segments: list[_Segment] = []
        for part in request.segments:
            self.segments.append(self._segment(part, store, documents))
        self.tokens = torch.tensor([token for segment in self.segments for token in segment.tokens])
        self.segment_of = [segment for segment in self.segments for _ in segment.tokens]

    def _segment(
        self, part: Artifact | Tokens, store: ArtifactStore, documents: Mapping[str, Sequence[int]]
    ) -> _Segment:
        start = self.segments[-1].rows.stop if self.segments else 0
        if isinstance(part, Tokens):
            if self.segments and self.segments[-1].lease is None:
                before = self.segments.pop()
                return _Segment(start=before.start, tokens=[*before.tokens, *part.ids])
            return _Segment(start=start, tokens=list(part.ids))
        original = documents[part.artifact_id]
        tokens = [part.edits.get(position, token) for position, token in enumerate(original)]
        edited = frozenset(position for position, token in enumerate(tokens) if token != original[position])
        return _Segment(start=start, tokens=tokens, lease=store.open(part.artifact_id, rank=0), edited=edited)

    @torch.inference_mode()
    def answer(self) -> tuple[torch.Tensor, list[int]]:
        """fp32 logits [V] of the last row, and the class of every row."""
        profile, geometry = self.profile, self.geometry
        rows = self._known_before()
        leading = [row for row in range(len(self.tokens)) if not self.segment_of[row].exact or row in rows.protected]
        embedded = self.stages.embed(self.tokens)
        streams = {row: embedded[row] for row in leading}
        scores = None
        if AttentionKind.CSA in geometry.attention_kinds[: profile.leading_fence]:
            scores = torch.zeros(len(self._windows(geometry.csa_ratio)), dtype=F64)
        for layer in range(profile.leading_fence):
            streams = self._layer(
                layer, leading, set(leading), streams, only_exact=True, scores=scores, asked=rows.query
            )
        active = self._choose(rows, scores)
        live = sorted(rows.protected | active)
        tau = self.policy.effective_tau
        for layer in profile.reusable:
            streams = self._layer(layer, live, rows.protected, streams, tau=tau)
        full = self.policy.epilogue == "full"
        for row in set(leading) - set(live) if full else ():
            segment = self.segment_of[row]
            assert segment.lease is not None
            kept = segment.lease.tensor(Part.STREAMS, None, F64)[row - segment.start]
            streams[row] = kept.reshape(embedded[row].shape)
        trailing = leading if full else live
        for layer in range(profile.trailing_start, profile.layers):
            streams = self._layer(layer, trailing, set(trailing), streams, only_exact=full)
        for segment in self.segments:
            if segment.lease is not None:
                segment.lease.close()
        logits = self.stages.head(streams[len(self.tokens) - 1].unsqueeze(0))[0].float()
        return logits, [
            PROTECTED if row in rows.protected else ACTIVE if row in active else OMITTED
            for row in range(len(self.tokens))
        ]

    def _known_before(self) -> _Rows:
        policy, total, found = self.policy, len(self.tokens), _Rows()
        ends = self.geometry.boundary if policy.boundary is None else policy.boundary
        tail = total - min(policy.tail, int(total * policy.tail_share))
        for segment in self.segments:
            last = segment is self.segments[-1]
            if segment.lease is None:
                found.protected |= set(segment.rows)
                found.query |= set(segment.rows) if last else set()
                continue
            for window in segment.windows(self.geometry.csa_ratio):
                asks = last and window[-1] == total - 1
                reasons = [
                    row - segment.start in segment.edited
                    or row - segment.start < ends
                    or segment.rows.stop - row <= ends
                    or row >= tail
                    for row in window
                ]
                if asks or policy.protect == "all" or (not segment.exact and any(reasons)):
                    found.protected |= set(window)
                if asks:
                    found.query |= set(window)
        return found

    def _choose(self, rows: _Rows, scores: torch.Tensor | None) -> set[int]:
        """Protect the best windows by scores of this request, and return the rows of those that are active."""
        geometry, policy = self.geometry, self.policy
        free = [
            (place, window)
            for place, (segment, window) in enumerate(self._windows(geometry.csa_ratio))
            if segment.lease is not None and not segment.exact and window[0] not in rows.protected
        ]
        order = scores
        if order is None and AttentionKind.CSA in geometry.attention_kinds:
            kept = [
                torch.zeros(len(segment.windows(geometry.csa_ratio)), dtype=F64)
                if segment.lease is None
                else segment.lease.tensor(Part.SALIENCE, None, F64)
                for segment in self.segments
            ]
            order = torch.cat(kept)
        if order is not None:
            free.sort(key=lambda each: -float(order[each[0]]))
        top = geometry.index_topk if policy.top_entries is None else policy.top_entries
        top = 0 if scores is None else top
        for _, window in free[:top]:
            rows.protected |= set(window)
        rest = [window for _, window in free[top:]]
        allowed = int(policy.budget * sum(map(len, rest)) + 1e-9)
        active: set[int] = set()
        for window in rest:
            if len(active) + len(window) > allowed:
                break
            active |= set(window)
        return active

    def _visible(self, row: int, ratio: int) -> int:
        return sum(
            window[-1] <= row if len(window) == ratio else segment.rows.stop <= row
            for segment, window in self._windows(ratio)
        )

    def _windows(self, ratio: int) -> list[tuple[_Segment, range]]:
        """Of all segments, in order: none where layers have no compressor."""
        return [(segment, rows) for segment in self.segments for rows in (segment.windows(ratio) if ratio else ())]

    def _table(self, rows: Sequence[int], ratio: int) -> AttentionTable:
        return AttentionTable(
            segments=torch.tensor([[0, len(self.tokens), 0, 0, len(self._windows(ratio))]]),
            row_segments=torch.tensor([[0, 1]]).expand(len(rows), 2),
            positions=torch.tensor(rows),
            visible=torch.tensor([self._visible(row, ratio) for row in rows]),
        )

    def _layer(
        self,
        layer: int,
        rows: Sequence[int],
        full: AbstractSet[int],
        streams: Mapping[int, torch.Tensor],
        *,
        tau: float = 1.0,
        only_exact: bool = False,
        scores: torch.Tensor | None = None,
        asked: AbstractSet[int] = frozenset(),
    ) -> dict[int, torch.Tensor]:
        """One layer over `rows`, of which `full` run all heads; `scores` grow by those of the rows in `asked`."""
        geometry, ops = self.geometry, self.ops
        kind, ratio = geometry.attention_kinds[layer], geometry.ratio(layer)
        rope, weights = self.stages._ropes[kind], self.stages._layers[layer]
        spec = LayerSpec(geometry=geometry, layer=layer, tau=tau, first_expert=0)
        order = [*(row for row in rows if row in full), *(row for row in rows if row not in full)]
        positions = torch.tensor(order)
        before = torch.stack([streams[row] for row in order])
        own = model.project(ops, spec, weights, before, positions, rope)

        latents = torch.full((len(self.tokens), geometry.head_dim), torch.nan, dtype=F64)
        windows = self._windows(ratio)
        entries = torch.full((len(windows), geometry.head_dim), torch.nan, dtype=F64) if ratio else None
        keys = None
        if kind is AttentionKind.CSA:
            keys = torch.full((len(windows), geometry.index_dim), torch.nan, dtype=F64)
        for segment in self.segments:
            if segment.lease is None or (only_exact and not segment.exact):
                continue
            first = torch.arange(len(segment.tokens))
            cached = segment.lease.tensor(Part.LATENTS, layer, F64)
            latents[segment.start : segment.rows.stop] = _moved(cached, rope, first, segment.start)
            mine = [place for place, (each, _) in enumerate(windows) if each is segment]
            first = torch.arange(len(mine)) * ratio
            for part, table in ((Part.ENTRIES, entries), (Part.INDEX_KEYS, keys)):
                if table is not None:
                    table[mine] = _moved(segment.lease.tensor(part, layer, F64), rope, first, segment.start)
        latents[positions] = own.latent
        if entries is not None:
            raw = {row: [values[at] for values in own.raw] for at, row in enumerate(order)}
            self._pool(spec, raw, entries, keys)

        table = self._table(order, ratio)
        selected = None
        if keys is not None:
            selected = model.select_entries(ops, spec, weights, own, keys, table, rope, [len(order)])
            asking = [at for at, row in enumerate(order) if row in asked]
            if scores is not None and asking:
                query = model.index_query(ops, spec, weights, own.query_latent[asking])
                given = index_scores(
                    query, own.index_weights[asking], keys, positions[asking], table.visible[asking],
                    table.segments.tolist(), rope,
                )  # fmt: skip
                scores += given.masked_fill(given.isinf(), 0).sum(0)
        some = len([row for row in order if row in full])
        restored = [torch.empty((0, geometry.projected), dtype=F64)]
        for row in order[some:]:
            segment = self.segment_of[row]
            assert segment.lease is not None
            restored.append(segment.lease.rows(Part.LOCAL, layer, torch.tensor([row - segment.start]), F64))
        partial = model.attend(
            ops, spec, weights, own.query_latent, some, table, latents, entries, selected, torch.cat(restored), rope
        )
        after, _ = model.mix(ops, spec, weights, before, own, partial, self.tokens[positions], [len(order)])
        return {**streams, **{row: after[at] for at, row in enumerate(order)}}

    def _pool(
        self, spec: LayerSpec, raw: Mapping[int, list[torch.Tensor]], entries: torch.Tensor, keys: torch.Tensor | None
    ) -> None:
        """Write the entries of windows in which a row runs, where every row that they pool is there, and exact for
        those of documents."""
        ratio = self.geometry.ratio(spec.layer)
        kept: dict[int, list[torch.Tensor]] = {}
        for segment in self.segments if keys is not None else ():
            if segment.lease is not None:
                last = segment.lease.tensor(Part.BOUNDARY, spec.layer, F64)
                columns = last.split(raw_widths(self.geometry, spec.layer), dim=1)
                rows = segment.rows[-ratio:]
                kept |= {row: [values[at] for values in columns] for at, row in enumerate(rows) if row not in raw}
        for place, (segment, window) in enumerate(self._windows(ratio)):
            overlap = range(window[0] - ratio, window[0]) if keys is not None else range(0)
            pooled = [row for row in (*overlap, *window) if row >= 0]
            there = all(
                row in raw or (row in kept and (segment.lease is None or self.segment_of[row].exact)) for row in pooled
            )
            if not there or not any(row in raw for row in window):
                continue
            absent = [-1] * (ratio - len(window))
            slots = [*(pooled.index(row) if row >= 0 else -1 for row in (*overlap, *window)), *absent]
            table = CompressTable(
                entries=torch.tensor([place]), slots=torch.tensor([slots]), positions=torch.tensor([window[0]])
            )
            every = {**kept, **raw}
            series = [torch.stack(values) for values in zip(*(every[row] for row in pooled), strict=True)]
            rope, weights = self.stages._ropes[spec.attention], self.stages._layers[spec.layer]
            model.compress(self.ops, spec, weights, series, table, entries, keys, rope)


def _moved(rows: torch.Tensor, rope: torch.Tensor, positions: torch.Tensor, start: int) -> torch.Tensor:
    """Rows that were turned by their positions in a document, as if turned by those in the request."""
    width = 2 * rope.shape[1]
    plain = rotate(rows, rope, positions, inverse=True)
    plain[:, -width:] /= rope[0, 0, 0] ** 2
    return rotate(plain, rope, positions + start)
