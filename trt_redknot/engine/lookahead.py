"""Decode steps, one ahead: the device begins the next step before the host has read the tokens of this one.

The best tokens of a step are the next step's input where every sequence takes its best token: nothing on the host is
needed in between. The host then reads a step's tokens while the device runs the next one. A step that turns out not to
be wanted (its sequence stopped, or was dropped) is not undone: nobody asks for its tokens, and what it wrote into the
caches is written again, alike, by whatever step comes to that position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trt_redknot.engine.decode import Decoder, QueuedStep
from trt_redknot.engine.pool import SequenceState
from trt_redknot.engine.uploads import upload


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One sequence of a step.

    Attributes:
        token: to append.
        greedy: takes its best token.
        last: no token follows the one that is asked for.
    """

    state: SequenceState
    token: int
    greedy: bool
    last: bool


@dataclass(frozen=True, kw_only=True)
class StepRows:
    """What a step gives to the sequences that asked for it, which may be fewer than it ran.

    Attributes:
        rows: of the step, by sequence.
    """

    step: QueuedStep
    rows: tuple[int, ...]

    def tokens(self) -> list[int]:
        """The best tokens. Waits for the device."""
        found = self.step.tokens()
        return [found[row] for row in self.rows]

    def logits(self) -> list[torch.Tensor]:
        """fp32 [V] each, valid until the next step is queued: only where not all sequences are greedy."""
        return [self.step.logits[row] for row in self.rows]

    def chosen(self, indices: Sequence[int]) -> torch.Tensor:
        """The best tokens of some of the sequences, on the device: int64 [len(indices)]."""
        rows = [self.rows[index] for index in indices]
        chosen = self.step.chosen
        if rows == list(range(len(chosen))):
            return chosen
        return chosen[upload(np.array(rows, dtype=np.int64), chosen.device)]


@dataclass(frozen=True, kw_only=True)
class _Ahead:
    """A step that was queued for sequences as they will be, and the tokens it was fed with."""

    states: tuple[SequenceState, ...]
    lengths: tuple[int, ...]
    fed: StepRows
    fed_indices: tuple[int, ...]
    step: QueuedStep

    def rows_of(self, batch: Sequence[Asked]) -> tuple[int, ...] | None:
        """The step's row of each sequence; None where it is not the step that is asked for."""
        places = {id(state): row for row, state in enumerate(self.states)}
        rows = [places.get(id(each.state)) for each in batch]
        found = tuple(row for row in rows if row is not None)
        if len(found) < len(rows):
            return None
        fed = self.fed.tokens()
        for each, row in zip(batch, found, strict=True):
            if each.state.length != self.lengths[row] or each.token != fed[self.fed_indices[row]]:
                return None
        return found


class DecodeSteps:
    """The decode steps of one generation. Collective: every rank asks for the same.

    Args:
        ahead: queue steps before they are asked for; left out: where that pays.
    """

    def __init__(self, decoder: Decoder, *, ahead: bool | None = None) -> None:
        self._decoder = decoder
        self._looks_ahead = decoder.captures if ahead is None else ahead
        self._ahead: _Ahead | None = None

    def next(self, batch: Sequence[Asked]) -> StepRows:
        """Append the tokens and run the sequences. Does not wait for the device."""
        states = [each.state for each in batch]
        ahead, self._ahead = self._ahead, None
        rows = None if ahead is None else ahead.rows_of(batch)
        for state in states:
            state.append_token()
        if ahead is not None and rows is not None:
            found = StepRows(step=ahead.step, rows=rows)
        else:
            step = self._decoder.queue(states, [each.token for each in batch])
            found = StepRows(step=step, rows=tuple(range(len(states))))
        if self._looks_ahead:
            self._look_ahead(batch, found)
        return found

    def _look_ahead(self, batch: Sequence[Asked], found: StepRows) -> None:
        going = tuple(index for index, each in enumerate(batch) if not each.last)
        if not going:
            return
        states = tuple(batch[index].state for index in going)
        grown = [state.grown() for state in states]
        # Who draws needs this step's logits, which the next one writes over.
        if not all(each.greedy for each in batch):
            self._decoder.prepare(grown)
            return
        step = self._decoder.queue(grown, found.chosen(going))
        self._ahead = _Ahead(
            states=states, lengths=tuple(state.length for state in states), fed=found, fed_indices=going, step=step
        )
