"""What the lean layer functions know of a configuration, and the tables that depend only on a batch's shape.

Shapes in this package: B sequences, S tokens, R = B * S rows, M hidden, H heads, D head width, N streams, T compressed
entries, W block of queries, K keys of a block, P rotated channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Tensor = torch.Tensor
Parameters = Mapping[str, Tensor]
# Channels that queries and keys get beside the head's own: the first carries the sink, the others keep the alignment
# that fused attention asks for.
SPARE = 8
# Keys behind the real ones: one for the sink, one that stands for entries that are zero.
_SINK, _ZERO = 0, 1


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """A layer's compression ratio (0: none), whether it has an Indexer, how it routes, whether its entries are zero,
    and whether it is the first one whose Indexer chooses entries that are not."""

    ratio: int
    indexer: bool
    hashed: bool
    silent: bool = False
    first: bool = False


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The scalars of a configuration that the layer functions use, and the tokens of a block of queries."""

    heads: int
    head_dim: int
    rope_dim: int
    groups: int
    window: int
    block: int
    index_heads: int
    index_dim: int
    index_topk: int
    experts: int
    experts_per_token: int
    routed_scale: float
    swiglu_limit: float
    streams: int
    sinkhorn: int
    hc_eps: float
    norm_eps: float
    scoring: Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What the sequences of a batch attend to beside their window.

    Attributes:
        dense: so many sequences, the first ones, see every entry; the others what the Indexer chooses.
        muted: so many sequences, the last ones, see no entry of CSA layers at all.
        late: so many sequences, the first ones, see none in the first of these layers.
        fine: these sequences see no entry of HCA layers.
        watched: int64 [W'], the places of each block of W tokens at which a dense sequence's Indexer is compared with
            the attention.
    """

    dense: int
    muted: int
    late: int
    fine: slice
    watched: Tensor


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What the Indexer of a layer scored and what its attention used, at the watched tokens of dense sequences.

    Attributes:
        scores, mass: fp32 [B', S', T]; nothing flows back into the mass.
        visible: bool [S', T].
    """

    scores: Tensor
    mass: Tensor
    visible: Tensor


@dataclass(frozen=True, kw_only=True)
class Tables:
    """What depends on the shape of a batch only.

    Attributes:
        sequences, tokens: B and S.
        main, compress: cos and sin of the rows, fp32 [R, P / 2], for layers without and with entries.
    """

    sequences: int
    tokens: int
    main: tuple[Tensor, Tensor]
    compress: tuple[Tensor, Tensor]

    def rope(self, kind: LayerKind) -> tuple[Tensor, Tensor]:
        return self.compress if kind.ratio else self.main

    def visible(self, ratio: int) -> Tensor:
        """bool [S, T]: an entry is visible from its window's last token on."""
        device = self.main[0].device
        places = torch.arange(self.tokens, device=device)
        return torch.arange(self.tokens // ratio, device=device) < ((places + 1) // ratio)[:, None]

    def near(self, window: int, block: int) -> Tensor:
        """bool [S, 2 W]: keys of the block before and the own block that lie in the window of each token."""
        places = torch.arange(self.tokens, device=self.main[0].device)
        first = (places // block - 1) * block
        keys = first[:, None] + torch.arange(2 * block, device=places.device)
        return (keys >= 0) & (keys <= places[:, None]) & (keys > places[:, None] - window)


def spare_keys(real: int) -> int:
    """Keys added behind `real` ones, so that their number is a multiple of 16."""
    return 2 + -(real + 2) % 16


def spare_bias(like: Tensor, count: int, zero: Tensor | None) -> Tensor:
    """What is added to the logits of the spare keys, [..., count]: to the sink's nothing, to the zero key's `zero`
    [...], and minus infinity to those that are not there.
    """
    bias = like.new_full((*like.shape[:-1], count), float("-inf"))
    bias[..., _SINK] = 0
    if zero is not None:
        bias[..., _ZERO] = zero
    return bias
