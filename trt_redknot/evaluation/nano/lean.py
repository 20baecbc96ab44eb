"""The whole network as a lean training forward over the parameters of transformers' own module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

import torch
import torch.nn.functional as F
from transformers.activations import ACT2FN

from trt_redknot.evaluation.nano.layers import RowFunctions, layer_forward
from trt_redknot.evaluation.nano.mixing import rms_norm
from trt_redknot.evaluation.nano.sizes import Choices, LayerKind, Selection, Sizes, Tables, Tensor

_CSA = "compressed_sparse_attention"
_BLOCK = 64
_NONE = slice(0, 0)


@dataclass(frozen=True, kw_only=True)
class Forward:
    """What a forward returns: logits fp32 [B, S, V], streams after the layers asked for, Indexer selections."""

    logits: Tensor
    streams: dict[int, Tensor]
    selections: dict[int, Selection]


@dataclass(frozen=True, kw_only=True)
class Hint:
    """What rows are told behind a layer: `added` [B, S, N * M], zero or of unit rms, in units of the row's own rms.

    The streams that `keep` returns are those before.
    """

    layer: int
    added: Tensor


def _hinted(streams: Tensor, added: Tensor) -> Tensor:
    """streams [R, N, M] with what is added [B, S, N * M]."""
    scale = streams.detach().square().mean((1, 2), keepdim=True).sqrt()
    hinted: Tensor = streams + scale * added.flatten(0, 1).unflatten(1, streams.shape[1:])
    return hinted


def block_of(window: int) -> int:
    """Queries that attend together: whole windows, and about so many that their keys are shared by enough of them."""
    return window * max(1, _BLOCK // window)


class LeanNetwork:
    """Runs `model` (a DeepseekV4ForCausalLM) by :func:`layer_forward`. Holds no parameters of its own.

    Args:
        silent: layers whose entries are zero: nothing is compressed there.
        compiled: compile what works row by row.
    """

    def __init__(self, model: Any, *, silent: Sequence[int] = (), compiled: bool = False) -> None:
        config = model.config
        self.model = model
        self.sizes = Sizes(
            heads=config.num_attention_heads,
            head_dim=config.head_dim,
            rope_dim=int(config.head_dim * config.partial_rotary_factor),
            groups=config.o_groups,
            window=config.sliding_window,
            block=block_of(config.sliding_window),
            index_heads=config.index_n_heads,
            index_dim=config.index_head_dim,
            index_topk=config.index_topk,
            experts=config.n_routed_experts,
            experts_per_token=config.num_experts_per_tok,
            routed_scale=config.routed_scaling_factor,
            swiglu_limit=config.swiglu_limit,
            streams=config.hc_mult,
            sinkhorn=config.hc_sinkhorn_iters,
            hc_eps=config.hc_eps,
            norm_eps=config.rms_norm_eps,
            scoring=ACT2FN[config.scoring_func],
        )
        reading = [layer for layer, kind in enumerate(config.layer_types) if kind == _CSA and layer not in silent]
        self.kinds = [
            LayerKind(
                ratio=config.compress_rates.get(attention, 0),
                indexer=attention == _CSA,
                hashed=mlp == "hash_moe",
                silent=layer in silent,
                first=layer in reading[:1],
            )
            for layer, (attention, mlp) in enumerate(zip(config.layer_types, config.mlp_layer_types, strict=True))
        ]
        self._multiple = lcm(self.sizes.block, *(ratio for ratio in config.compress_rates.values()))
        self._rows = RowFunctions.compiled() if compiled else RowFunctions()
        self._parameters = [
            dict(layer.named_parameters()) | dict(layer.named_buffers()) for layer in model.model.layers
        ]
        self._tables: dict[tuple[int, int, torch.device], Tables] = {}

    def __call__(
        self, tokens: Tensor, *, dense: int = 0, muted: int = 0, late: int = 0, fine: slice = _NONE,
        watched: Tensor | None = None, keep: Sequence[int] = (), hint: Hint | None = None,
    ) -> Forward:  # fmt: skip
        """Forward of tokens [B, S].

        Args:
            dense: so many sequences, the first ones, attend to every entry in CSA layers; the others to the Indexer's
                choice.
            muted: so many sequences, the last ones, see no entries in CSA layers.
            late: so many sequences, the first ones, see none in the first CSA layer that has entries.
            fine: these sequences see no entries in HCA layers.
            watched: int64, places in every block of queries at which the Indexers of dense sequences are compared with
                the attention; left out: all.
            keep: layers whose output streams are returned.
            hint: what is added behind a layer.
        """
        length = tokens.shape[1]
        tokens = F.pad(tokens, (0, -length % self._multiple))
        device = tokens.device
        if watched is None:
            watched = torch.arange(self.sizes.block, device=device)
        choices = Choices(dense=dense, muted=muted, late=late, fine=fine, watched=watched)
        tables = self._shape(tokens.shape[0], tokens.shape[1], device)
        dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else torch.float32
        body = self.model.model
        streams = body.embed_tokens(tokens.flatten()).unsqueeze(1).expand(-1, self.sizes.streams, -1).contiguous()
        kept, selections = {}, {}
        for layer, kind in enumerate(self.kinds):
            streams, selection = layer_forward(
                streams, tokens, self._parameters[layer], kind, tables, choices, self.sizes, self._rows, dtype
            )
            if layer in keep:
                kept[layer] = streams.unflatten(0, tokens.shape)[:, :length]
            if hint is not None and layer == hint.layer:
                streams = _hinted(streams, F.pad(hint.added, (0, 0, 0, -length % self._multiple)))
            if selection is not None:
                selections[layer] = selection
        logits = self._head(streams).unflatten(0, tokens.shape)[:, :length]
        return Forward(logits=logits, streams=kept, selections=selections)

    def _head(self, streams: Tensor) -> Tensor:
        head, sizes = self.model.model.hc_head, self.sizes
        with torch.autocast(streams.device.type, enabled=False):
            flat = rms_norm(streams.flatten(1).float(), None, sizes.norm_eps)
            pre = torch.sigmoid(F.linear(flat, head.hc_fn) * head.hc_scale + head.hc_base) + sizes.hc_eps
            hidden = rms_norm((pre.unsqueeze(-1) * streams).sum(1), self.model.model.norm.weight, sizes.norm_eps)
        logits: Tensor = F.linear(hidden, self.model.lm_head.weight).float()
        return logits

    def _shape(self, sequences: int, length: int, device: torch.device) -> Tables:
        key = (sequences, length, device)
        if key not in self._tables:
            self._tables[key] = Tables(
                sequences=sequences, tokens=length, main=self._rope("main", sequences, length, device),
                compress=self._rope("compress", sequences, length, device),
            )  # fmt: skip
        return self._tables[key]

    def _rope(self, label: str, sequences: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin [R, P / 2] of transformers' own tables."""
        places = torch.arange(length, device=device)[None]
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            like = torch.empty(0, device=device)
            cos, sin = self.model.model.rotary_emb(like, position_ids=places, layer_type=label)
        return cos[0].repeat(sequences, 1), sin[0].repeat(sequences, 1)
