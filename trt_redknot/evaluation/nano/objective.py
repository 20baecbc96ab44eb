"""What training minimises: answers, and the auxiliary losses without which nothing forms in 15 minutes.

* Answers: cross entropy of the answers' tokens.
* Previous tokens: throw-away linear heads on the streams after layer 1 name the tokens at t-1 to t-8. Without them the
  first layers form no heads that look at previous tokens, and training rests on guessing among the values in sight.
  Eight, because what a question asks for stands so many tokens before the row that must find it. Others do so on the
  streams that the second reading layer gets: what it compares must still be there.
* Reading: throw-away heads on the streams after two layers that read, at the rows that must find a word: after the
  first one, what must be read first (the place where somebody works, before its town can be read); after the second
  one, the word.
* Two steps: where a question has two, the row that the second reading layer gets should look as that of the question
  which is left, "the town of the employer of Nora" as "the town of Tekno": the heads that name the tokens at those two
  places should name what was read, and what is asked of it. Some sequences are told so, in the directions by which the
  heads know words: the second step can be learnt before the first one is sure.
* Subject: throw-away heads on the streams of reusable layers name the person that a document's word is about. A
  document whose top says only "the same person" can know it only from the document before. The first of them reads a
  layer whose only far entries are HCA's, the second one behind a layer with CSA's.
* Indexer: KL from the attention mass over compressed entries to the Indexer's scores, on detached inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from trt_redknot.evaluation.nano.batches import IGNORE
from trt_redknot.evaluation.nano.lean import Forward, Hint
from trt_redknot.evaluation.nano.sizes import Selection, Tensor
from trt_redknot.evaluation.nano.world import KINDS

LOOK_BACK = 8
# Tokens back from the row that answers "... the town of the employer of Nora ? Answer :": whose, what, and of two steps
# the second what. A question of one step has the first two at the same places.
WHOSE, WHAT, SECOND_WHAT = 3, 5, 8
# Of a row's own size, each of the two.
TOLD_STRENGTH = 0.5


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Of the losses beside the answers'. `language` weighs the next token of every word."""

    previous: float = 0.3
    moved: float = 0.5
    reading: float = 0.5
    subject: float = 0.2
    indexer: float = 0.1
    language: float = 0.05


class AuxiliaryHeads(nn.Module):
    """The throw-away heads; they are no part of the checkpoint.

    Args:
        previous_layers: the layers after which the tokens before should be known.
        subject_layers: the layers after which the subject should be known.
        reading_layers: two layers, after which what must be read first, and the answer, should be known.
    """

    def __init__(
        self, hidden: int, streams: int, vocab: int, *, previous_layers: Sequence[int], subject_layers: Sequence[int],
        reading_layers: tuple[int, int],
    ) -> None:  # fmt: skip
        super().__init__()
        self.previous_layers = tuple(previous_layers)
        self.subject_layers = tuple(subject_layers)
        self.reading_layers = reading_layers
        self.previous = nn.ModuleList(
            nn.ModuleList(nn.Linear(hidden * streams, vocab) for _ in range(LOOK_BACK)) for _ in self.previous_layers
        )
        self.subjects = nn.ModuleList(nn.Linear(hidden * streams, vocab) for _ in self.subject_layers)
        self.reading = nn.ModuleList(nn.Linear(hidden * streams, vocab) for _ in self.reading_layers)

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers whose streams the heads read."""
        return (*self.previous_layers, *self.subject_layers, *self.reading_layers)

    def hint(self, tokens: Tensor, targets: Tensor, bridges: Tensor, told: slice) -> Hint:
        """What rows of two steps of the sequences `told` are told before the second reading layer.

        As that layer's previous-token heads know it: the word that was read instead of whose it is, and what is asked
        of it instead of what was.
        """
        rows = second_steps(targets, bridges)
        places = torch.arange(len(targets), device=targets.device)
        rows &= ((places >= told.start) & (places < told.stop))[:, None]
        added = torch.zeros((*tokens.shape, 1), device=tokens.device)
        for back, now in ((WHOSE, bridges), (WHAT, shifted(tokens, SECOND_WHAT))):
            head = cast("nn.ModuleList", self.previous[-1])[back - 1]
            known = head.get_parameter("weight").detach().float()
            before = shifted(tokens, back)
            turn = F.embedding(now.where(rows, 0), known) - F.embedding(before.where(rows, 0), known)
            added = added + TOLD_STRENGTH * F.rms_norm(turn, turn.shape[-1:])
        return Hint(layer=self.previous_layers[-1], added=added * rows[..., None])


def second_steps(targets: Tensor, bridges: Tensor) -> Tensor:
    """Rows that must find a word for which another must be found first: bool [B, S]."""
    return (bridges != IGNORE) & (bridges != targets)


def shifted(tokens: Tensor, back: int) -> Tensor:
    """The token so many places before each, IGNORE where there is none: [B, S]."""
    return F.pad(tokens[:, :-back], (back, 0), value=IGNORE)


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Scalars: `total`, the weighted sum, and what a log shows of its parts.

    Attributes:
        correct: share of answer tokens named right.
        subject_correct: of the last subject head.
        bridge_correct, reading_correct: of the two reading heads.
        moved_correct: of what rows of two steps should look as if they asked for.
        told_correct: of answers whose first step the row was told.
        late_correct: of words found by sequences that see nothing in the first reading layer.
        kinds_right, kinds_asked: words that answers had to find, by kind of question, fp32 [kinds].
    """

    total: Tensor
    answers: Tensor
    previous: Tensor
    moved: Tensor
    subject: Tensor
    reading: Tensor
    indexer: Tensor
    correct: Tensor
    previous_correct: Tensor
    subject_correct: Tensor
    bridge_correct: Tensor
    reading_correct: Tensor
    moved_correct: Tensor
    told_correct: Tensor
    late_correct: Tensor
    kinds_right: Tensor
    kinds_asked: Tensor


@dataclass(frozen=True, kw_only=True)
class PreviousLoss:
    """Of the heads that name tokens before.

    Attributes:
        named: mean cross entropy of the tokens at t-1 .. t-LOOK_BACK over layers.
        named_correct: the smallest share of them named right behind one.
        moved, moved_correct: of what rows of two steps should look as if they asked for, behind the last layer.
    """

    named: Tensor
    named_correct: Tensor
    moved: Tensor
    moved_correct: Tensor


def previous_token_loss(
    streams: Mapping[int, Tensor], tokens: Tensor, heads: AuxiliaryHeads, bridges: Tensor, steps: Tensor, read: Tensor
) -> PreviousLoss:
    """What the heads say that name tokens before.

    Args:
        steps: rows of two steps, bool [B, S].
        read: sequences that can have found the first of them, bool [B, 1].
    """
    moved = {WHOSE: bridges, WHAT: shifted(tokens, SECOND_WHAT)}
    losses, right, moved_losses, moved_right = [], [], [], []
    for layer, own in zip(heads.previous_layers, heads.previous, strict=True):
        flat = _normed(streams[layer])
        last = layer == heads.previous_layers[-1]
        shares = []
        for back, head in enumerate(cast("nn.ModuleList", own), start=1):
            logits, wanted = head(flat), shifted(tokens, back)
            if last and back in moved:
                wanted = wanted.where(~steps, IGNORE)
                loss, correct = masked_loss(logits, moved[back].where(steps & read, IGNORE))
                moved_losses.append(loss)
                moved_right.append(correct)
            loss, correct = masked_loss(logits, wanted)
            losses.append(loss)
            shares.append(correct)
        right.append(torch.stack(shares).mean())
    return PreviousLoss(
        named=torch.stack(losses).mean(), named_correct=torch.stack(right).amin(),
        moved=torch.stack(moved_losses).mean(), moved_correct=torch.stack(moved_right).amin(),
    )  # fmt: skip


def masked_loss(logits: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross entropy where `wanted` is not IGNORE, and the share named right; 0 where there is nothing to name."""
    places = wanted != IGNORE
    count = places.sum().clamp(min=1)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten(), ignore_index=IGNORE, reduction="sum") / count
    return loss, ((logits.argmax(-1) == wanted) & places).sum() / count


def indexer_loss(selections: dict[int, Selection], silent: Sequence[int]) -> Tensor:
    """KL(attention mass || softmax of scores), over watched rows that see entries. Needs at least one selection.

    Args:
        silent: layers whose entries carry nothing; their Indexer learns the mass of the next layer that has entries.
    """
    losses = []
    for layer, selection in selections.items():
        source = min((other for other in selections if other >= layer and other not in silent), default=layer)
        mass = selections[source].mass
        total = mass.sum(-1, keepdim=True)
        target = mass / total.clamp(min=1e-9)
        counted = (total[..., 0] > 1e-6) & selection.visible.any(-1)
        scores = selection.scores.masked_fill(~selection.visible, -1e9)
        divergence = (target * ((target + 1e-9).log() - scores.log_softmax(-1))).sum(-1)
        losses.append((divergence * counted).sum() / counted.sum().clamp(min=1))
    return torch.stack(losses).mean()


def losses_of(
    forward: Forward, heads: AuxiliaryHeads, tokens: Tensor, targets: Tensor, subjects: Tensor, kinds: Tensor,
    bridges: Tensor, *, weights: Weights, silent: Sequence[int], muted: int = 0, late: int = 0, told: int = 0,
    fine: int = 0,
) -> Losses:  # fmt: skip
    """All losses of a batch; tokens, targets, subjects, kinds, bridges int64 [B, S].

    Args:
        late: so many sequences, the first ones, cannot have read anything after the first reading layer.
        told: so many sequences behind them were told the first of two steps.
        fine: so many sequences behind those saw nothing of HCA layers, which alone tell a document's words whom the
            document before was about.
        muted: so many sequences, the last ones, saw no entries of CSA layers. Of these four nothing counts in what was
            found.
    """
    counted, hinted = slice(late + told + fine, len(tokens) - muted), slice(late, late + told)
    answers, _ = masked_loss(forward.logits, targets)
    right = (forward.logits.argmax(-1) == targets).float()
    correct = right[counted].sum() / (targets[counted] != IGNORE).sum().clamp(min=1)
    steps = second_steps(targets, bridges)
    told_correct = (right * steps)[hinted].sum() / steps[hinted].sum().clamp(min=1)
    found_late = kinds[:late] != IGNORE
    late_correct = (right[:late] * found_late).sum() / found_late.sum().clamp(min=1)
    places = torch.arange(len(tokens), device=tokens.device)[:, None]
    early = (places >= late) & (places < len(tokens) - muted)
    previous = previous_token_loss(forward.streams, tokens, heads, bridges, steps, early)
    coarse = (places < late + told) | (places >= late + told + fine)
    named = [
        masked_loss(head(_normed(forward.streams[layer])), subjects.where(coarse, IGNORE))
        for layer, head in zip(heads.subject_layers, heads.subjects, strict=True)
    ]
    subject = torch.stack([loss for loss, _ in named]).mean()
    wanted = (bridges.where(early, IGNORE), targets.where(kinds != IGNORE, IGNORE))
    read = [
        masked_loss(head(_normed(forward.streams[layer])), at)
        for layer, head, at in zip(heads.reading_layers, heads.reading, wanted, strict=True)
    ]
    reading = torch.stack([loss for loss, _ in read]).mean()
    indexer = indexer_loss(forward.selections, silent) if forward.selections else torch.zeros_like(answers)
    following = F.cross_entropy(forward.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0)
    total = (
        answers
        + weights.previous * previous.named
        + weights.moved * previous.moved
        + weights.subject * subject
        + weights.reading * reading
        + weights.indexer * indexer
        + weights.language * following
    )
    asked = _asked(kinds[counted])
    return Losses(
        total=total, answers=answers.detach(), previous=previous.named.detach(), moved=previous.moved.detach(),
        subject=subject.detach(), reading=reading.detach(), indexer=indexer.detach(), correct=correct,
        previous_correct=previous.named_correct, moved_correct=previous.moved_correct,
        subject_correct=named[-1][1], bridge_correct=read[0][1], reading_correct=read[1][1],
        told_correct=told_correct, late_correct=late_correct,
        kinds_right=(asked * right[counted].flatten()[:, None]).sum(0), kinds_asked=asked.sum(0),
    )  # fmt: skip


def _asked(kinds: Tensor) -> Tensor:
    """fp32 [rows, kinds]: one where a word that an answer has to find comes next."""
    return (kinds.flatten()[:, None] == torch.arange(len(KINDS), device=kinds.device)).float()


def _normed(streams: Tensor) -> Tensor:
    flat = streams.flatten(2)
    return F.rms_norm(flat, flat.shape[-1:])
