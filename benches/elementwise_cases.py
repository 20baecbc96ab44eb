"""Random inputs of the byte-moving ops, for tests and benches alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trt_redknot.ops.tables import CompressTable

Device = torch.device | str


def generator_of(seed: int, device: Device) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(seed)


def normal(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device=generator.device).to(dtype)


@dataclass(frozen=True, kw_only=True)
class MixCase:
    """Arguments of the hyper-connection ops: streams bf16 [R, S, M], weights of the block and of the head."""

    streams: torch.Tensor
    fn: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor
    head_fn: torch.Tensor
    head_base: torch.Tensor
    head_scale: torch.Tensor
    norm: torch.Tensor
    output: torch.Tensor


def mix_case(rows: int, streams: int, hidden: int, *, seed: int, device: Device) -> MixCase:
    generator = generator_of(seed, device)
    mixes, depth = (2 + streams) * streams, streams * hidden
    fp32 = torch.float32

    def weights(*shape: int) -> torch.Tensor:
        return normal(generator, *shape, dtype=fp32) * depth**-0.5 * 3

    return MixCase(
        streams=normal(generator, rows, streams, hidden),
        fn=weights(mixes, depth),
        base=normal(generator, mixes, dtype=fp32),
        scale=normal(generator, 3, dtype=fp32).abs() + 0.2,
        head_fn=weights(streams, depth),
        head_base=normal(generator, streams, dtype=fp32),
        head_scale=normal(generator, 1, dtype=fp32).abs() + 0.2,
        norm=normal(generator, hidden) + 1,
        output=normal(generator, rows, hidden),
    )


@dataclass(frozen=True, kw_only=True)
class CompressCase:
    """Arguments of `compress`. Raw rows that no slot names hold NaN, so that a stray read shows."""

    kv: torch.Tensor
    gate: torch.Tensor
    ape: torch.Tensor
    norm: torch.Tensor
    table: CompressTable


def compress_table(tokens: int, ratio: int, series: int) -> CompressTable:
    """Windows of one document of `tokens` rows, the last one partial where the length is no multiple of `ratio`."""
    entries = -(-tokens // ratio)
    first = torch.arange(entries).unsqueeze(1) * ratio
    slots = first + torch.arange(-(series - 1) * ratio, ratio).unsqueeze(0)
    slots = torch.where((slots >= 0) & (slots < tokens), slots, -1)
    return CompressTable(entries=torch.arange(entries), slots=slots, positions=first.squeeze(1).clone())


def compress_case(
    tokens: int, ratio: int, series: int, width: int, *, seed: int, device: Device, float_weights: bool, gap: int = 0
) -> CompressCase:
    """`gap` rows before the document and entries before its first belong to nobody."""
    generator = generator_of(seed, device)
    table = compress_table(tokens, ratio, series)
    dtype = torch.float32 if float_weights else torch.bfloat16
    raw = [normal(generator, tokens + gap, series * width) for _ in range(2)]
    for tensor in raw:
        tensor[:gap] = float("nan")
    return CompressCase(
        kv=raw[0],
        gate=raw[1],
        ape=normal(generator, ratio, series * width, dtype=dtype),
        norm=normal(generator, width, dtype=dtype) + 1,
        table=CompressTable(
            entries=(table.entries + gap).to(device),
            slots=torch.where(table.slots < 0, -1, table.slots + gap).to(device),
            positions=table.positions.to(device),
        ),
    )


@dataclass(frozen=True, kw_only=True)
class ExpertCase:
    """Arguments of `experts`: rows, their experts among `total`, and weights of the experts `first` .. held here."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    first: int


def expert_case(
    rows: int, hidden: int, width: int, *, total: int, held: int, first: int, top_k: int, dropped: float, seed: int,
    device: Device,
) -> ExpertCase:  # fmt: skip
    """Distinct random experts a row; a share `dropped` of the slots is -1."""
    generator = generator_of(seed, device)
    ids = torch.rand((rows, total), generator=generator, device=device).argsort(1)[:, :top_k]
    gone = torch.rand((rows, top_k), generator=generator, device=device) < dropped
    weights = torch.rand((rows, top_k), generator=generator, device=device)
    return ExpertCase(
        x=normal(generator, rows, hidden),
        ids=ids.masked_fill(gone, -1),
        weights=weights.masked_fill(gone, 0),
        gate_up=normal(generator, held, 2 * width, hidden) * hidden**-0.5,
        down=normal(generator, held, hidden, width) * width**-0.5,
        first=first,
    )
