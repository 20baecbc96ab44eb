"""How ops are checked and timed, and the table of the results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from rich.table import Table

Call = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What this GPU does at best, measured: bytes (read plus written) and operations a second."""

    copy_bytes: float
    bf16_operations: float
    fp8_operations: float

    def text(self) -> str:
        return (
            f"copy {self.copy_bytes / 1e12:.2f} TB/s, bf16 {self.bf16_operations / 1e12:.0f} TFLOP/s, "
            f"fp8 {self.fp8_operations / 1e12:.0f} TFLOP/s"
        )


@dataclass(frozen=True, kw_only=True)
class Peer:
    """What a user without our kernel would call."""

    name: str
    call: Call


@dataclass(frozen=True, kw_only=True)
class Case:
    """One op on one shape.

    Attributes:
        call: the op; it allocates its outputs.
        error: runs the op and gives its distance from its reference in units of what is allowed: right is at most 1.
        operations, moved: floating-point operations and bytes of device memory (each input read once, each output
            written once) that the op has to do at least.
        floor: the ceiling that the time is compared with; None: the first peer is.
        target: least ratio of the other time to ours; None: reported only.
        graph: time replays of a CUDA graph, which take no host time.
    """

    op: str
    shape: str
    call: Call
    error: Callable[[], float]
    operations: float = 0.0
    moved: float = 0.0
    floor: Literal["copy", "fp8"] | None = None
    peers: tuple[Peer, ...] = ()
    target: float | None = None
    graph: bool = True


@dataclass(frozen=True, kw_only=True)
class Line:
    """A case after its measurement; `ms` is None where the result was wrong, and then nothing was timed.

    Attributes:
        copy_ms: of ops held to the copy rate, a copy of torch that moves as many bytes, timed in the same way: a small
            copy does not reach that rate either.
        peers: milliseconds of each.
    """

    op: str
    shape: str
    error: float
    ms: float | None
    operations: float
    moved: float
    floor: str | None
    floor_ms: float | None
    copy_ms: float | None
    peers: dict[str, float]
    target: float | None

    @property
    def ratio(self) -> float | None:
        other = next(iter(self.peers.values()), None) if self.floor is None else self.floor_ms
        return None if self.ms is None or other is None else other / self.ms

    @property
    def copy_ratio(self) -> float | None:
        """Time of a copy of the same bytes over ours; no part of the verdict."""
        return None if self.ms is None or self.copy_ms is None else self.copy_ms / self.ms

    @property
    def verdict(self) -> str:
        if not self.error <= 1:
            return "WRONG"
        if self.target is None:
            return ""
        if self.ratio is None:
            return "no peer"
        return "met" if self.ratio >= self.target else "MISSED"


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """torch fills fresh memory, outputs and workspaces alike, with NaN: what an op leaves unwritten shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def median_ms(call: Call, *, repeats: int = 20, warmup: int = 3) -> float:
    """Median device time of one call in milliseconds, between events on the current stream."""
    for _ in range(warmup):
        call()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def captured(call: Call) -> Call:
    """A graph of one call: its replays take no host time."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def copy_bandwidth(size: int = 2**32) -> float:
    """Bytes a second of a large device copy, read and written bytes both counted."""
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2e3 * size / median_ms(lambda: target.copy_(source), repeats=10)


def copy_ms(moved: float) -> float:
    """Milliseconds of a copy that reads and writes `moved` bytes in all, as ops are timed."""
    source = torch.zeros(int(moved) // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return median_ms(captured(lambda: target.copy_(source)))


def measure_ceilings() -> Ceilings:
    """A large device copy, and matrix products on random data; of two shapes the faster."""
    copy = copy_bandwidth()
    one = torch.ones((), device="cuda")
    bf16 = fp8 = 0.0
    for m, n, k in ((8192, 4096, 4096), (8192, 8192, 8192)):
        a, b = torch.randn((m, k), device="cuda"), torch.randn((n, k), device="cuda")
        x, y = a.bfloat16(), b.bfloat16().T
        bf16 = max(bf16, 2e3 * m * n * k / median_ms(lambda x=x, y=y: x @ y))  # type: ignore[misc]
        u, v = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).T
        product = lambda u=u, v=v: torch._scaled_mm(  # noqa: E731
            u, v, one, one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
        fp8 = max(fp8, 2e3 * m * n * k / median_ms(product))
    return Ceilings(copy_bytes=copy, bf16_operations=bf16, fp8_operations=fp8)


def measure(case: Case, ceilings: Ceilings) -> Line:
    """Checks the op, then times it and what it is compared with."""
    with poisoned_memory():
        error = case.error()
    right = error <= 1
    floor_ms = None
    if case.floor == "copy":
        floor_ms = case.moved / ceilings.copy_bytes * 1e3
    elif case.floor == "fp8":
        floor_ms = case.operations / ceilings.fp8_operations * 1e3
    return Line(
        op=case.op,
        shape=case.shape,
        error=error,
        ms=median_ms(captured(case.call) if case.graph else case.call) if right else None,
        operations=case.operations,
        moved=case.moved,
        floor=case.floor,
        floor_ms=floor_ms,
        copy_ms=copy_ms(case.moved) if right and case.floor == "copy" else None,
        peers={peer.name: median_ms(peer.call) for peer in case.peers if right},
        target=case.target,
    )


def worst(*pairs: tuple[float, float]) -> float:
    """The largest of errors, each over what is allowed; NaN counts as infinity."""
    shares = [error / allowed for error, allowed in pairs]
    return max(share if math.isfinite(share) else math.inf for share in shares)


def unless_equal(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """0 where all elements are the same, else infinity."""
    return 0.0 if torch.equal(found, wanted) else math.inf


def document(lines: Sequence[Line], ceilings: Ceilings) -> dict[str, object]:
    """What --json writes."""
    rows = [
        asdict(line)
        | {
            "error": _number(line.error),
            "ratio": line.ratio,
            "copy_ratio": line.copy_ratio,
            "verdict": line.verdict,
        }
        for line in lines
    ]
    return {"gpu": torch.cuda.get_device_name(), "ceilings": asdict(ceilings), "lines": rows}


def _number(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None


def table_of(lines: Sequence[Line], title: str) -> Table:
    table = Table(title=title)
    for column in (
        "op",
        "shape",
        "error",
        "us",
        "TFLOP/s",
        "GB/s",
        "against",
        "ratio",
        "target",
        "",
        "such copy",
        "peers",
    ):
        table.add_column(column, justify="left" if column in ("op", "shape", "peers") else "right")
    for line in lines:
        table.add_row(*cells(line))
    return table


def cells(line: Line) -> list[str]:
    """A line as text, in the order of the table's columns."""

    def rate(amount: float, unit: float) -> str:
        return "-" if line.ms is None or amount == 0 else f"{amount / (line.ms * 1e-3) / unit:.0f}"

    return [
        line.op,
        line.shape,
        f"{line.error:.2f}",
        "-" if line.ms is None else f"{line.ms * 1e3:.1f}",
        rate(line.operations, 1e12),
        rate(line.moved, 1e9),
        line.floor or next(iter(line.peers), "-"),
        "-" if line.ratio is None else f"{line.ratio:.3f}",
        "-" if line.target is None else f"{line.target:.2f}",
        line.verdict,
        "-" if line.copy_ratio is None else f"{line.copy_ratio:.3f}",
        ", ".join(f"{name} {ms * 1e3:.1f} us" for name, ms in line.peers.items()),
    ]
