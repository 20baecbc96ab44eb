"""Everything measured at one length, as JSON values: both arms, where their time went, the cold path, decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from trt_redknot.artifacts.formats import ArtifactFormat
from trt_redknot.config.policy import ReusePolicy
from trt_redknot.engine.tiles import ArtifactReader
from trt_redknot.evaluation.metering import Ceilings, Clock, share_of_roofline
from trt_redknot.evaluation.standin import StandInRank
from trt_redknot.evaluation.ttft import (
    ArmTimes,
    build_seconds,
    document_length,
    first_token,
    segment_table,
    time_arms,
)
from trt_redknot.evaluation.ttft_decode import Decoded, decode_rate
from trt_redknot.reports.ledgers import ledgers
from trt_redknot.reports.report import RowCounts


def measure_length(
    rank: StandInRank,
    length: int,
    documents: int,
    artifacts: Mapping[int, ArtifactReader],
    arms: Mapping[str, ReusePolicy | None],
    *,
    ceilings: Ceilings,
    clock: Clock,
    repeat: int,
    form: ArtifactFormat,
    decode: int,
    turn_done: Callable[[], None],
) -> dict[str, Any]:
    """Both arms at `length` tokens. Collective.

    Args:
        arms: policies by name; "recompute" is None and is what the others are compared with.
        clock: times the ops of one more pass of each arm, which is not among the timed ones.
        form: how the artifacts are stored, for the cold path.
        decode: tokens to decode after each arm; 0: none.
        turn_done: called after every timed or warm-up pass.
    """
    times = time_arms(rank.context, length, documents, artifacts, arms, repeat=repeat, turn_done=turn_done)
    base = times["recompute"].median_s
    measured: dict[str, dict[str, Any]] = {}
    decoded: dict[str, Decoded] = {}
    for arm, policy in arms.items():
        segments = segment_table(length, documents, reuse=policy is not None)
        context, meter = rank.metered(clock)
        first_token(context, segments, artifacts, policy)
        stages = meter.lines(ceilings)
        measured[arm] = {
            **_timed(times[arm], base),
            **_saved(rank, times[arm], policy),
            "stages": [{**dataclasses.asdict(line), "share": line.share_of_roofline} for line in stages],
            "share_of_roofline": share_of_roofline(stages),
        }
        if decode:
            decoded[arm] = decode_rate(
                rank, segments, artifacts, policy, tokens=decode, ceilings=ceilings, clock=clock
            )  # fmt: skip
    for arm, found in decoded.items():
        measured[arm]["decode"] = {
            **dataclasses.asdict(found),
            "of_recompute": found.tokens_per_s / decoded["recompute"].tokens_per_s,
            "share_of_roofline": found.share_of_roofline,
        }
    size = document_length(length, documents)
    seconds, size_bytes = build_seconds(rank.context, size, form)
    cold = _cold(seconds * documents, size_bytes * documents, times)
    return {"length": length, "documents": documents, "document_tokens": size, "arms": measured, "cold": cold}


def _timed(taken: ArmTimes, base: float) -> dict[str, Any]:
    return {
        "ttft_s": taken.median_s,
        "spread_s": taken.spread_s,
        "seconds": taken.seconds,
        "late_s": taken.late_s,
        "speedup": base / taken.median_s,
        "bytes_by_tier": {tier.value: moved for tier, moved in taken.moved.items()},
    }


def _saved(rank: StandInRank, taken: ArmTimes, policy: ReusePolicy | None) -> dict[str, Any]:
    assert taken.plan is not None
    context = rank.context
    saved = ledgers(context.geometry, context.profile, taken.plan, "full" if policy is None else policy.epilogue)
    return {"rows": dataclasses.asdict(RowCounts.of(taken.plan)), "ledgers": saved.to_json()}


def _cold(built_s: float, built_bytes: int, times: Mapping[str, ArmTimes]) -> dict[str, Any]:
    """What making all artifacts costs, and after how many requests that is won back."""
    base = times["recompute"].median_s
    won = {arm: base - taken.median_s for arm, taken in times.items()}
    return {
        "built_s": built_s,
        "bytes_of_rank": built_bytes,
        "in_recomputations": built_s / base,
        "break_even": {arm: built_s / seconds for arm, seconds in won.items() if seconds > 0},
    }
