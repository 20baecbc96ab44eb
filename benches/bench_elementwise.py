"""Byte-moving ops against the copy bandwidth of the same run: `python -m benches.bench_elementwise [--json FILE]`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benches.common import median_ms, random_rope
from benches.elementwise_cases import compress_case, expert_case, generator_of, mix_case, normal
from trt_redknot.ops.cuda import elementwise, moe
from trt_redknot.ops.cuda.elementwise import RowFormat
from trt_redknot.ops.experts import quantise_experts
from trt_redknot.ops.reference.packing import latent_row_bytes, pack_rows, row_bytes

EPS = 1e-6
BF16 = 2


@dataclass(frozen=True, kw_only=True)
class Line:
    """One measured op. `bytes_moved`: each input read once, each output written once."""

    op: str
    shape: str
    bytes_moved: int
    ms: float
    of_copy: float


def copy_bandwidth() -> float:
    """Bytes a second of a large device copy, read and written bytes both counted."""
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / (median_ms(lambda: target.copy_(source)) * 1e-3)


def captured(call: Callable[[], object]) -> Callable[[], None]:
    """A graph of one call: its replays take no host time."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def elementwise_lines(bandwidth: float, device: str = "cuda") -> Iterator[Line]:
    """Every byte-moving op on shapes of Flash and Pro, larger than the L2 cache."""

    def line(op: str, shape: str, bytes_moved: int, call: Callable[[], object]) -> Line:
        ms = median_ms(captured(call))
        return Line(op=op, shape=shape, bytes_moved=bytes_moved, ms=ms, of_copy=bytes_moved / (ms * 1e-3) / bandwidth)

    generator = generator_of(11, device)
    for rows, hidden in ((4096, 4096), (4096, 7168), (16384, 4096)):
        case = mix_case(rows, 4, hidden, seed=1, device=device)
        stream_bytes, row_bytes_ = case.streams.nbytes, rows * hidden * BF16
        yield line(
            "hyper_connection_pre", f"{rows} x 4 x {hidden}", stream_bytes + row_bytes_ + rows * 80 + case.fn.nbytes,
            lambda case=case: elementwise.hyper_connection_pre(
                case.streams, case.fn, case.base, case.scale, case.norm, iterations=20, eps=EPS, norm_eps=EPS
            ),
        )  # fmt: skip
        post = normal(generator, rows, 4, dtype=torch.float32)
        comb = normal(generator, rows, 4, 4, dtype=torch.float32)
        yield line(
            "hyper_connection_post", f"{rows} x 4 x {hidden}", 2 * stream_bytes + row_bytes_ + rows * 80,
            lambda case=case, post=post, comb=comb: elementwise.hyper_connection_post(
                case.streams, case.output, post, comb
            ),
        )  # fmt: skip
        del case
    yield from _row_lines(line, generator, device)
    yield from _expert_lines(line, device)


def _row_lines(line: Callable[..., Line], generator: torch.Generator, device: str) -> Iterator[Line]:
    rows, width = 1 << 17, 512
    x, norm, rope = normal(generator, rows, width), normal(generator, width), random_rope(rows, 64).to(device)
    positions = torch.arange(rows, device=device)
    read = x.nbytes + rope.nbytes + positions.nbytes
    for row_format, size in ((RowFormat.BF16, 1024), (RowFormat.PACKED_LATENT, latent_row_bytes(width, 64))):
        yield line(
            f"norm_rope_pack {row_format.name.lower()}", f"{rows} x {width}", read + rows * size,
            lambda f=row_format: elementwise.norm_rope_pack(x, norm, rope, positions, eps=EPS, row_format=f),
        )  # fmt: skip
    heads = normal(generator, 1 << 14, 8, width)
    yield line(
        "query_norm", f"{1 << 14} x 8 x {width}", 2 * heads.nbytes, lambda: elementwise.query_norm(heads, eps=EPS)
    )
    for ratio, series in ((4, 2), (128, 1)):
        case = compress_case(rows, ratio, series, width, seed=2, device=device, float_weights=True)
        entries = case.table.slots.shape[0]
        yield line(
            f"compress m = {ratio}", f"{rows} x {series * width}",
            case.kv.nbytes + case.gate.nbytes + case.table.slots.nbytes + entries * latent_row_bytes(width, 64),
            lambda case=case: elementwise.compress(
                case.kv, case.gate, case.ape, case.norm, rope, case.table, eps=EPS, row_format=RowFormat.PACKED_LATENT
            ),
        )  # fmt: skip
    states, channels = 1 << 16, 1024
    state, kept = normal(generator, states, channels), normal(generator, states // 8, channels)
    tile = normal(generator, states - states // 8, channels)
    for packed in (False, True):
        restored = pack_rows(tile) if packed else tile
        size = tile.shape[0] * row_bytes(channels) if packed else tile.nbytes
        yield line(
            f"restore_replace {'fp8' if packed else 'bf16'}", f"{states} x {channels}",
            2 * state.nbytes + kept.nbytes + size,
            lambda restored=restored: elementwise.restore_replace(state, kept, restored),
        )  # fmt: skip


def _expert_lines(line: Callable[..., Line], device: str) -> Iterator[Line]:
    """One rank of eight: 32 of 256 experts of Flash."""
    for rows in (16384, 65536):
        case = expert_case(
            rows, 4096, 2048, total=256, held=32, first=64, top_k=6, dropped=0.2, seed=3, device=device
        )  # fmt: skip
        permuted, inverse, ends = moe.permute(case.x, case.ids, first=64, experts=32)
        routed = int(ends[-1])
        touched = int((inverse >= 0).any(1).sum())
        hidden = permuted.new_empty((permuted.shape[0], 4096)).normal_()
        yield line(
            "moe_permute", f"{rows} rows, {routed} routed", (routed + touched) * 4096 * BF16 + 2 * case.ids.nbytes,
            lambda case=case: moe.permute(case.x, case.ids, first=64, experts=32),
        )  # fmt: skip
        yield line(
            "moe_activation", f"{routed} x {2 * 2048}", routed * 3 * 2048 * BF16,
            lambda hidden=hidden, ends=ends: moe.activate(hidden, ends, limit=10.0),
        )  # fmt: skip
        yield line(
            "moe_combine", f"{routed} routed to {rows}", (routed + rows) * 4096 * BF16 + 3 * inverse.nbytes,
            lambda hidden=hidden, inverse=inverse, case=case: moe.combine(hidden, inverse, case.weights),
        )  # fmt: skip
        del permuted, hidden, case
    logits, bias = torch.randn((1 << 17, 256), device=device), torch.randn(256, device=device)
    ids = torch.empty((1 << 17, 6), dtype=torch.int64, device=device)
    weights = torch.empty((1 << 17, 6), device=device)
    yield line(
        "moe_route_learned", f"{1 << 17} x 256", logits.nbytes + ids.nbytes + weights.nbytes,
        lambda: elementwise.call_op("moe_route_learned", ids, weights, logits, bias, 1.5, 0.85, 0),
    )  # fmt: skip


def grouped_gemm_lines(device: str = "cuda") -> Iterator[str]:
    """The FP8 grouped GEMM (quantisation included) against a plain FP8 product of the same run."""
    a = torch.randn((8192, 4096), device=device).to(torch.float8_e4m3fn)
    b = torch.randn((4096, 4096), device=device).to(torch.float8_e4m3fn).t()
    one = torch.ones((), device=device)
    plain = median_ms(lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16))
    ceiling = 2 * 8192 * 4096 * 4096 / (plain * 1e-3)
    yield f"fp8 product 8192 x 4096 x 4096: {ceiling / 1e12:.0f} TFLOP/s"
    for depth, width in ((4096, 4096), (2048, 4096)):
        weight = quantise_experts(torch.randn((32, width, depth), device=device))
        for rows in (12288, 98304):
            ends = torch.arange(1, 33, device=device).int() * (rows // 32)
            x = torch.randn((rows, depth), device=device).bfloat16()
            call = captured(lambda x=x, ends=ends, w=weight: moe.grouped_gemm_fp8(x, ends, w.codes, w.scales))
            ms = median_ms(call)
            rate = 2 * rows * depth * width / (ms * 1e-3)
            yield (
                f"moe_grouped_gemm 32 experts, {rows} x {depth} x {width}: {ms * 1e3:.1f} us, "
                f"{rate / 1e12:.0f} TFLOP/s, {rate / ceiling:.1%} of the product"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the lines here too")
    arguments = parser.parse_args()
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, copy {bandwidth / 1e12:.2f} TB/s; medians of 20")
    lines = []
    for line in elementwise_lines(bandwidth):
        lines.append(line)
        print(f"{line.op:28} {line.shape:28} {line.ms * 1e3:9.1f} us {line.of_copy:7.1%} of copy", flush=True)
    for text in grouped_gemm_lines():
        print(text, flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"copy": bandwidth, "lines": [asdict(line) for line in lines]}, indent=1))


if __name__ == "__main__":
    main()
