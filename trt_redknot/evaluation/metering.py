"""What every op of a pass cost, beside what it could not cost less: time against the ceilings of the same machine.

A metered backend counts, for each call, the bytes it must move and the arithmetic it must do, from shapes and tables
alone; a call's floor is the longer of the two at the measured ceilings. The sum of floors over the sum of times is how
near a pass is to its roofline. Metering costs time of its own (an event before and after each call), so a pass is
metered once, beside the passes that are timed.

Bytes are compulsory ones: every input and output once, in the dtype it has. Keys that each row chooses for itself
(CSA) count once a row, because no two rows need share them; keys all rows see (window, HCA) count once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from trt_redknot.collectives import Collectives
from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.ops.experts import QuantisedExperts
from trt_redknot.ops.tables import AttentionTable


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What the machine was measured to reach, per second.

    Attributes:
        copy: bytes read plus bytes written by a large device copy.
        bf16, fp8: floating point operations (a multiply-add is two) of a large dense product.
    """

    copy: float
    bf16: float
    fp8: float


@dataclass(kw_only=True)
class Work:
    """What a call must do. `bf16` and `fp8` are operations in that precision; counts that only the device knows are
    tensors until the pass is over."""

    bytes: int | torch.Tensor
    bf16: int | torch.Tensor = 0
    fp8: int | torch.Tensor = 0

    def floor_s(self, ceilings: Ceilings) -> float:
        arithmetic = int(self.bf16) / ceilings.bf16 + int(self.fp8) / ceilings.fp8
        return max(int(self.bytes) / ceilings.copy, arithmetic)


class Clock(Protocol):
    """Marks in the order of work, and seconds between two of them once all work is done."""

    def mark(self) -> Any: ...

    def seconds(self, start: Any, stop: Any) -> float: ...


class HostClock:
    """For work that is done when the call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, stop: float) -> float:
        return stop - start


class DeviceClock:
    """Events on the current CUDA stream."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, stop: torch.cuda.Event) -> float:
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3


@dataclass(frozen=True, kw_only=True)
class StageLine:
    """All calls of one op in a pass. Seconds are sums over its calls."""

    op: str
    calls: int
    seconds: float
    floor_s: float
    bytes: int
    operations: int

    @property
    def share_of_roofline(self) -> float:
        return self.floor_s / self.seconds if self.seconds else 0.0


@dataclass(kw_only=True)
class _Call:
    op: str
    work: Work
    start: Any
    stop: Any


@dataclass(kw_only=True)
class MeteredOps:
    """Ops of another backend, each call measured. It has every method that backend has.

    Attributes:
        ops: the backend that computes.
        clock: when a call begins and ends.
    """

    ops: Any
    geometry: ModelGeometry
    clock: Clock
    calls: list[_Call] = field(default_factory=list)

    def prepared(self, weights: Any, *, together: Sequence[str] = ()) -> Any:
        """No op of a pass: passed on, and not measured."""
        return self.ops.prepared(weights, together=together)

    def over(self, collectives: Collectives) -> MeteredOps:
        """The same ops between other ranks; what they cost is added to what these do."""
        return replace(self, ops=self.ops.over(collectives))

    def check(self) -> None:
        """No op of a pass: passed on, and not measured."""
        self.ops.check()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.ops, name)
        if not callable(method):
            return method
        count = _WORK.get(name, _move)

        def metered(*args: Any, **kwargs: Any) -> Any:
            start = self.clock.mark()
            result = method(*args, **kwargs)
            stop = self.clock.mark()
            work = count(self.geometry, args, kwargs, result)
            self.calls.append(_Call(op=name, work=work, start=start, stop=stop))
            return result

        return metered

    def lines(self, ceilings: Ceilings) -> list[StageLine]:
        """By op, longest first. Waits for the device."""
        lines = []
        for op in {call.op for call in self.calls}:
            calls = [call for call in self.calls if call.op == op]
            lines.append(
                StageLine(
                    op=op,
                    calls=len(calls),
                    seconds=sum(self.clock.seconds(call.start, call.stop) for call in calls),
                    floor_s=sum(call.work.floor_s(ceilings) for call in calls),
                    bytes=sum(int(call.work.bytes) for call in calls),
                    operations=sum(int(call.work.bf16) + int(call.work.fp8) for call in calls),
                )
            )
        return sorted(lines, key=lambda line: -line.seconds)


def share_of_roofline(lines: Iterable[StageLine]) -> float:
    """Sum of floors over sum of times. An op that is faster than its floor, because its bytes come from a cache, counts
    as one that reaches it: it makes up for no other."""
    lines = list(lines)
    seconds = sum(line.seconds for line in lines)
    return sum(min(line.floor_s, line.seconds) for line in lines) / seconds if seconds else 0.0


def measure_ceilings(device: torch.device, *, repeat: int = 20) -> Ceilings:
    """Best of `repeat` of a copy of 1 GiB, a bf16 product of 8192^3 and an e4m3 product of 8192 x 4096 x 4096.

    Raises:
        RuntimeError: the device has no e4m3 products (torch says so).
    """
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    large = torch.randn(8192, 8192, dtype=torch.bfloat16, device=device)
    codes = torch.randn(8192, 4096, device=device).to(torch.float8_e4m3fn)
    weight = torch.randn(4096, 4096, device=device).to(torch.float8_e4m3fn).t()
    one = torch.ones((), device=device)
    copy = _best(lambda: target.copy_(source), repeat)
    bf16 = _best(lambda: large @ large, repeat)
    fp8 = _best(lambda: torch._scaled_mm(codes, weight, scale_a=one, scale_b=one, out_dtype=torch.bfloat16), repeat)
    return Ceilings(copy=2 * source.nbytes / copy, bf16=2 * 8192**3 / bf16, fp8=2 * 8192 * 4096 * 4096 / fp8)


def _best(run: Callable[[], object], repeat: int) -> float:
    clock = DeviceClock()
    run()
    marks = []
    for _ in range(repeat):
        start = clock.mark()
        run()
        marks.append((start, clock.mark()))
    return min(clock.seconds(start, stop) for start, stop in marks)


_Args = Sequence[Any]
_Kwargs = dict[str, Any]
_Count = Callable[[ModelGeometry, _Args, _Kwargs, Any], Work]


def _tensors(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)
        elif isinstance(value, QuantisedExperts):
            yield from (value.codes, value.scales)


def _bytes(*values: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(values))


def _move(g: ModelGeometry, args: _Args, kwargs: _Kwargs, result: Any) -> Work:
    """An op that does little arithmetic: its tensors once."""
    return Work(bytes=_bytes(*args, result))


def _view(g: ModelGeometry, args: _Args, kwargs: _Kwargs, result: Any) -> Work:
    return Work(bytes=0)


def _write_rows(g: ModelGeometry, args: _Args, kwargs: _Kwargs, result: Any) -> Work:
    _, rows, values = args
    return Work(bytes=_bytes(rows) + 2 * _bytes(values))


def _turn_rows(g: ModelGeometry, args: _Args, kwargs: _Kwargs, result: Any) -> Work:
    rows, frames, _ = args
    return Work(bytes=_bytes(frames) + 2 * rows.shape[0] * g.rope_dim * rows.element_size())


def _embed(g: ModelGeometry, args: _Args, kwargs: _Kwargs, result: Any) -> Work:
    return Work(bytes=_bytes(args[0], result) + _bytes(result) // kwargs["streams"])


def _linear(g: ModelGeometry, args: _Args, kwargs: _Kwargs, result: Any) -> Work:
    x, weight = args
    return Work(bytes=_bytes(x, weight, result), bf16=2 * result.numel() * weight.shape[-1])


def _linears(g: ModelGeometry, args: _Args, kwargs: _Kwargs, result: Any) -> Work:
    x, weights = args
    return Work(bytes=_bytes(x, weights, result), bf16=2 * x.numel() * sum(weight.shape[0] for weight in weights))


def _gather(g: ModelGeometry, args: _Args, kwargs: _Kwargs, result: Any) -> Work:
    """Between ranks: what this rank writes. The links have a ceiling of their own, which is not in the table."""
    return Work(bytes=2 * _bytes(result))


def _reduce(g: ModelGeometry, args: _Args, kwargs: _Kwargs, result: Any) -> Work:
    """Between ranks, as above."""
    return Work(bytes=2 * _bytes(result))


def _attention(g: ModelGeometry, args: _Args, kwargs: _Kwargs, result: Any) -> Work:
    q_global, q_local, table, latents, entries, selected = args[:6]
    window = torch.clamp(table.positions + 1, max=kwargs["window"])
    row = latents.shape[1] * latents.element_size()
    chosen = torch.zeros_like(window)
    moved = _bytes(q_global, q_local, result) + row * min(len(latents), len(window) + kwargs["window"])
    if entries is not None and selected is None:
        chosen = table.visible
        moved = moved + _seen(table) * row
    elif selected is not None:
        chosen = torch.clamp(table.visible, max=selected.shape[1])
        # A row may have fewer; the difference is small where contexts are long, and the count needs no device.
        moved += selected.numel() * row + _bytes(selected)
    keys = window + chosen
    full = q_local.shape[0]
    operations = keys.sum() * q_global.shape[1] + keys[:full].sum() * q_local.shape[1]
    return Work(bytes=moved, bf16=4 * g.head_dim * operations)


def _indexer(g: ModelGeometry, args: _Args, kwargs: _Kwargs, result: Any) -> Work:
    query, weights, keys, table = args[:4]
    moved = _bytes(query, weights, result) + _seen(table) * keys.shape[1] * keys.element_size()
    return Work(bytes=moved, fp8=2 * query.shape[1] * query.shape[2] * table.visible.sum())


def _seen(table: AttentionTable) -> torch.Tensor | int:
    """Entries that some row sees: the last row's, where rows are of one sequence."""
    return table.visible.max() if len(table.visible) else 0


def _norm_rope_pack(g: ModelGeometry, args: _Args, kwargs: _Kwargs, result: Any) -> Work:
    latents, norm, rope, positions = args
    return Work(bytes=_bytes(latents, norm, positions, result) + len(positions) * _bytes(rope[:1]))


def _compress(g: ModelGeometry, args: _Args, kwargs: _Kwargs, result: Any) -> Work:
    kv, gate, ape, norm, rope, table = args
    return Work(bytes=_bytes(kv, gate, ape, norm, table.slots, result) + len(result) * _bytes(rope[:1]))


def _experts(g: ModelGeometry, args: _Args, kwargs: _Kwargs, result: Any) -> Work:
    x, ids, shares, gate_up, down = args
    count = gate_up.shape[0]
    place = torch.where((ids >= kwargs["first"]) & (ids < kwargs["first"] + count), ids - kwargs["first"], count)
    held = (place < count).sum()
    # Weights of experts that no row goes to need not be read.
    used = torch.zeros(count + 1, dtype=torch.int64, device=ids.device).scatter(0, place.flatten(), 1)[:count].sum()
    precision = "fp8" if isinstance(gate_up, QuantisedExperts) else "bf16"
    operations = 2 * held * (gate_up.shape[1] * gate_up.shape[2] + down.shape[1] * down.shape[2])
    moved = _bytes(x, ids, shares, result) + used * (_bytes(gate_up, down) // count)
    return Work(bytes=moved, **{precision: operations})


def _shared_expert(g: ModelGeometry, args: _Args, kwargs: _Kwargs, result: Any) -> Work:
    x, gate, up, down = args
    weights = gate.numel() + up.numel() + down.numel()
    return Work(bytes=_bytes(x, gate, up, down, result), bf16=2 * x.shape[0] * weights)


def _router(g: ModelGeometry, args: _Args, kwargs: _Kwargs, result: Any) -> Work:
    x, weight = args[:2]
    return Work(bytes=_bytes(x, weight, result), bf16=2 * x.shape[0] * weight.numel())


def _streams(g: ModelGeometry, args: _Args, kwargs: _Kwargs, result: Any) -> Work:
    """The projection of the flattened streams is a small product, in fp32 in the reference and in tensor cores here."""
    streams, fn = args[:2]
    return Work(bytes=_bytes(*args, result), bf16=2 * streams.shape[0] * fn.numel())


_WORK: dict[str, _Count] = {
    "embed": _embed,
    "linear": _linear,
    "linears": _linears,
    "grouped_linear": _linear,
    "split_heads": _view,
    "first_rows": _view,
    "hyper_connection_pre": _streams,
    "hyper_head": _streams,
    "norm_rope_pack": _norm_rope_pack,
    "compress": _compress,
    "turn_rows": _turn_rows,
    "write_rows": _write_rows,
    "lightning_indexer": _indexer,
    "index_salience": _indexer,
    "seg_latent_attention": _attention,
    "route_learned": _router,
    "route_hash": _router,
    "experts": _experts,
    "shared_expert": _shared_expert,
    "all_gather": _gather,
    "reduce_scatter": _reduce,
}
