"""One table of every measured op: `python -m benches.bench_ops [--ops FAMILY ...] [--json FILE]`, on an idle GPU.

Every op is first compared with its reference, with poisoned outputs; `error` is in units of what is allowed, and what
is wrong is not timed. Times are medians between device events, of ops on buffers larger than the L2 cache. `ratio` is
the time of what stands under `against` over ours: the bytes that have to move at the copy rate of the same run (copy),
the operations at its FP8 product rate (fp8), or a peer, where it is installed. `such copy`: the time of a copy of torch
that moves the same bytes over ours; it does not decide whether a target is met. `TFLOP/s` and `GB/s` count what an op
has to do, not what it does.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from rich.console import Console

from benches import bench_attention, bench_bytes, bench_experts, bench_indexer
from benches.measure import Case, Line, cells, document, measure, measure_ceilings, table_of

FAMILIES: dict[str, Callable[[], Iterator[Case]]] = {
    "attention": bench_attention.cases,
    "indexer": bench_indexer.cases,
    "bytes": bench_bytes.cases,
    "moe": bench_experts.cases,
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="measure only these")
    parser.add_argument("--json", type=Path, help="also write the lines to this file")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print(
            "error: no CUDA GPU was found. Run this on the machine whose kernels are to be measured.", file=sys.stderr
        )
        return 2
    ceilings = measure_ceilings()
    lines: list[Line] = []
    for family in arguments.ops:
        for case in FAMILIES[family]():
            lines.append(measure(case, ceilings))
            # A run that is cut short leaves the lines it has.
            print("  ".join(cells(lines[-1])), file=sys.stderr, flush=True)
            del case
            torch.cuda.empty_cache()
    title = f"{torch.cuda.get_device_name()}: {ceilings.text()}"
    Console(width=180).print(table_of(lines, title))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(document(lines, ceilings), indent=1) + "\n")
    return int(any(line.verdict == "WRONG" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
