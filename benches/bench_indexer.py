"""lightning_indexer, top-k included, beside the FP8 matrix product rate of the same machine."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benches.common import Layout, Row, make_table, median_ms, place, random_rope, table_to
from trt_redknot.ops.cuda.indexer import lightning_indexer
from trt_redknot.ops.reference.packing import pack_rows

ROWS = 4096
HEADS, DIM = 64, 128
CASES = ((16384, 512), (65536, 512), (65536, 1024))


def run(*, fp8_ceiling: float, seed: int = 0) -> Iterator[Row]:
    """One row a number of entries and top-k. `fp8_ceiling`: operations a second; 55 % is the target at 64K entries."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    for entries, top_k in CASES:
        layout = Layout(sequences=((4 * entries,),), ratio=4)
        table = table_to(
            make_table(layout, place(layout), [(0, torch.arange(4 * entries - ROWS, 4 * entries))]), "cuda"
        )
        q = torch.randn((ROWS, HEADS, DIM), generator=generator, device="cuda").bfloat16()
        weights = torch.randn((ROWS, HEADS), generator=generator, device="cuda").bfloat16()
        keys = pack_rows(torch.randn((entries, DIM), generator=generator, device="cuda"))
        rope = random_rope(4 * entries, 64).cuda()

        def call(q=q, weights=weights, keys=keys, table=table, rope=rope, top_k=top_k) -> torch.Tensor:  # type: ignore[no-untyped-def]
            return lightning_indexer(q, weights, keys, table, rope, top_k=top_k)

        operations = 2.0 * ROWS * HEADS * entries * DIM
        yield Row(
            name=f"indexer {entries} entries, top {top_k}",
            ms=median_ms(call),
            operations=operations,
            moved=float(entries * (DIM + 4) + ROWS * top_k * 8),
            peer_ms=operations / fp8_ceiling * 1e3,
            target=0.55 if entries == 65536 else None,
        )
