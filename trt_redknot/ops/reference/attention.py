"""Attention of rows over a segment table: a frame a segment, one log-sum-exp merge, the sink counted once.

Latents are in the frame of their segment (its first token at position 0). A row at request position p meets segment i
rotated by p - D_i, and the segment's partial output is turned back by the same angle, so that partials of all segments
are in one frame and merge.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from trt_redknot.ops.reference.numerics import rotate, wide
from trt_redknot.ops.tables import ENTRY_COUNT, ENTRY_OFFSET, LATENT_OFFSET, START, STOP, AttentionTable

# Rows scored at a time: bounds the [rows, heads, keys] score tensor.
_ROW_BLOCK = 256


@dataclass(frozen=True, kw_only=True)
class Partial:
    """Attention of some rows over some keys, before it is normalised.

    Attributes:
        peak: [R, H] largest score, -inf where a row sees none of the keys.
        total: [R, H] sum of exp(score - peak).
        output: [R, H, D] sum of exp(score - peak) * value.
    """

    peak: torch.Tensor
    total: torch.Tensor
    output: torch.Tensor


def partial_attention(q_RHD: torch.Tensor, keys_KD: torch.Tensor, seen_RK: torch.Tensor) -> Partial:
    """Unnormalised attention of rows over keys (which are also the values); `seen_RK` says which a row may see."""
    dtype = wide(q_RHD.dtype)
    keys = keys_KD.to(dtype)
    scores = torch.matmul(q_RHD.to(dtype), keys.T) * q_RHD.shape[-1] ** -0.5
    scores = scores.masked_fill(~seen_RK.unsqueeze(1), float("-inf"))
    peak = scores.amax(-1)
    weights = torch.exp(scores - torch.where(peak.isinf(), 0.0, peak).unsqueeze(-1))
    return Partial(peak=peak, total=weights.sum(-1), output=torch.matmul(weights, keys))


def merge_partials(first: Partial, second: Partial) -> Partial:
    """The partial over the keys of both."""
    peak = torch.maximum(first.peak, second.peak)
    safe = torch.where(peak.isinf(), 0.0, peak)
    a, b = torch.exp(first.peak - safe), torch.exp(second.peak - safe)
    return Partial(
        peak=peak,
        total=a * first.total + b * second.total,
        output=a.unsqueeze(-1) * first.output + b.unsqueeze(-1) * second.output,
    )


def finish(partial: Partial, sinks_H: torch.Tensor) -> torch.Tensor:
    """Normalise a merged partial; the sink enters the denominator here and nowhere else: [R, H, D]."""
    sinks = sinks_H.to(partial.peak.dtype)
    peak = torch.maximum(partial.peak, sinks)
    scale = torch.exp(partial.peak - peak)
    denominator = scale * partial.total + torch.exp(sinks - peak)
    return partial.output * (scale / denominator).unsqueeze(-1)


def same_sequence_blocks(table: AttentionTable, rows: int, limit: int) -> Iterator[tuple[slice, list[list[int]]]]:
    """Blocks of at most `limit` consecutive rows of one sequence, with the segments of that sequence."""
    spans = table.row_segments[:rows].tolist()
    start = 0
    while start < rows:
        stop = start + 1
        while stop < rows and stop - start < limit and spans[stop] == spans[start]:
            stop += 1
        yield slice(start, stop), table.segments[spans[start][0] : spans[start][1]].tolist()
        start = stop


def _window_keys(
    positions_R: torch.Tensor, segment: list[int], latents: torch.Tensor, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents of `segment` that some row has in its sliding window, and which row sees which."""
    low = max(segment[START], int(positions_R.min()) - window + 1)
    high = min(segment[STOP], int(positions_R.max()) + 1)
    keys_K = torch.arange(low, max(low, high), device=positions_R.device)
    distance = positions_R.unsqueeze(1) - keys_K.unsqueeze(0)
    seen_RK = (distance >= 0) & (distance < window)
    needed = seen_RK.any(0)
    return latents[keys_K[needed] - segment[START] + segment[LATENT_OFFSET]], seen_RK[:, needed]


def _entry_keys(
    visible_R: torch.Tensor,
    selected_Rk: torch.Tensor | None,
    segment: list[int],
    first_entry: int,
    entries: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Entries of `segment` that some row sees, and which row sees which."""
    offset = segment[ENTRY_OFFSET]
    count = min(segment[ENTRY_COUNT], max(0, int(visible_R.max()) - (offset - first_entry)))
    pool_rows = torch.arange(offset, offset + count, device=visible_R.device)
    if selected_Rk is None:
        return entries[pool_rows], (pool_rows - first_entry).unsqueeze(0) < visible_R.unsqueeze(1)
    local = selected_Rk - offset
    inside = (local >= 0) & (local < count) & (selected_Rk >= 0)
    chosen = torch.zeros((selected_Rk.shape[0], count + 1), dtype=torch.bool, device=visible_R.device)
    chosen.scatter_(1, torch.where(inside, local, count), True)
    chosen = chosen[:, :count] & ((pool_rows - first_entry).unsqueeze(0) < visible_R.unsqueeze(1))
    needed = chosen.any(0)
    return entries[pool_rows[needed]], chosen[:, needed]


def _attend(
    q_RHD: torch.Tensor,
    table: AttentionTable,
    latents: torch.Tensor,
    entries: torch.Tensor | None,
    selected: torch.Tensor | None,
    sinks_H: torch.Tensor,
    rope: torch.Tensor,
    window: int,
) -> torch.Tensor:
    output = torch.empty_like(q_RHD)
    if q_RHD.shape[1] == 0:
        return output
    for rows, segments in same_sequence_blocks(table, q_RHD.shape[0], _ROW_BLOCK):
        q, positions_R, visible_R = q_RHD[rows].to(wide(q_RHD.dtype)), table.positions[rows], table.visible[rows]
        merged: Partial | None = None
        for segment in segments:
            keys, seen = _window_keys(positions_R, segment, latents, window)
            if entries is not None:
                chosen = None if selected is None else selected[rows]
                more_keys, more_seen = _entry_keys(visible_R, chosen, segment, segments[0][ENTRY_OFFSET], entries)
                keys, seen = torch.cat((keys, more_keys)), torch.cat((seen, more_seen), dim=1)
            if keys.shape[0] == 0:
                continue
            # Rows before the segment see none of it; their frame position is clamped only to stay inside the table.
            frame_R = (positions_R - segment[START]).clamp(min=0)
            part = partial_attention(rotate(q, rope, frame_R), keys, seen)
            part = Partial(peak=part.peak, total=part.total, output=rotate(part.output, rope, frame_R, inverse=True))
            merged = part if merged is None else merge_partials(merged, part)
        assert merged is not None, "a row sees at least its own latent"
        output[rows] = finish(merged, sinks_H).to(output.dtype)
    return output


def seg_latent_attention(
    q_global: torch.Tensor,
    q_local: torch.Tensor,
    table: AttentionTable,
    latents: torch.Tensor,
    entries: torch.Tensor | None,
    selected: torch.Tensor | None,
    sinks_global: torch.Tensor,
    sinks_local: torch.Tensor,
    rope: torch.Tensor,
    *,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    # Rows that run all heads take Global and Local heads through one pass: they see the same keys.
    rows, heads = q_local.shape[0], q_global.shape[1]
    full, rest = slice(0, rows), slice(rows, None)
    both = _attend(
        torch.cat((q_global[full], q_local), dim=1), table.rows(full), latents, entries,
        None if selected is None else selected[full], torch.cat((sinks_global, sinks_local)), rope, window,
    )  # fmt: skip
    only_global = _attend(
        q_global[rest], table.rows(rest), latents, entries, None if selected is None else selected[rest], sinks_global,
        rope, window,
    )  # fmt: skip
    return torch.cat((both[:, :heads], only_global)), both[:, heads:]
