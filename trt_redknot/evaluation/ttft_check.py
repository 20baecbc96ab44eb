"""Whether the two arms agree, before their times are compared: a request whose rows are all protected, against
recomputation of the same tokens, at every row of several prompts.

Documents of whole compression windows that run with all heads compute what recomputation does: protected rows are it
bit for bit. What artifacts replace is rounded otherwise: a document's latents are rotated in its own frame, rounded,
and turned to the request's. What that may change is measured in the same run instead of guessed. Rotations are
relative, so recomputation with all positions moved by a constant is the same function once more, and rounds otherwise
in the same places:

    fault     distance(rows behind an artifact, recomputed)
    bound     distance(recomputed with positions moved, in other chunks; recomputed), times a small factor
    cap       distance(recomputed, other rows of the same recomputation), times a share

A bound that lets rows be about as far away as rows that have nothing to do with each other would prove nothing: no
bound is above the cap, and where recomputations alone differ by more than that, the check fails. Distances are taken
segment by segment, so that a fault in one document is not thinned out by the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trt_redknot.artifacts.formats import ArtifactFormat
from trt_redknot.config.geometry import ModelGeometry, RouterKind
from trt_redknot.config.policy import ReusePolicy
from trt_redknot.engine.context import RankContext
from trt_redknot.evaluation.kept import keep_artifact
from trt_redknot.evaluation.standin import StandInRank
from trt_redknot.evaluation.ttft import first_token, prompt, segment_table
from trt_redknot.request.segments import RowClass, Segment, SegmentKind

# Many rows make an average that scatters little. Where routers choose, near ties flip, and it scatters more.
RMS_FACTOR = {RouterKind.HASH: 1.25, RouterKind.LEARNED: 1.5}
# The largest of many rows scatters more. One row that is another's is several times as far away.
LARGEST_FACTOR = {RouterKind.HASH: 2.0, RouterKind.LEARNED: 3.0}
# What rows may differ by at most, whatever recomputations differ by, as a share of the distance of unrelated rows: a
# single row that is another's is about the whole of it away.
RMS_SHARE, LARGEST_SHARE = 0.5, 0.8
# The bound's runs begin at positions up to this.
_FRAMES = 4096


@dataclass(frozen=True, kw_only=True)
class Distance:
    """How far two sets of logits are apart.

    Attributes:
        rms: |a - b| / |b| over all rows.
        largest: the same of the row where it is largest.
    """

    rms: float
    largest: float


class Apart:
    """Collects the :class:`Distance` of rows that come by and by."""

    def __init__(self) -> None:
        self._apart: list[torch.Tensor] = []
        self._sizes: list[torch.Tensor] = []

    def add(self, found: torch.Tensor, wanted: torch.Tensor) -> None:
        """Logits [R, V]."""
        self._apart.append((found - wanted).norm(dim=1))
        self._sizes.append(wanted.norm(dim=1))

    def distance(self) -> Distance:
        """Of all rows so far. Not-a-number where one of them is not finite."""
        apart, sizes = torch.cat(self._apart).double(), torch.cat(self._sizes).double()
        return Distance(rms=float(apart.norm() / sizes.norm()), largest=float((apart / sizes).max()))


@dataclass(frozen=True, kw_only=True)
class SegmentAgreement:
    """Rows of one segment: what is checked, what bounds it, and what caps the bound.

    Attributes:
        unrelated: recomputed rows against other rows of the segment.
    """

    rows: int
    protected: Distance
    recomputed: Distance
    unrelated: Distance

    def fault(self, name: str, times: float, share: float) -> str | None:
        """What is wrong with the distance of this name, if anything is."""
        distance: float = getattr(self.protected, name)
        rounding: float = getattr(self.recomputed, name)
        # One row has a mean of its own.
        cap = share * self.unrelated.rms
        # Not-a-number is no distance either, and bounds nothing.
        if not rounding <= cap:
            return (
                f"recomputations differ by {rounding:.2e} ({name}), more than {share:.0%} of what unrelated rows "
                f"differ by ({self.unrelated.rms:.2e}): nothing that is compared with that is proved"
            )
        bound = min(times * rounding, cap)
        if not distance <= bound:
            return (
                f"{name} distance {distance:.2e}, more than {bound:.2e} ({times} times what recomputations differ by, "
                f"at most {share:.0%} of what unrelated rows do)"
            )
        return None


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What the check found on one network.

    Attributes:
        routers: of all its layers: hash routers flip no near tie, so that rounding stays small and faults stand out.
        runs: prompts.
        equal: share of the protected rows that are bit for bit what recomputation gave.
        reused: the last segment's rows, where an artifact replaces all rows before it.
    """

    routers: RouterKind
    runs: int
    equal: float
    segments: tuple[SegmentAgreement, ...]
    reused: SegmentAgreement

    def faults(self) -> list[str]:
        """Where protected rows are not recomputation, where rows behind an artifact are further from it than rounding
        explains, or where rounding explains so much that nothing is proved; empty where nowhere."""
        places = [*((f"segment {index}", each) for index, each in enumerate(self.segments)), ("reuse", self.reused)]
        found = []
        if self.equal != 1.0:
            found.append(
                f"{self.routers} routers: {self.equal:.2%} of the protected rows are recomputation bit for bit, "
                "expected all of them"
            )
        for place, segment in places:
            for name, factor, share in (
                ("rms", RMS_FACTOR, RMS_SHARE),
                ("largest", LARGEST_FACTOR, LARGEST_SHARE),
            ):
                fault = segment.fault(name, factor[self.routers], share)
                if fault is not None:
                    found.append(f"{self.routers} routers, {place}: {fault}")
        return found

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "routers": self.routers.value, "faults": self.faults()}


def checked_geometry(
    geometry: ModelGeometry, routers: RouterKind, *, layers: int, experts: int, vocab: int
) -> ModelGeometry:
    """The same layers, fewer of them, with fewer experts, all routed alike: small enough for a rank to hold alone."""
    kinds = geometry.attention_kinds[:layers]
    return dataclasses.replace(
        geometry, attention_kinds=kinds, router_kinds=(routers,) * len(kinds), experts=experts, vocab=vocab
    )


def check_arms(rank: StandInRank, length: int, documents: int, *, runs: int, chunks: Sequence[int]) -> Agreement:
    """Compare the arms over a whole network whose layers are all routed alike. Collective.

    Args:
        rank: with real collectives, so that answers are answers.
        length: tokens.
        runs: prompts.
        chunks: rows of a chunk, at most; prompts take them by turns, both arms alike, the bound's runs the next one.
    """
    rank.ropes.grow(length + _FRAMES)
    # The same on every rank.
    starts = np.random.default_rng(runs).integers(1, _FRAMES, runs).tolist()
    fresh, documented = (segment_table(length, documents, reuse=reuse) for reuse in (False, True))
    protected, recomputed, unrelated = ([Apart() for _ in documented] for _ in range(3))
    reused, question, equal = Apart(), documented[-1], 0
    for run, start in enumerate(starts):
        context, elsewhere = (
            dataclasses.replace(each, chunk_rows=chunks[(run + turn) % len(chunks)])
            for turn, each in enumerate((rank.context, rank.moved(start)))
        )
        base = _logits(context, run, fresh, None)
        found = _logits(context, run, documented, ReusePolicy(protect="all"))
        moved = _logits(elsewhere, run, fresh, None)
        for segment, ours, bound, other in zip(documented, protected, recomputed, unrelated, strict=True):
            rows = slice(segment.start, segment.stop)
            ours.add(found[rows], base[rows])
            bound.add(moved[rows], base[rows])
            other.add(base[rows].roll(segment.length // 2, 0), base[rows])
        equal += int((found == base).all(1).sum())
        reused.add(_reused(context, run, question), base[question.start : question.stop])
    (router,) = set(rank.context.geometry.router_kinds)
    segments = [
        SegmentAgreement(
            rows=segment.length, protected=ours.distance(), recomputed=bound.distance(), unrelated=other.distance()
        )
        for segment, ours, bound, other in zip(documented, protected, recomputed, unrelated, strict=True)
    ]
    last = segments[-1]
    return Agreement(
        routers=router, runs=runs, equal=equal / (runs * documented[-1].stop), segments=tuple(segments),
        reused=dataclasses.replace(last, protected=reused.distance()),
    )  # fmt: skip


def _logits(context: RankContext, seed: int, segments: Sequence[Segment], policy: ReusePolicy | None) -> torch.Tensor:
    """fp32 [R, V] of every row."""
    found = first_token(context, segments, {}, policy, asked=np.arange(segments[-1].stop), seed=seed).asked
    assert found is not None
    return found


def _reused(context: RankContext, seed: int, question: Segment) -> torch.Tensor:
    """fp32 [R, V] of the question's rows, where one artifact replaces all that is before it."""
    tokens = prompt(context.geometry, question.stop, seed)
    document = keep_artifact(context, tokens[: question.start], ArtifactFormat.exact_for(context.dtype))
    segments = [
        Segment(index=0, kind=SegmentKind.PREFIX, start=0, length=question.start, artifact_id="kept"),
        Segment(index=1, kind=SegmentKind.FRESH, start=question.start, length=question.length),
    ]
    asked = np.arange(question.start, question.stop)
    found = first_token(context, segments, {0: document}, ReusePolicy(tau=1.0), asked=asked, seed=seed)
    assert found.asked is not None
    assert found.plan.count(RowClass.OMITTED) == question.start
    return found.asked
