"""How fast tokens follow the first one, after the prefill of either arm."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from trt_redknot.config.policy import ReusePolicy
from trt_redknot.engine.decode import Decoder
from trt_redknot.engine.lookahead import Asked, DecodeSteps
from trt_redknot.engine.pool import SequenceState
from trt_redknot.engine.tiles import ArtifactReader
from trt_redknot.evaluation.metering import Ceilings, Clock
from trt_redknot.evaluation.standin import StandInRank
from trt_redknot.evaluation.ttft import finish, first_token
from trt_redknot.request.segments import Segment


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """Tokens after a prefill.

    Attributes:
        graphs: CUDA graphs that were captured before the clock started.
        eager_because: why no step was captured; None where steps were.
        floor_s: what the ops of a step cannot cost less at the ceilings, added up.
    """

    tokens_per_s: float
    graphs: int
    eager_because: str | None
    floor_s: float

    @property
    def share_of_roofline(self) -> float:
        return self.floor_s * self.tokens_per_s


def decode_room(csa_ratio: int, tokens: int) -> int:
    """Rows that :func:`decode_rate` asks of a cache beside the prompt's."""
    # One step as it is, and then every kind of step that comes often once: there it is captured. One more is metered.
    return csa_ratio + 2 + tokens + 2


def decode_rate(
    rank: StandInRank,
    segments: Sequence[Segment],
    artifacts: Mapping[int, ArtifactReader],
    policy: ReusePolicy | None,
    *,
    tokens: int,
    ceilings: Ceilings,
    clock: Clock,
) -> Decoded:
    """Tokens a second of one request after its prefill. Collective.

    Args:
        clock: times the ops of one more step, which is not among the timed ones.
    """
    context, ratio = rank.context, rank.context.geometry.csa_ratio
    found = first_token(context, segments, artifacts, policy, room=decode_room(ratio, tokens))
    decoder = Decoder(context, found.pool)
    steps = DecodeSteps(decoder)
    last = greedy_tokens(steps, found.state, int(found.logits.argmax()), ratio + 2)[-1]
    finish(context.device)
    graphs = decoder.captured
    started = time.perf_counter()
    last = greedy_tokens(steps, found.state, last, tokens)[-1]
    finish(context.device)
    seconds = time.perf_counter() - started
    metered, meter = rank.metered(clock)
    Decoder(metered, found.pool, graphs=False).step([found.state], [last])
    floor_s = sum(line.floor_s for line in meter.lines(ceilings))
    return Decoded(
        tokens_per_s=tokens / seconds, graphs=graphs, eager_because=decoder.eager_because, floor_s=floor_s
    )  # fmt: skip


@torch.inference_mode()
def greedy_tokens(steps: DecodeSteps, state: SequenceState, last: int, count: int) -> list[int]:
    """The `count` best tokens that follow `last`, each read before the next is asked for. No step is left queued."""
    tokens = []
    for left in range(count, 0, -1):
        last = steps.next([Asked(state=state, token=last, greedy=True, last=left == 1)]).tokens()[0]
        tokens.append(last)
    return tokens
