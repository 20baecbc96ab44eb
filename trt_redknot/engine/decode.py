"""Decoding: every sequence of a batch grows by a token, and all of them walk the layers together.

On a GPU a step is launch bound, so steps whose tensors have the same shapes are captured once as a CUDA graph, over
buffers whose addresses stay, and replayed: the host then writes a few numbers and starts one graph a token. A step also
chooses the best token of each row, which the next one may take from there: the host need not have seen it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trt_redknot.engine.context import RankContext
from trt_redknot.engine.decode_numbers import NumbersMaker, StepNumbers
from trt_redknot.engine.executor import OpsExecutor
from trt_redknot.engine.graphs import CapturedStep, capture
from trt_redknot.engine.head import logits
from trt_redknot.engine.pool import CachePool, SequenceState, tail_rows
from trt_redknot.engine.step import Observation, no_restore
from trt_redknot.engine.steps import drain
from trt_redknot.engine.tables import kinds_by_ratio
from trt_redknot.engine.uploads import Arriving
from trt_redknot.errors import EngineError

# Shapes differ by how many sequences there are and which of them finish a window: few of them come back.
_MOST_GRAPHS = 16

_Outcome = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class QueuedStep:
    """A step that the device has or will have done.

    Attributes:
        logits: fp32 [R, V], valid until the next step is queued.
        chosen: int64 [R] on the device, the best token of each row (of equal ones the lowest id); valid as long.
    """

    logits: torch.Tensor
    chosen: torch.Tensor
    _arriving: Arriving

    def tokens(self) -> list[int]:
        """`chosen`, on the host: always valid. Waits for the device."""
        found: list[int] = self._arriving.wait().tolist()
        return found


class Decoder:
    """Decode steps over one pool. Routing is native (tau = 1): generated tokens are few, and both arms decode alike.

    Collective: all ranks make one, and call it alike.

    Args:
        graphs: capture steps where that can be done.

    Attributes:
        captures: whether steps are captured on every rank: it pays to queue a step before the last one's tokens are
            there. Never changes, whatever becomes of a capture, so that all ranks queue the same steps.
        eager_because: why no step is captured; None where steps are.
    """

    def __init__(self, context: RankContext, pool: CachePool, *, graphs: bool = True) -> None:
        self._context = context
        self._pool = pool
        self._maker = NumbersMaker(context)
        self._prepared: tuple[tuple[object, ...], StepNumbers] | None = None
        self._seen: OrderedDict[tuple[object, ...], CapturedStep[_Outcome] | None] = OrderedDict()
        self._tables: tuple[int, ...] = ()
        self._warm = False
        self.eager_because = _refusal(context) if graphs else "graphs were switched off"
        replies = context.collectives.exchange(b"eager" if self.eager_because else b"captures")
        self.captures = set(replies) == {b"captures"}

    @property
    def captured(self) -> int:
        """Graphs that are ready to be replayed."""
        return sum(step is not None for step in self._seen.values())

    def step(self, states: Sequence[SequenceState], tokens: Sequence[int]) -> torch.Tensor:
        """Append `tokens[i]` to `states[i]` and run them: fp32 logits [len(states), V], valid until the next step.
        Collective."""
        for state in states:
            state.append_token()
        return self.queue(states, tokens).logits

    def queue(self, states: Sequence[SequenceState], tokens: Sequence[int] | torch.Tensor) -> QueuedStep:
        """Run the last token of each of these sequences, whose place is in `states` already. Collective.

        Args:
            tokens: by sequence; a tensor on the device where an earlier step chose them there.
        """
        numbers = self._numbers(states)
        fed = tokens if isinstance(tokens, torch.Tensor) else None
        if not isinstance(tokens, torch.Tensor):
            numbers.tokens[:] = np.asarray(tokens, dtype=np.int64)
        result, chosen = self._outcome(states, numbers, fed)
        return QueuedStep(logits=result, chosen=chosen, _arriving=Arriving(chosen))

    def prepare(self, states: Sequence[SequenceState]) -> None:
        """Work out, on the host, what `queue` will need for these sequences if it is asked for them next."""
        self._prepared = _places(states), self._maker.make(states)

    def _numbers(self, states: Sequence[SequenceState]) -> StepNumbers:
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared[0] == _places(states):
            return prepared[1]
        return self._maker.make(states)

    def _outcome(self, states: Sequence[SequenceState], numbers: StepNumbers, fed: torch.Tensor | None) -> _Outcome:
        if self.eager_because is not None:
            return self._eager(numbers, fed)
        self._drop_stale()
        key = numbers.key
        captured = self._seen.get(key)
        if captured is None and (key in self._seen or (self._warm and self._lasting(states))):
            captured = self._capture(key, numbers)
        if captured is not None:
            self._seen.move_to_end(key)
            return captured.replay(numbers.batch, fed)
        # What ops make once must not be made inside a graph, so the first step runs as it is, and so does the first of
        # a shape that may never come back.
        self._warm = True
        self._seen.setdefault(key, None)
        while len(self._seen) > _MOST_GRAPHS:
            self._idle()
            self._seen.popitem(last=False)
        return self._eager(numbers, fed)

    def _lasting(self, states: Sequence[SequenceState]) -> bool:
        """Whether sequences of this length take steps of few shapes: all raw rows that are ever kept are there."""
        geometry = self._context.geometry
        most = max(tail_rows(kind, ratio) for ratio, kind in kinds_by_ratio(geometry).items())
        return all(state.length > most for state in states)

    def _capture(self, key: tuple[object, ...], numbers: StepNumbers) -> CapturedStep[_Outcome] | None:
        try:
            self._seen[key] = capture(lambda there: self._run(numbers, there), numbers.batch, self._context.device)
        except (RuntimeError, EngineError) as error:
            # What is really wrong shows again where the step runs as it is.
            self.eager_because = f"a step could not be captured: {str(error).splitlines()[0]}"
            self._idle()
            self._seen.clear()
            return None
        return self._seen[key]

    def _drop_stale(self) -> None:
        """A graph holds addresses; rope tables move when they grow."""
        stages = self._context.stages
        assert isinstance(stages, OpsExecutor)
        if stages.addresses != self._tables:
            if self._seen:
                self._idle()
            self._seen.clear()
            self._tables = stages.addresses

    def _idle(self) -> None:
        """Wait for the steps that are queued: one of them may be of a graph that is about to go."""
        torch.cuda.current_stream(self._context.device).synchronize()

    def _eager(self, numbers: StepNumbers, fed: torch.Tensor | None) -> _Outcome:
        there = numbers.batch.upload(self._context.device)
        if fed is not None:
            there[0].copy_(fed)
        return self._run(numbers, there)

    def _run(self, numbers: StepNumbers, there: Sequence[torch.Tensor]) -> _Outcome:
        """Logits and best tokens of a step over tensors of the batch's layout."""
        context, pool, geometry = self._context, self._pool, self._context.geometry
        layers, tensors = numbers.layers, numbers.over(there)
        step = tensors.step(
            numbers.step,
            extra_raw=lambda layer: [tail[tensors.sources[geometry.ratio(layer)]] for tail in pool.tails[layer]],
            restore=no_restore(context.local_width, context.dtype, context.device),
        )
        streams = layers.stages.embed(tensors.own_tokens)
        for layer in range(geometry.layers):
            streams = drain(layers.walk.run(layer, step, pool, streams, tau=1.0, observe=Observation()))
        gathered = layers.ranks.all_gather(streams[tensors.own], numbers.chosen.counts)
        result = logits(layers.stages, context.collectives, geometry, gathered[tensors.order])
        return result, result.argmax(1)


def _places(states: Sequence[SequenceState]) -> tuple[object, ...]:
    """All that a step's numbers follow from."""
    return tuple(
        (state.slot, state.latent_offset, tuple(state.entry_offsets.items()), tuple(state.segments)) for state in states
    )


def _refusal(context: RankContext) -> str | None:
    """Why steps of this rank cannot be captured, if so."""
    if context.device.type != "cuda":
        return f"there are no CUDA graphs on {context.device}"
    if not isinstance(context.stages, OpsExecutor):
        return "the engine's plans are no part of a graph"
    if not context.stages.capturable:
        return "ops of the torch references wait for the device"
    if not context.collectives.capturable:
        return "collectives between these ranks cannot be captured"
    return None
