"""What training minimises: answers, and the auxiliary losses without which nothing forms in 15 minutes.

* Answers: cross entropy of the answers' tokens.
* Previous tokens: throw-away linear heads on the streams after layer 1 name the tokens at t-1, t-2, t-3. Without them
  the first layers form no heads that look at the previous token, and training rests on guessing among the values in
  sight.
* Subject: a throw-away head on the streams of a reusable layer names the person that a document's word is about. A
  document whose top says only "the same person" can know it only from the document before.
* Indexer: KL from the attention mass over compressed entries to the Indexer's scores, on detached inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from trt_redknot.evaluation.nano.batches import IGNORE
from trt_redknot.evaluation.nano.layers import Selection, Tensor
from trt_redknot.evaluation.nano.lean import Forward

LOOK_BACK = 3
PREVIOUS_LAYER = 1


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Of the losses beside the answers'. `language` weighs the next token of every word."""

    previous: float = 0.3
    subject: float = 0.2
    indexer: float = 0.1
    language: float = 0.05


class AuxiliaryHeads(nn.Module):
    """The throw-away heads; they are no part of the checkpoint.

    Args:
        subject_layer: the layer after which the subject must be known.
    """

    def __init__(self, hidden: int, streams: int, vocab: int, subject_layer: int) -> None:
        super().__init__()
        self.subject_layer = subject_layer
        self.previous = nn.ModuleList(nn.Linear(hidden * streams, vocab) for _ in range(LOOK_BACK))
        self.subject = nn.Linear(hidden * streams, vocab)

    @property
    def layers(self) -> tuple[int, int]:
        """Layers whose streams the heads read."""
        return (PREVIOUS_LAYER, self.subject_layer)


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Scalars: the parts, and `total`, their weighted sum."""

    total: Tensor
    answers: Tensor
    previous: Tensor
    subject: Tensor
    indexer: Tensor
    correct: Tensor
    previous_correct: Tensor
    subject_correct: Tensor


def previous_token_loss(streams: Tensor, tokens: Tensor, heads: AuxiliaryHeads) -> tuple[Tensor, Tensor]:
    """Mean cross entropy of the tokens at t-1 .. t-LOOK_BACK, and the share of them named right."""
    flat = _normed(streams)
    losses, right = [], []
    for back, head in enumerate(heads.previous, start=1):
        logits = head(flat[:, back:]).float().flatten(0, 1)
        wanted = tokens[:, :-back].flatten()
        losses.append(F.cross_entropy(logits, wanted))
        right.append((logits.argmax(-1) == wanted).float().mean())
    return torch.stack(losses).mean(), torch.stack(right).mean()


def masked_loss(logits: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross entropy where `wanted` is not IGNORE, and the share named right; 0 where there is nothing to name."""
    places = wanted != IGNORE
    count = places.sum().clamp(min=1)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten(), ignore_index=IGNORE, reduction="sum") / count
    return loss, ((logits.argmax(-1) == wanted) & places).sum() / count


def indexer_loss(selections: dict[int, Selection], silent: Sequence[int], dense: Tensor) -> Tensor:
    """KL(attention mass || softmax of scores), over rows that see entries, of sequences that attended densely.

    Args:
        silent: layers whose entries carry nothing; their Indexer learns the mass of the next layer that has entries.
        dense: bool [B].
    """
    losses = []
    for layer, selection in selections.items():
        source = min((other for other in selections if other >= layer and other not in silent), default=None)
        if source is None:
            continue
        mass = selections[source].mass
        total = mass.sum(-1, keepdim=True)
        target = mass / total.clamp(min=1e-9)
        counted = dense[:, None] & (total[..., 0] > 1e-6) & selection.visible.any(-1)
        scores = selection.scores.masked_fill(~selection.visible, -1e9)
        divergence = (target * ((target + 1e-9).log() - scores.log_softmax(-1))).sum(-1)
        losses.append((divergence * counted).sum() / counted.sum().clamp(min=1))
    return torch.stack(losses).mean() if losses else torch.zeros((), device=dense.device)


def losses_of(
    forward: Forward, heads: AuxiliaryHeads, tokens: Tensor, targets: Tensor, subjects: Tensor, *, weights: Weights,
    silent: Sequence[int], dense: Tensor,
) -> Losses:  # fmt: skip
    """All losses of a batch; tokens, targets, subjects int64 [B, S]."""
    answers, correct = masked_loss(forward.logits, targets)
    previous, previous_correct = previous_token_loss(forward.streams[PREVIOUS_LAYER], tokens, heads)
    subject, subject_correct = masked_loss(heads.subject(_normed(forward.streams[heads.subject_layer])), subjects)
    indexer = indexer_loss(forward.selections, silent, dense)
    following = F.cross_entropy(forward.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0)
    total = (
        answers
        + weights.previous * previous
        + weights.subject * subject
        + weights.indexer * indexer
        + weights.language * following
    )
    return Losses(
        total=total, answers=answers.detach(), previous=previous.detach(), subject=subject.detach(),
        indexer=indexer.detach(), correct=correct, previous_correct=previous_correct, subject_correct=subject_correct,
    )  # fmt: skip


def _normed(streams: Tensor) -> Tensor:
    flat = streams.flatten(2)
    return F.rms_norm(flat, flat.shape[-1:])
