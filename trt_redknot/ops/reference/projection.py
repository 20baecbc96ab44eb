"""Projections: plain, grouped by output group, and the projected state's restoration."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight)


def linears(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tuple(F.linear(x, weight) for weight in weights)


def split_heads(x: torch.Tensor, *, dim: int) -> torch.Tensor:
    # Spelt out: with no rows, or no heads, a size of -1 would be ambiguous.
    return x.reshape(x.shape[0], x.shape[1] // dim, dim)


def first_rows(x: torch.Tensor, count: int) -> torch.Tensor:
    return x[:count]


def embed(tokens_R: torch.Tensor, table_VM: torch.Tensor, *, streams: int) -> torch.Tensor:
    return table_VM[tokens_R].unsqueeze(1).repeat(1, streams, 1)


def grouped_linear(heads: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    groups, _, width = weight.shape
    grouped = heads.reshape(heads.shape[0], groups, width).transpose(0, 1)
    return torch.bmm(grouped, weight.transpose(1, 2)).transpose(0, 1).flatten(1)


def restore_replace(global_RZ: torch.Tensor, local_R1Z: torch.Tensor, restored: torch.Tensor) -> torch.Tensor:
    return global_RZ + torch.cat((local_R1Z, restored.to(local_R1Z.dtype)))
