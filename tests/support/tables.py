"""Random segment tables for the op tests, and for kernels that are tested against the references."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from trt_redknot.ops.tables import AttentionTable


@dataclass(frozen=True, kw_only=True)
class Case:
    """A random batch: the table of its rows, and the pool sizes it needs. `ratio` 0 has no entries."""

    table: AttentionTable
    latents: int
    entries: int
    positions: int


def random_case(seed: int, *, rows: int, sequences: int, longest: int, ratio: int, window: int) -> Case:
    """Sequences of one to four segments at shuffled places of the pools, rows at random positions, sorted by
    sequence."""
    draw = random.Random(seed)
    lengths = [[draw.randint(1, longest) for _ in range(draw.randint(1, 4))] for _ in range(sequences)]
    records: list[list[int]] = []
    spans, latent_rows, entry_rows = [], 0, 0
    order = list(range(sequences))
    draw.shuffle(order)
    offsets = {}
    for sequence in order:
        gap = draw.randint(0, 5)
        counts = [-(-length // ratio) if ratio else 0 for length in lengths[sequence]]
        offsets[sequence] = (latent_rows + gap, entry_rows + gap, counts)
        latent_rows += gap + sum(lengths[sequence])
        entry_rows += gap + sum(counts)
    for sequence in range(sequences):
        latent, entry, counts = offsets[sequence]
        first, start = len(records), 0
        for length, count in zip(lengths[sequence], counts, strict=True):
            records.append([start, start + length, latent + start, entry, count])
            start, entry = start + length, entry + count
        spans.append((first, len(records)))
    owners = sorted(draw.randrange(sequences) for _ in range(rows))
    positions = [draw.randrange(sum(lengths[owner])) for owner in owners]
    visible = []
    for owner, position in zip(owners, positions, strict=True):
        total = 0
        for start, stop, _, _, count in records[spans[owner][0] : spans[owner][1]]:
            for window_index in range(count):
                last = min(start + (window_index + 1) * ratio, stop) - 1
                total += last <= position
        visible.append(total)
    table = AttentionTable(
        segments=torch.tensor(records, dtype=torch.int64).reshape(-1, 5),
        row_segments=torch.tensor([spans[owner] for owner in owners], dtype=torch.int64).reshape(-1, 2),
        positions=torch.tensor(positions, dtype=torch.int64),
        visible=torch.tensor(visible, dtype=torch.int64),
    )
    return Case(
        table=table, latents=max(1, latent_rows), entries=max(1, entry_rows), positions=4 * longest + window + 1
    )
