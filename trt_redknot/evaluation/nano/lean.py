"""The whole network as a lean training forward over the parameters of transformers' own module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

import torch
import torch.nn.functional as F
from transformers.activations import ACT2FN

from trt_redknot.evaluation.nano.layers import Choices, LayerKind, Selection, Sizes, Tensor, layer_forward, rms_norm

_CSA, _HCA = "compressed_sparse_attention", "heavily_compressed_attention"


@dataclass(frozen=True, kw_only=True)
class Forward:
    """What a forward returns: logits fp32 [B, S, V], streams after the layers asked for, Indexer selections."""

    logits: Tensor
    streams: dict[int, Tensor]
    selections: dict[int, Selection]


class LeanNetwork:
    """Runs `model` (a DeepseekV4ForCausalLM) by :func:`layer_forward`. Holds no parameters of its own.

    Args:
        compiled: compile the layer function; layers of one kind and shape share one compilation.
    """

    def __init__(self, model: Any, *, compiled: bool = False) -> None:
        config = model.config
        self.model = model
        self.sizes = Sizes(
            heads=config.num_attention_heads,
            head_dim=config.head_dim,
            rope_dim=int(config.head_dim * config.partial_rotary_factor),
            groups=config.o_groups,
            window=config.sliding_window,
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
        self.kinds = [
            LayerKind(
                ratio=config.compress_rates.get(attention, 0),
                indexer=attention == _CSA,
                hashed=mlp == "hash_moe",
            )
            for attention, mlp in zip(config.layer_types, config.mlp_layer_types, strict=True)
        ]
        self._multiple = lcm(config.sliding_window, *(ratio for ratio in config.compress_rates.values()))
        self._run: Callable[..., Any] = torch.compile(layer_forward, dynamic=False) if compiled else layer_forward
        self._parameters = [
            dict(layer.named_parameters()) | dict(layer.named_buffers()) for layer in model.model.layers
        ]
        self._ropes: dict[tuple[str, int, torch.device], tuple[Tensor, Tensor]] = {}

    @property
    def indexed_layers(self) -> list[int]:
        return [layer for layer, kind in enumerate(self.kinds) if kind.indexer]

    def __call__(
        self, tokens: Tensor, *, sparse: Tensor | None = None, mute: Tensor | None = None, keep: Sequence[int] = (),
    ) -> Forward:  # fmt: skip
        """Forward of tokens [B, S].

        Args:
            sparse: bool [B]: sequences whose CSA layers attend to the Indexer's choice only; left out: all.
            mute: bool [B]: sequences whose CSA layers see no compressed entry; left out: none.
            keep: layers whose output streams are returned.
        """
        length = tokens.shape[1]
        tokens = F.pad(tokens, (0, -length % self._multiple))
        every = torch.ones(tokens.shape[0], dtype=torch.bool, device=tokens.device)
        choices = Choices(sparse=every if sparse is None else sparse, mute=~every if mute is None else mute)
        body = self.model.model
        streams = body.embed_tokens(tokens).unsqueeze(2).expand(-1, -1, self.sizes.streams, -1).contiguous()
        kept, selections = {}, {}
        for layer, kind in enumerate(self.kinds):
            rope = self._rope("compress" if kind.ratio else "main", tokens.shape[1], tokens.device)
            streams, selection = self._run(streams, tokens, self._parameters[layer], kind, rope, choices, self.sizes)
            if layer in keep:
                kept[layer] = streams[:, :length]
            if selection is not None:
                selections[layer] = selection
        return Forward(logits=self._head(streams)[:, :length], streams=kept, selections=selections)

    def _head(self, streams: Tensor) -> Tensor:
        head, sizes = self.model.model.hc_head, self.sizes
        with torch.autocast(streams.device.type, enabled=False):
            flat = rms_norm(streams.flatten(2).float(), None, sizes.norm_eps)
            pre = torch.sigmoid(F.linear(flat, head.hc_fn) * head.hc_scale + head.hc_base) + sizes.hc_eps
            hidden = rms_norm((pre.unsqueeze(-1) * streams).sum(2), self.model.model.norm.weight, sizes.norm_eps)
        logits: Tensor = F.linear(hidden, self.model.lm_head.weight).float()
        return logits

    def _rope(self, label: str, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin [S, P / 2] of transformers' own tables."""
        key = (label, length, device)
        if key not in self._ropes:
            places = torch.arange(length, device=device)[None]
            with torch.no_grad(), torch.autocast(device.type, enabled=False):
                like = torch.empty(0, device=device)
                cos, sin = self.model.model.rotary_emb(like, position_ids=places, layer_type=label)
            self._ropes[key] = (cos[0].clone(), sin[0].clone())
        return self._ropes[key]
