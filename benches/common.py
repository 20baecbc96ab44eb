"""Random inputs of the attention ops and the comparison of results, for tests and benches alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trt_redknot.ops.reference.numerics import rope_table
from trt_redknot.ops.reference.packing import pack_pool_latents, unpack_pool_latents
from trt_redknot.ops.tables import AttentionTable

HEAD_DIM = 512
ROPE_DIM = 64
WINDOW = 128


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Segments of one or more sequences.

    Attributes:
        sequences: tokens of every segment of every sequence.
        ratio: tokens a compressed entry pools; 0: no entries.
        gap: pool rows between segments (latents) and sequences (entries) that belong to nobody.
    """

    sequences: tuple[tuple[int, ...], ...]
    ratio: int
    gap: int = 0


@dataclass(frozen=True, kw_only=True)
class Pools:
    """Where a layout lies in the pools.

    Attributes:
        first_segment: index of every sequence's first segment, and one past the last.
        owned_latents, owned_entries: bool, pool rows that belong to a segment.
    """

    segments: torch.Tensor
    first_segment: tuple[int, ...]
    owned_latents: torch.Tensor
    owned_entries: torch.Tensor


def place(layout: Layout) -> Pools:
    """Segments one after the other, with gaps. Every segment pools its last, partial window, as documents do."""
    rows, first, latent, entry = [], [0], layout.gap, layout.gap
    latents: list[bool] = [False] * layout.gap
    entries: list[bool] = [False] * layout.gap
    for lengths in layout.sequences:
        start = 0
        for length in lengths:
            count = -(-length // layout.ratio) if layout.ratio else 0
            rows.append([start, start + length, latent, entry, count])
            start, latent, entry = start + length, latent + length + layout.gap, entry + count
            latents += [True] * length + [False] * layout.gap
            entries += [True] * count
        entry += layout.gap
        entries += [False] * layout.gap
        first.append(len(rows))
    return Pools(
        segments=torch.tensor(rows, dtype=torch.int64).reshape(-1, 5),
        first_segment=tuple(first),
        owned_latents=torch.tensor(latents, dtype=torch.bool),
        owned_entries=torch.tensor(entries, dtype=torch.bool),
    )


def make_table(layout: Layout, pools: Pools, rows: Sequence[tuple[int, torch.Tensor]]) -> AttentionTable:
    """The table of rows given as (sequence, positions int64), in this order."""
    spans, positions, visible = [], [], []
    for sequence, where in rows:
        span = (pools.first_segment[sequence], pools.first_segment[sequence + 1])
        seen = torch.zeros_like(where)
        for start, stop, _, _, count in pools.segments[span[0] : span[1]].tolist():
            if count:
                whole = ((where + 1 - start).clamp(min=0) // layout.ratio).clamp(max=(stop - start) // layout.ratio)
                seen += torch.where(where >= stop, count, whole)
        spans += [span] * len(where)
        positions.append(where)
        visible.append(seen)
    return AttentionTable(
        segments=pools.segments,
        row_segments=torch.tensor(spans, dtype=torch.int64).reshape(-1, 2),
        positions=torch.cat(positions),
        visible=torch.cat(visible),
    )


def table_to(table: AttentionTable, device: torch.device | str) -> AttentionTable:
    return AttentionTable(
        segments=table.segments.to(device),
        row_segments=table.row_segments.to(device),
        positions=table.positions.to(device),
        visible=table.visible.to(device),
    )


def random_rope(positions: int, dim: int, factor: float = 1.0) -> torch.Tensor:
    """A rope table like that of compressed layers: fp32 [positions, dim / 2, 2]."""
    frequencies = 1.6e5 ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    return rope_table(frequencies, positions, factor=factor, dtype=torch.float32)


def random_selection(
    table: AttentionTable, top_k: int, generator: torch.Generator, *, shortfall: float = 0.0
) -> torch.Tensor:
    """Distinct visible entries of every row in random order, -1 where there are too few; on the table's device."""
    rows, device = table.positions.shape[0], table.positions.device
    offsets = table.segments[table.row_segments[:, 0], 3]
    if rows and int(table.visible.min()) > 8 * top_k:
        # One draw from each of top_k equal slices of whole entries: distinct, and cheap for a large pool.
        width = (table.visible // top_k).unsqueeze(1)
        draw = torch.rand((rows, top_k), generator=generator, device=device, dtype=torch.float64)
        chosen = torch.arange(top_k, device=device) * width + (draw * width).long()
        order = torch.rand((rows, top_k), generator=generator, device=device).argsort(1)
        chosen = chosen.gather(1, order)
    else:
        pool = max(int(table.visible.max()) if rows else 0, top_k)
        keys = torch.rand((rows, pool), generator=generator, device=device)
        hidden = torch.arange(pool, device=device).unsqueeze(0) >= table.visible.unsqueeze(1)
        keys = keys.masked_fill(hidden, 2.0)
        best = keys.topk(top_k, dim=1, largest=False)
        chosen = torch.where(best.values < 1.5, best.indices, -1)
    dropped = torch.rand((rows, top_k), generator=generator, device=device) < shortfall
    return torch.where(dropped | (chosen < 0), -1, chosen + offsets.unsqueeze(1))


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """Arguments of one call of seg_latent_attention, and the pools as plain numbers for the reference."""

    q_global: torch.Tensor
    q_local: torch.Tensor
    table: AttentionTable
    latents: torch.Tensor
    entries: torch.Tensor | None
    selected: torch.Tensor | None
    sinks_global: torch.Tensor
    sinks_local: torch.Tensor
    rope: torch.Tensor
    latents_plain: torch.Tensor
    entries_plain: torch.Tensor | None


def attention_case(
    layout: Layout,
    rows: Sequence[tuple[int, torch.Tensor]],
    *,
    full_rows: int,
    heads: tuple[int, int],
    top_k: int | None,
    packed: bool,
    device: torch.device | str,
    seed: int,
    magnitude: float = 1.0,
    shortfall: float = 0.0,
    rope_factor: float = 1.0,
) -> AttentionCase:
    """Random inputs. Pool rows that no segment owns hold NaN, so that a stray read shows."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def pool(owned: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values = normal(owned.shape[0], HEAD_DIM) * magnitude
        # Blocks of different size, so that every scale matters.
        values *= torch.ldexp(torch.ones(8, device=device), torch.arange(8, device=device) % 3 - 1).repeat_interleave(
            64
        )
        values[~owned.to(device)] = float("nan")
        stored = pack_pool_latents(values, ROPE_DIM) if packed else values.bfloat16()
        return stored, unpack_pool_latents(stored, HEAD_DIM, ROPE_DIM, torch.float32) if packed else stored.float()

    pools = place(layout)
    table = table_to(make_table(layout, pools, rows), device)
    latents, latents_plain = pool(pools.owned_latents)
    entries, entries_plain = pool(pools.owned_entries) if layout.ratio else (None, None)
    selected = None
    if layout.ratio and top_k is not None:
        selected = random_selection(table, top_k, generator, shortfall=shortfall)
    count = table.positions.shape[0]
    longest = max(sum(lengths) for lengths in layout.sequences)
    return AttentionCase(
        q_global=normal(count, heads[0], HEAD_DIM).bfloat16(),
        q_local=normal(full_rows, heads[1], HEAD_DIM).bfloat16(),
        table=table,
        latents=latents,
        entries=entries,
        selected=selected,
        sinks_global=normal(heads[0]),
        sinks_local=normal(heads[1]),
        rope=random_rope(longest, ROPE_DIM, rope_factor).to(device),
        latents_plain=latents_plain,
        entries_plain=entries_plain,
    )


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """||found - wanted|| / ||wanted||; NaN anywhere gives infinity."""
    if found.numel() == 0:
        return 0.0
    difference = (found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30)
    return float(difference) if math.isfinite(float(difference)) else math.inf
