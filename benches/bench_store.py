"""How fast artifacts are verified, on one core: `python benches/bench_store.py`.

Rates are bytes over the processor time of this one thread, so that a busy machine changes them little, and over the
wall clock. The file is in the page cache: what a disk adds is the disk's.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from blake3 import blake3
from rich.table import Table

from trt_redknot.artifacts.certificate import CertifiedFile
from trt_redknot.artifacts.checks import VerifiedFiles, check_digest, nothing_between
from trt_redknot.artifacts.files import CHUNK_BYTES, Files, digest_open_file
from trt_redknot.cli.output import Output
from trt_redknot.digests import digest_file

_GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Median over the repeats, in GB (10^9 bytes) per second."""

    what: str
    core: float
    wall: float
    spread: float


def measure(what: str, size: int, repeats: int, work: Callable[[], object]) -> Rate:
    """`spread` is the distance of the slowest from the fastest repeat, in parts of the median."""
    work()
    core, wall = [], []
    for _ in range(repeats):
        before = (time.thread_time(), time.perf_counter())
        work()
        core.append(time.thread_time() - before[0])
        wall.append(time.perf_counter() - before[1])
    middle = statistics.median(core)
    return Rate(
        what=what,
        core=size / middle / _GB,
        wall=size / statistics.median(wall) / _GB,
        spread=(max(core) - min(core)) / middle,
    )


def hashes() -> dict[str, Callable[[bytes], object]]:
    """Hashes in memory. xxh3_128 only where the xxhash package is: nothing here depends on it."""
    found: dict[str, Callable[[bytes], object]] = {
        "BLAKE3 in memory": lambda data: blake3(data, max_threads=1).digest(),
        "SHA-256 in memory": lambda data: hashlib.sha256(data).digest(),
        "BLAKE2b in memory": lambda data: hashlib.blake2b(data).digest(),
        "CRC-32 in memory (no identity)": zlib.crc32,
    }
    try:
        xxhash = importlib.import_module("xxhash")
    except ImportError:
        return found
    found["XXH3-128 in memory (no identity)"] = lambda data: xxhash.xxh3_128_digest(data)
    return found


@click.command()
@click.option("--mib", default=512, show_default=True, help="Size of the file that is verified.")
@click.option("--repeats", default=5, show_default=True)
@click.option("--folder", type=click.Path(path_type=Path, exists=True), help="Where the file goes, for a moment.")
@click.option("--json", "as_json", is_flag=True)
def main(mib: int, repeats: int, folder: Path | None, as_json: bool) -> None:
    """Print the rate at which a store's files are verified by one core, and of other hashes."""
    size, files = mib << 20, Files()
    data = os.urandom(min(size, 64 << 20))
    with tempfile.NamedTemporaryFile(dir=folder) as target:
        for start in range(0, size, len(data)):
            target.write(data[: size - start])
        target.flush()
        fd, path = target.fileno(), Path(target.name)
        rates = [measure(name, len(data), repeats, lambda work=work: work(data)) for name, work in hashes().items()]
        reading = memoryview(bytearray(CHUNK_BYTES))
        rates += [
            measure("read only, as the store reads", size, repeats, lambda: _read(files, fd, reading)),
            measure("verify, as the store does", size, repeats, lambda: digest_open_file(files, fd, nothing_between)),
            measure("verify through a memory map", size, repeats, lambda: digest_file(path)),
        ]
        certified = CertifiedFile(path="x", size=size, digest=digest_file(path))
        verified = VerifiedFiles()
        check_digest(files, fd, certified, label="x", verified=verified)
        again = _microseconds(lambda: check_digest(files, fd, certified, label="x", verified=verified))
    if as_json:
        Output().json({"rates": [asdict(rate) for rate in rates], "remembered_us": again})
        return
    table = Table(title=f"{mib} MiB in the page cache, {repeats} repeats")
    for column in ("what", "GB/s of one core", "GB/s wall", "spread"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for rate in rates:
        table.add_row(rate.what, f"{rate.core:.2f}", f"{rate.wall:.2f}", f"{rate.spread:.0%}")
    Output().show(table, f"a file that is remembered as verified: {again:.1f} us, whatever its size")


def _read(files: Files, fd: int, buffer: memoryview) -> None:
    offset = 0
    while count := files.read_into(fd, buffer, offset):
        offset += count


def _microseconds(work: Callable[[], object], times: int = 1000) -> float:
    before = time.thread_time()
    for _ in range(times):
        work()
    return (time.thread_time() - before) / times * 1e6


if __name__ == "__main__":
    main()
