"""One table of every measured kernel: `python -m benches.bench_kernels [--json FILE]`, on an idle GPU.

Times are medians between device events. `ratio` is the peer's time over ours. The peer of attention is FlashMLA, where
it is installed; that of the indexer is the FP8 matrix product rate measured in the same run. `TFLOP/s` and `GB/s` count
what the op has to do, not what it does.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benches import bench_attention, bench_indexer
from benches.common import Ceilings, Row, measure_ceilings


def table_of(rows: list[Row], ceilings: Ceilings) -> Table:
    table = Table(title=f"{torch.cuda.get_device_name()}: {ceilings.text()}")
    for column in ("kernel", "ms", "TFLOP/s", "GB/s", "peer ms", "ratio", "target", ""):
        table.add_column(column, justify="left" if column == "kernel" else "right")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.ms:.3f}",
            f"{row.operations / row.ms / 1e9:.0f}",
            f"{row.moved / row.ms / 1e6:.0f}",
            "-" if row.peer_ms is None else f"{row.peer_ms:.3f}",
            "-" if row.ratio is None else f"{row.ratio:.2f}",
            "-" if row.target is None else f"{row.target:.2f}",
            {True: "met", False: "MISSED", None: ""}[row.met],
        )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            "error: no CUDA GPU was found. Run this on the machine whose kernels are to be measured.", file=sys.stderr
        )
        return 2
    ceilings = measure_ceilings()
    rows = [
        *bench_attention.run(packed=True),
        *bench_attention.run(packed=False),
        *bench_indexer.run(fp8_ceiling=ceilings.fp8_operations),
    ]
    Console(width=140).print(table_of(rows, ceilings))
    if arguments.json is not None:
        document = {"ceilings": asdict(ceilings), "rows": [asdict(row) | {"ratio": row.ratio} for row in rows]}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
