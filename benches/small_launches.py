"""Small launches of every op, for compute-sanitizer.

Inputs are copied from the host, so that initcheck knows what was written. A case walks the paths of one kernel: ragged
ends, buffers that are filled more than once. `python -m benches.sanitize` runs the tools over all of them, one process
a case, as they keep records of every access:

    compute-sanitizer --tool racecheck --kernel-name kns=redknot python -m benches.small_launches moe_route_learned

Kernels whose blocks wait for each other do not end under racecheck in reasonable time: every look at a barrier is
recorded. The libraries of `make tools` look seldom, and in them one cluster of hyper_connection_pre walks all rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from benches.common import Layout, attention_case, make_table, place, random_rope, table_to
from benches.elementwise_cases import ExpertCase, compress_case, expert_case, generator_of, mix_case, normal
from trt_redknot.ops.cuda import elementwise, moe, packing
from trt_redknot.ops.cuda.attention import seg_latent_attention
from trt_redknot.ops.cuda.elementwise import RowFormat, call_op
from trt_redknot.ops.cuda.indexer import index_salience, lightning_indexer
from trt_redknot.ops.cuda.library import load_kernels
from trt_redknot.ops.cuda.rows import turn_rows
from trt_redknot.ops.experts import QuantisedExperts, quantise_experts
from trt_redknot.ops.reference.packing import pack_latents, pack_rows

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Dataclass = TypeVar("Dataclass", bound="DataclassInstance")
EPS, ITERATIONS = 1e-6, 20
Outputs = Iterator[torch.Tensor]


def up(case: Dataclass) -> Dataclass:
    """A case of the host's on the GPU."""
    values = {field.name: getattr(case, field.name) for field in fields(case)}
    return replace(case, **{name: value.cuda() for name, value in values.items() if isinstance(value, torch.Tensor)})


def _pre(shapes: Sequence[tuple[int, int, int]]) -> Outputs:
    for rows, streams, hidden in shapes:
        case = up(mix_case(rows, streams, hidden, seed=rows, device="cpu"))
        yield from elementwise.hyper_connection_pre(
            case.streams, case.fn, case.base, case.scale, case.norm, iterations=ITERATIONS, eps=EPS, norm_eps=EPS
        )


def _head(shapes: Sequence[tuple[int, int, int]]) -> Outputs:
    for rows, streams, hidden in shapes:
        case = up(mix_case(rows, streams, hidden, seed=rows, device="cpu"))
        yield elementwise.hyper_head(
            case.streams, case.head_fn, case.head_base, case.head_scale, case.norm, eps=EPS, norm_eps=EPS
        )


def _post() -> Outputs:
    for rows, streams, hidden in ((3, 4, 4096), (9, 4, 7168), (33, 2, 64)):
        case = up(mix_case(rows, streams, hidden, seed=rows, device="cpu"))
        generator = generator_of(1, "cpu")
        post, comb = (
            normal(generator, rows, *shape, dtype=torch.float32) for shape in ((streams,), (streams, streams))
        )
        yield elementwise.hyper_connection_post(case.streams, case.output, post.cuda(), comb.cuda())


def _norm_rope_pack() -> Outputs:
    generator = generator_of(1, "cpu")
    for rows, width in ((70, 512), (5, 128), (9, 1024), (4, 4096)):
        x, norm = normal(generator, rows, width).cuda(), normal(generator, width).cuda()
        rope, positions = random_rope(rows, 64).cuda(), torch.arange(rows).cuda()
        for row_format in RowFormat:
            yield elementwise.norm_rope_pack(x, norm, rope, positions, eps=EPS, row_format=row_format)


def _query_norm() -> Outputs:
    for rows in (1, 9):
        yield elementwise.query_norm(normal(generator_of(rows, "cpu"), rows, 8, 512).cuda(), eps=EPS)


def _compress(tokens: int, ratio: int, series: int, width: int) -> Outputs:
    case = compress_case(tokens, ratio, series, width, seed=tokens, device="cpu", float_weights=True, gap=1)
    on_gpu, table, rope = up(case), up(case.table), random_rope(tokens, 64).cuda()
    for row_format in (RowFormat.BF16, RowFormat.PACKED_LATENT if width > 64 else RowFormat.PACKED_ROW):
        yield elementwise.compress(
            on_gpu.kv, on_gpu.gate, on_gpu.ape, on_gpu.norm, rope, table, eps=EPS, row_format=row_format
        )


def _restore_replace() -> Outputs:
    generator = generator_of(4, "cpu")
    for rows, channels in ((40, 1024), (7, 256)):
        state, kept = normal(generator, rows, channels).cuda(), normal(generator, rows // 4, channels).cuda()
        tile = normal(generator, rows - rows // 4, channels)
        index = torch.randperm(tile.shape[0], generator=generator).cuda()
        for stored in (tile.cuda(), pack_rows(tile).cuda()):
            yield elementwise.restore_replace(state, kept, stored)
            yield elementwise.restore_replace(state, kept, stored, index=index)


def _route_learned() -> Outputs:
    generator = generator_of(3, "cpu")
    for experts in (256, 40, 300):
        for dtype in (torch.float32, torch.bfloat16):
            # Experts of equal scores, in rows that leave four rows a warp to the general way.
            logits = normal(generator, 37, experts, dtype=dtype)
            logits[33:] = 0
            bias = normal(generator, experts, dtype=torch.float32) * (experts != 40)
            for scoring in range(3):
                ids, weights = _choices(37)
                call_op("moe_route_learned", ids, weights, logits.cuda(), bias.cuda(), 1.5, 0.85, scoring)
                yield weights


def _route_hash() -> Outputs:
    generator = generator_of(3, "cpu")
    for experts in (256, 40):
        logits = normal(generator, 37, experts).cuda()
        table = torch.randint(0, experts, (50, 6), generator=generator).cuda()
        tokens = torch.randint(-1, 51, (37,), generator=generator).cuda()
        ids, weights = _choices(37)
        call_op("moe_route_hash", ids, weights, torch.zeros(1).int().cuda(), logits, table, tokens, 1.5, 0)
        yield weights


def _permute_and_combine() -> Outputs:
    generator = generator_of(3, "cpu")
    for rows, hidden in ((300, 256), (40, 7168), (2500, 64)):
        case = up(_experts(rows, 24, hidden, 64))
        permuted, inverse, ends = moe.permute(case.x, case.ids, first=case.first, experts=24)
        yield permuted[: int(ends[-1])]
        gate_up = normal(generator, permuted.shape[0], 128).cuda()
        yield moe.activate(gate_up, ends, limit=10.0)[: int(ends[-1])]
        yield moe.combine(normal(generator, permuted.shape[0], hidden).cuda(), inverse, case.weights)


def _grouped_gemm() -> Outputs:
    for rows, held, hidden, width in ((300, 24, 256, 128), (700, 3, 512, 256), (5, 9, 128, 128)):
        case = up(_experts(rows, held, hidden, 8))
        permuted, inverse, ends = moe.permute(case.x, case.ids, first=case.first, experts=held)
        generator = generator_of(rows, "cpu")
        gate_up = _quantised(normal(generator, held, 2 * width, hidden))
        down = _quantised(normal(generator, held, hidden, width))
        products = moe.grouped_gemm_fp8(permuted, ends, gate_up.codes, gate_up.scales)
        activated = moe.activate(products, ends, limit=10.0)
        yield moe.combine(moe.grouped_gemm_fp8(activated, ends, down.codes, down.scales), inverse, case.weights)


def _few_experts() -> Outputs:
    for hidden, width in ((256, 128), (1024, 384)):
        for rows in (1, 4):
            case = _experts(rows, 24, hidden, width)
            on_gpu, gate_up, down = up(case), _quantised(case.gate_up), _quantised(case.down)
            arguments = (on_gpu.x, on_gpu.ids, on_gpu.weights)
            yield moe.few_rows(*arguments, on_gpu.gate_up, on_gpu.down, first=case.first, limit=1.0)
            yield moe.few_rows(*arguments, gate_up, down, first=case.first, limit=1.0)


def _indexer() -> Outputs:
    for sequences, top_k in ((((300, 170), (90,)), 64), (((20000,),), 512)):
        layout = Layout(sequences=sequences, ratio=4, gap=1)
        pools = place(layout)
        rows = [(which, torch.arange(max(0, sum(spans) - 5), sum(spans))) for which, spans in enumerate(sequences)]
        table = table_to(make_table(layout, pools, rows), "cuda")
        generator, count = generator_of(2, "cpu"), sum(last.numel() for _, last in rows)
        q, weights = normal(generator, count, 64, 128).cuda(), normal(generator, count, 64).cuda()
        keys = normal(generator, pools.owned_entries.shape[0], 128)
        rope = random_rope(max(map(sum, sequences)), 64).cuda()
        yield lightning_indexer(q, weights, pack_rows(keys).cuda(), table, rope, top_k=top_k)
        yield lightning_indexer(q, weights, keys.cuda(), table, rope, top_k=top_k)
        yield lightning_indexer(q, weights, keys.cuda(), table, rope, top_k=top_k, fp8=False)


def _attention(
    heads: tuple[int, int], *, ratio: int, top_k: int | None, last: int, other: int = 0,
    sequences: tuple[tuple[int, ...], ...] = ((150, 90), (60,)), window: int = 64,
) -> Outputs:  # fmt: skip
    """The last rows of the first sequence, and a row of the other one."""
    length = sum(sequences[0])
    rows = [(0, torch.arange(length - last, length)), *([(1, torch.arange(50, 50 + other))] if other else [])]
    for packed in (True, False):
        case = attention_case(
            Layout(sequences=sequences, ratio=ratio, gap=1), rows, full_rows=last, heads=heads, top_k=top_k,
            packed=packed, device="cpu", seed=1,
        )  # fmt: skip
        on_gpu, table = up(case), table_to(case.table, "cuda")
        yield from seg_latent_attention(
            on_gpu.q_global, on_gpu.q_local, table, on_gpu.latents, on_gpu.entries, on_gpu.selected,
            on_gpu.sinks_global, on_gpu.sinks_local, on_gpu.rope, window=window,
        )  # fmt: skip


def _attention_columns(groups: int) -> Outputs:
    """Rows that select: a unit is a row, and blocks have as many columns as a row has heads. With eight heads also the
    sliding window alone."""
    heads, last = (groups, 7 * groups), 16 // groups + 2
    yield from _attention(heads, ratio=4, top_k=64, last=last, other=1)
    if groups == 1:
        yield from _attention(heads, ratio=0, top_k=None, last=last)


def _attention_few() -> Outputs:
    yield from _attention((1, 7), ratio=4, top_k=64, last=2)
    yield from _attention((1, 7), ratio=16, top_k=None, last=1)


def _attention_many_heads() -> Outputs:
    """Packed pools are decoded by a launch before: followed by the tools as well, or what it writes looks unwritten."""
    yield from _attention((8, 56), ratio=4, top_k=64, last=4, other=1)
    yield from _attention((8, 56), ratio=16, top_k=None, last=4)


def _index_salience() -> Outputs:
    layout = Layout(sequences=((300, 170), (90,)), ratio=4, gap=1)
    pools = place(layout)
    table = table_to(make_table(layout, pools, [(0, torch.arange(455, 470))]), "cuda")
    generator = generator_of(6, "cpu")
    q, weights = normal(generator, 15, 64, 128).cuda(), normal(generator, 15, 64).cuda()
    keys = normal(generator, pools.owned_entries.shape[0], 128)
    for stored in (keys.cuda(), pack_rows(keys).cuda()):
        yield from index_salience(q, weights, stored, table, random_rope(470, 64).cuda(), entries=118)


def _turn_rows() -> Outputs:
    generator = generator_of(7, "cpu")
    for count, width in ((37, 512), (300, 128)):
        turned = normal(generator, count, width).cuda()
        turn_rows(turned, (torch.arange(count) % 20).cuda(), random_rope(19, 64).cuda())
        yield turned


def _unpack() -> Outputs:
    generator = generator_of(5, "cpu")
    yield packing.unpack_latents(pack_latents(normal(generator, 37, 512), 64).cuda())
    for width in (8, 128, 1024):
        yield packing.unpack_rows(pack_rows(normal(generator, 5, width)).cuda(), width)


def _unwritten_input() -> Outputs:
    elementwise.query_norm(torch.empty((9, 8, 512), dtype=torch.bfloat16, device="cuda"), eps=EPS)
    yield torch.zeros(1)


def _input_cut_short() -> Outputs:
    """Nine rows of memory that are said to be eighteen."""
    memory = torch.zeros((9, 8, 512), dtype=torch.int16).cuda()

    class Said:
        __cuda_array_interface__ = {  # noqa: RUF012 (torch reads this attribute)
            "data": (memory.data_ptr(), False), "shape": (18, 8, 512), "typestr": "<i2", "version": 2,
        }  # fmt: skip

    elementwise.query_norm(torch.as_tensor(Said(), device="cuda").view(torch.bfloat16), eps=EPS)
    yield torch.zeros(1)


def _experts(rows: int, held: int, hidden: int, width: int) -> ExpertCase:
    return expert_case(rows, hidden, width, total=64, held=held, first=8, top_k=6, dropped=0.2, seed=3, device="cpu")


def _choices(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for what a router chooses; from the host, as only NaN would tell that it was not written."""
    return torch.full((rows, 6), -1).cuda(), torch.full((rows, 6), float("nan")).cuda()


def _quantised(weight: torch.Tensor) -> QuantisedExperts:
    return up(quantise_experts(weight.float()))


# One pass takes groups of 16 rows (4096 channels) or 8 (7168); it has buffers for up to seven groups, and balances the
# rows of eight at a time.
CASES: dict[str, Callable[[], Outputs]] = {
    "hyper_connection_pre 4096": lambda: _pre([(16 * 2 + 9, 4, 4096)]),
    "hyper_connection_pre 4096, buffers filled again": lambda: _pre([(16 * 8 + 7, 4, 4096)]),
    "hyper_connection_pre 7168": lambda: _pre([(8 * 2 + 5, 4, 7168)]),
    "hyper_connection_pre 7168, buffers filled again": lambda: _pre([(8 * 9 + 3, 4, 7168)]),
    "hyper_connection_pre other": lambda: _pre([(130, 4, 256), (33, 2, 64), (20, 4, 2048)]),
    "hyper_connection few rows": lambda: _pre([(1, 4, 4096), (2, 4, 7168), (2, 4, 128)]),
    "hyper_head": lambda: _head([(1, 4, 4096), (5, 4, 7168), (130, 4, 4096), (33, 2, 64)]),
    "hyper_connection_post": _post,
    "norm_rope_pack": _norm_rope_pack,
    "query_norm": _query_norm,
    "compress windows of 4": lambda: _compress(75, 4, 2, 512),
    "compress windows of 4, narrow": lambda: _compress(130, 4, 2, 128),
    "compress windows of 128": lambda: _compress(600, 128, 1, 512),
    "compress pairs of entries": lambda: _compress(40 * 530, 40, 1, 64),
    "compress windows of 20": lambda: _compress(70, 20, 1, 64),
    "restore_replace": _restore_replace,
    "moe_route_learned": _route_learned,
    "moe_route_hash": _route_hash,
    "moe_permute, moe_activation, moe_combine": _permute_and_combine,
    "moe_grouped_gemm": _grouped_gemm,
    "moe few rows": _few_experts,
    "attention 8 columns": lambda: _attention_columns(1),
    "attention 16 columns": lambda: _attention_columns(2),
    "attention 32 columns": lambda: _attention_columns(4),
    # Rows in blocks of 64 columns: from 2112 rows of eight heads on.
    "attention 64 columns": lambda: _attention(
        (1, 7), ratio=128, top_k=None, last=2120, sequences=((1300, 820),), window=16
    ),
    "attention many heads": _attention_many_heads,
    "attention few rows": _attention_few,
    "lightning_indexer": _indexer,
    "index_salience": _index_salience,
    "turn_rows": _turn_rows,
    "unpack": _unpack,
}
# Their blocks wait for each other.
WAITING = frozenset(
    name for name in CASES if name.startswith(("hyper_connection_pre 4096", "hyper_connection_pre 7168"))
)
# What a tool has to report, by tool.
_WRONG: dict[str, tuple[str, Callable[[], Outputs]]] = {
    "control: an input that nobody wrote": ("initcheck", _unwritten_input),
    "control: an input that ends early": ("memcheck", _input_cut_short),
}
CONTROLS = {name: tool for name, (tool, _) in _WRONG.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="left out: all; --list names them")
    parser.add_argument("--list", action="store_true", help="names the cases and launches nothing")
    parser.add_argument("--library", type=Path, metavar="DIR", help="libraries of another build than the package's")
    options = parser.parse_args()
    if options.list:
        print("\n".join([*CASES, *CONTROLS]))
        return
    known = CASES | {name: make for name, (_, make) in _WRONG.items()}
    for name in options.cases:
        if name not in known:
            parser.error(f"{name!r} is no case, --list names them")
    if not torch.cuda.is_available():
        parser.error("no CUDA GPU was found. Run this on the machine whose kernels are to be looked at.")
    load_kernels(options.library)
    for name in options.cases or CASES:
        outputs = list(known[name]())
        for output in outputs:
            if output.is_floating_point() and not bool(output.cpu().isfinite().all()):
                raise SystemExit(f"{name}: an output is not finite")
        print(f"{name}: {len(outputs)} outputs")


if __name__ == "__main__":
    main()
