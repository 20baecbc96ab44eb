"""From records to figures, with what chance could have made of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from trt_redknot.serving.bench.records import Arm, Level, Record

QUANTILES = (0.5, 0.9, 0.99)
_RESAMPLES = 2000
_CONFIDENCE = 0.95

Values = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What a user must get for a request to count: seconds to the first token, and a token after it. None: any."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def met_by(self, record: Record) -> bool:
        pairs = ((self.ttft_s, record.ttft_s), (self.tpot_s, record.tpot_s))
        return record.completed and all(limit is None or value is None or value <= limit for limit, value in pairs)


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An estimate and its bootstrap confidence interval (95 %). None where there is nothing to estimate from."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class ArmFigures:
    """One arm at one level.

    Attributes:
        faults: failed requests by fault.
        tokens: of completed requests.
        seconds: that the arm's rounds took together.
        ttft_s, tpot_s, latency_s: by quantile, of completed requests.
        goodput: requests a second that met the objective.
    """

    arm: Arm
    sent: int
    completed: int
    faults: dict[str, int]
    tokens: int
    seconds: float
    ttft_s: dict[str, Interval]
    tpot_s: dict[str, Interval]
    latency_s: dict[str, Interval]
    tokens_a_second: float
    goodput: float


@dataclass(frozen=True, kw_only=True)
class LevelFigures:
    """Both arms at one level, and how they compare.

    Attributes:
        ttft_ratio: mean TTFT of recomputation over that of reuse, prompt by prompt; None where `refusal` says why.
    """

    level: Level
    arms: tuple[ArmFigures, ArmFigures]
    ttft_ratio: Interval | None
    refusal: str | None

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def bootstrap(samples: Values, statistic: Callable[[Values], Values], seed: int) -> Interval:
    """The statistic of `samples` with its percentile interval.

    Args:
        samples: [n, ...]; whole rows are drawn.
        statistic: of [resamples, n, ...], over its second axis.
    """
    draw = np.random.default_rng(seed)
    chosen = draw.integers(0, len(samples), (_RESAMPLES, len(samples)))
    values = statistic(samples[chosen])
    low, high = np.quantile(values, [(1 - _CONFIDENCE) / 2, (1 + _CONFIDENCE) / 2])
    return Interval(value=float(statistic(samples[None])[0]), low=float(low), high=float(high))


def summarise(records: Sequence[Record], objective: Objective, *, seed: int) -> list[LevelFigures]:
    """Figures of every level, in the order in which the levels ran. Warm-up is left out."""
    measured = [record for record in records if not record.warm_up]
    levels = list(dict.fromkeys(record.level for record in measured))
    return [
        _level([record for record in measured if record.level == level], level, objective, seed) for level in levels
    ]


def _level(records: Sequence[Record], level: Level, objective: Objective, seed: int) -> LevelFigures:
    by_arm = {arm: [record for record in records if record.arm is arm] for arm in Arm}
    refusal = refusal_of(by_arm[Arm.REUSE], by_arm[Arm.RECOMPUTE])
    ratio = None
    if refusal is None:
        pairs = [[record.ttft_s for record in _in_order(by_arm[arm])] for arm in (Arm.RECOMPUTE, Arm.REUSE)]
        ratio = bootstrap(np.array(pairs, dtype=np.float64).T, _ratio_of_means, seed)
    reuse, recompute = (_arm(by_arm[arm], arm, objective, seed) for arm in (Arm.REUSE, Arm.RECOMPUTE))
    return LevelFigures(level=level, arms=(reuse, recompute), ttft_ratio=ratio, refusal=refusal)


def refusal_of(reuse: Sequence[Record], recompute: Sequence[Record]) -> str | None:
    """Why the arms cannot be compared; None: they can."""
    fallen = sum(record.completed and record.arm_run != Arm.REUSE for record in reuse)
    if fallen:
        return f"{fallen} requests of the reuse arm were recomputed"
    failed = [sum(not record.completed for record in records) for records in (reuse, recompute)]
    if any(failed):
        return f"requests failed: {failed[0]} with reuse, {failed[1]} with recomputation"
    counts = [[(record.prompt, record.tokens) for record in _in_order(records)] for records in (reuse, recompute)]
    if counts[0] != counts[1]:
        totals = [sum(count for _, count in arm) for arm in counts]
        return f"the arms produced different token counts: {totals[0]} with reuse, {totals[1]} with recomputation"
    if not counts[0]:
        return "nothing was measured"
    return None


def _arm(records: Sequence[Record], arm: Arm, objective: Objective, seed: int) -> ArmFigures:
    completed = [record for record in records if record.completed]
    rounds = {record.round: [item for item in records if item.round == record.round] for record in records}
    seconds = sum(max(item.end_s for item in part) - min(item.due_s for item in part) for part in rounds.values())
    tokens = sum(record.tokens for record in completed)
    return ArmFigures(
        arm=arm,
        sent=len(records),
        completed=len(completed),
        faults=dict(Counter(record.fault for record in records if record.fault is not None)),
        tokens=tokens,
        seconds=seconds,
        ttft_s=_quantiles([record.ttft_s for record in completed], seed),
        tpot_s=_quantiles([record.tpot_s for record in completed], seed),
        latency_s=_quantiles([record.latency_s for record in completed], seed),
        tokens_a_second=tokens / seconds if seconds else 0.0,
        goodput=sum(objective.met_by(record) for record in records) / seconds if seconds else 0.0,
    )


def _quantiles(values: Sequence[float | None], seed: int) -> dict[str, Interval]:
    known = np.array([value for value in values if value is not None], dtype=np.float64)
    if not len(known):
        return {}
    return {f"p{q * 100:g}": bootstrap(known, _quantile(q), seed) for q in QUANTILES}


def _quantile(q: float) -> Callable[[Values], Values]:
    return lambda samples: np.quantile(samples, q, axis=1)


def _ratio_of_means(pairs: Values) -> Values:
    means: Values = pairs.mean(axis=1)
    return np.asarray(means[:, 0] / means[:, 1], dtype=np.float64)


def _in_order(records: Sequence[Record]) -> list[Record]:
    return sorted(records, key=lambda record: record.prompt)
