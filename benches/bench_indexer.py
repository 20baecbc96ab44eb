"""lightning_indexer, top-k included, beside the FP8 matrix product rate of the same machine."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from benches.common import Layout, make_table, place, random_rope, table_to
from benches.measure import Case
from trt_redknot.ops.cuda.indexer import lightning_indexer
from trt_redknot.ops.reference.numerics import rotate
from trt_redknot.ops.reference.packing import pack_rows, unpack_rows

ROWS = 4096
HEADS, DIM = 64, 128
SHAPES = ((16384, 512), (65536, 512), (65536, 1024))
TARGET = 0.55
SAMPLE = 16  # rows that are compared with their fp64 scores
# Sums of the matrix units keep about 13 bits in fp8; in units of the spread of a row's scores.
SLACK = 8e-3


def cases(*, seed: int = 0, rows: int = ROWS) -> Iterator[Case]:
    """One a number of entries and top-k; the target holds at 64K entries."""
    for entries, top_k in SHAPES:
        yield _case(rows, entries, top_k, seed)


def _case(rows: int, entries: int, top_k: int, seed: int) -> Case:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    layout = Layout(sequences=((4 * entries,),), ratio=4)
    table = table_to(make_table(layout, place(layout), [(0, torch.arange(4 * entries - rows, 4 * entries))]), "cuda")
    q = torch.randn((rows, HEADS, DIM), generator=generator, device="cuda").bfloat16()
    weights = torch.randn((rows, HEADS), generator=generator, device="cuda").bfloat16()
    keys = pack_rows(torch.randn((entries, DIM), generator=generator, device="cuda"))
    rope = random_rope(4 * entries, 64).cuda()

    def call() -> torch.Tensor:
        return lightning_indexer(q, weights, keys, table, rope, top_k=top_k)

    def error() -> float:
        """What is chosen scores, in fp64, at least as much as what is not, up to the rounding of sums."""
        picked = torch.randperm(rows, device="cuda")[:SAMPLE]
        found = call()[picked]
        turned = rotate(q[picked].float(), rope, table.positions[picked])
        turned = unpack_rows(pack_rows(turned.flatten(0, 1)), DIM, torch.float64).view(turned.shape)
        products = torch.relu(turned @ unpack_rows(keys, DIM, torch.float64).T)
        scores = (products * weights[picked].double().unsqueeze(-1)).sum(1) / (HEADS * DIM) ** 0.5
        hidden = torch.arange(entries, device="cuda") >= table.visible[picked].unsqueeze(1)
        spread = scores.std(1)
        scores = scores.masked_fill(hidden, -torch.inf)
        distinct = bool((found.sort(1).values.diff(dim=1) > 0).all())
        if not (distinct and bool(((found >= 0) & (found < entries)).all())):
            return math.inf
        least = scores.gather(1, found).amin(1)
        most = scores.scatter(1, found, -torch.inf).amax(1)
        return float(((most - least) / (SLACK * spread)).clamp(min=0).max())

    return Case(
        op="indexer",
        shape=f"{rows} x {entries} entries, top {top_k}",
        call=call,
        error=error,
        operations=2.0 * rows * HEADS * entries * DIM,
        moved=float(entries * (DIM + 4) + rows * top_k * 8),
        floor="fp8",
        target=TARGET if entries == 65536 else None,
    )
