"""Ops that move bytes, on shapes of Flash and Pro, beside the device copy of the same run."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benches.common import random_rope, relative_error
from benches.elementwise_cases import CompressCase, MixCase, compress_case, generator_of, mix_case, normal
from benches.measure import Case, unless_equal, worst
from trt_redknot.ops.cuda import elementwise
from trt_redknot.ops.cuda.elementwise import RowFormat
from trt_redknot.ops.reference import compress as compress_reference
from trt_redknot.ops.reference import hyper_connection, norms, projection
from trt_redknot.ops.reference.packing import latent_pitch, pack_pool_latents, pack_rows, row_bytes, unpack_rows

EPS = 1e-6
ITERATIONS = 20
BF16 = 2
TARGET = 0.75
SAMPLE = 512
# What bf16 roundings may add up to; mixes are fp32 sums of bf16 products.
ONE_ROUNDING, TWO_ROUNDINGS, MIX = 4e-3, 8e-3, 2e-4


def cases(device: torch.device | str = "cuda", scale: int = 1) -> Iterator[Case]:
    """Every byte-moving op but the experts'. `scale` divides the rows."""
    for rows, hidden in ((4096, 4096), (4096, 7168), (16384, 4096)):
        yield from _mix_cases(rows // scale, hidden, device)
    yield from _row_cases((1 << 17) // scale, device)
    for ratio, series in ((4, 2), (128, 1)):
        yield _compress_case((1 << 17) // scale, ratio, series, device)
    for packed in (False, True):
        yield _restore_case((1 << 16) // scale, packed, device)


def _sample(rows: int, device: torch.device | str) -> torch.Tensor:
    return torch.randperm(rows, device=device)[:SAMPLE]


def _mix_cases(rows: int, hidden: int, device: torch.device | str) -> Iterator[Case]:
    case = mix_case(rows, 4, hidden, seed=1, device=device)
    generator = generator_of(11, device)
    post = normal(generator, rows, 4, dtype=torch.float32)
    comb = normal(generator, rows, 4, 4, dtype=torch.float32)
    shape = f"{rows} x 4 x {hidden}"
    row_bytes_, mixes = rows * hidden * BF16, rows * 80

    def pre(case: MixCase = case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return elementwise.hyper_connection_pre(
            case.streams, case.fn, case.base, case.scale, case.norm, iterations=ITERATIONS, eps=EPS, norm_eps=EPS
        )

    def pre_error() -> float:
        picked = _sample(rows, device)
        wanted = hyper_connection.hyper_connection_pre(
            case.streams[picked].double(), case.fn.double(), case.base.double(), case.scale.double(),
            case.norm.double(), iterations=ITERATIONS, eps=EPS, norm_eps=EPS,
        )  # fmt: skip
        errors = [relative_error(found[picked], want) for found, want in zip(pre(), wanted, strict=True)]
        return worst(*zip(errors, (TWO_ROUNDINGS, MIX, MIX), strict=True))

    def after() -> torch.Tensor:
        return elementwise.hyper_connection_post(case.streams, case.output, post, comb)

    def after_error() -> float:
        picked = _sample(rows, device)
        wanted = hyper_connection.hyper_connection_post(
            case.streams[picked].double(), case.output[picked].double(), post[picked].double(), comb[picked].double()
        )
        return worst((relative_error(after()[picked], wanted), ONE_ROUNDING))

    moved = case.streams.nbytes + row_bytes_ + mixes
    yield Case(
        op="hyper_connection_pre", shape=shape, call=pre, error=pre_error, moved=moved + case.fn.nbytes, floor="copy",
        target=TARGET,
    )  # fmt: skip
    yield Case(
        op="hyper_connection_post", shape=shape, call=after, error=after_error, moved=moved + case.streams.nbytes,
        floor="copy", target=TARGET,
    )  # fmt: skip


def _row_cases(rows: int, device: torch.device | str) -> Iterator[Case]:
    width, generator = 512, generator_of(12, device)
    x, norm, rope = normal(generator, rows, width), normal(generator, width), random_rope(rows, 64).to(device)
    positions = torch.arange(rows, device=device)
    read = x.nbytes + rope.nbytes + positions.nbytes

    def pack(row_format: RowFormat) -> torch.Tensor:
        return elementwise.norm_rope_pack(x, norm, rope, positions, eps=EPS, row_format=row_format)

    def plain_error() -> float:
        picked = _sample(rows, device)
        wanted = norms.norm_rope_pack(
            x[picked].double(), norm.double(), rope.double(), positions[picked], eps=EPS
        )  # fmt: skip
        return worst((relative_error(pack(RowFormat.BF16)[picked], wanted), TWO_ROUNDINGS))

    def packed_error() -> float:
        return unless_equal(pack(RowFormat.PACKED_LATENT), pack_pool_latents(pack(RowFormat.BF16), 64))

    yield Case(
        op="norm_rope_pack bf16", shape=f"{rows} x {width}", call=lambda: pack(RowFormat.BF16), error=plain_error,
        moved=read + rows * width * BF16, floor="copy", target=TARGET,
    )  # fmt: skip
    yield Case(
        op="norm_rope_pack packed", shape=f"{rows} x {width}", call=lambda: pack(RowFormat.PACKED_LATENT),
        error=packed_error, moved=read + rows * latent_pitch(width, 64), floor="copy", target=TARGET,
    )  # fmt: skip
    heads = normal(generator, rows // 8, 8, width)

    def norm_error() -> float:
        picked = _sample(rows // 8, device)
        wanted = norms.query_norm(heads[picked].double(), eps=EPS)
        return worst((relative_error(elementwise.query_norm(heads, eps=EPS)[picked], wanted), ONE_ROUNDING))

    yield Case(
        op="query_norm", shape=f"{rows // 8} x 8 x {width}", call=lambda: elementwise.query_norm(heads, eps=EPS),
        error=norm_error, moved=2 * heads.nbytes, floor="copy", target=TARGET,
    )  # fmt: skip


def _compress_case(rows: int, ratio: int, series: int, device: torch.device | str) -> Case:
    width = 512
    case = compress_case(rows, ratio, series, width, seed=2, device=device, float_weights=True)
    rope = random_rope(rows, 64).to(device)
    entries = case.table.slots.shape[0]

    def call(row_format: RowFormat = RowFormat.PACKED_LATENT, case: CompressCase = case) -> torch.Tensor:
        return elementwise.compress(
            case.kv, case.gate, case.ape, case.norm, rope, case.table, eps=EPS, row_format=row_format
        )

    def error() -> float:
        wanted = compress_reference.compress(
            case.kv.double(), case.gate.double(), case.ape.double(), case.norm.double(), rope.double(), case.table,
            eps=EPS,
        )  # fmt: skip
        plain = call(RowFormat.BF16)
        return max(
            worst((relative_error(plain, wanted), TWO_ROUNDINGS)), unless_equal(call(), pack_pool_latents(plain, 64))
        )

    return Case(
        op=f"compress m = {ratio}", shape=f"{rows} x {series * width}", call=call, error=error,
        moved=case.kv.nbytes + case.gate.nbytes + case.table.slots.nbytes + entries * latent_pitch(width, 64),
        floor="copy", target=TARGET,
    )  # fmt: skip


def _restore_case(rows: int, packed: bool, device: torch.device | str) -> Case:
    channels, generator = 1024, generator_of(13, device)
    state, kept = normal(generator, rows, channels), normal(generator, rows // 8, channels)
    tile = normal(generator, rows - rows // 8, channels)
    restored = pack_rows(tile) if packed else tile

    def call() -> torch.Tensor:
        return elementwise.restore_replace(state, kept, restored)

    def error() -> float:
        plain = unpack_rows(restored, channels, torch.bfloat16) if packed else tile
        return unless_equal(call(), projection.restore_replace(state, kept, plain))

    size = tile.shape[0] * row_bytes(channels) if packed else tile.nbytes
    return Case(
        op=f"restore_replace {'fp8' if packed else 'bf16'}", shape=f"{rows} x {channels}", call=call, error=error,
        moved=2 * state.nbytes + kept.nbytes + size, floor="copy", target=TARGET,
    )  # fmt: skip
