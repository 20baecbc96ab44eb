"""seg_latent_attention beside FlashMLA, which a user without our kernel would call: there heads are padded to 64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from benches.common import ROPE_DIM, WINDOW, AttentionCase, Layout, attention_case, relative_error
from benches.measure import Case, Peer, worst
from trt_redknot.ops.cuda.library import load_kernels
from trt_redknot.ops.reference import attention as reference
from trt_redknot.ops.reference.packing import latent_row_bytes

HEAD_DIM = 512
SAMPLE = 24  # rows at either end that are compared with the reference
# bf16 outputs, bf16 rotated queries and probabilities of 8 to 11 bits: each contributes about 2^-9.
TOLERANCE = 6e-3


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One attention call: rows at the end of a context of `context` tokens, in `segments` equal segments.

    Attributes:
        heads: Global and Local heads of the rank.
        ratio: tokens a compressed entry pools; 0: sliding window only.
        top_k: entries a row selects; None: every visible one.
        target: how many times faster than the peer it has to be; None: reported only.
    """

    name: str
    context: int
    heads: tuple[int, int]
    ratio: int
    top_k: int | None
    target: float | None = None
    segments: int = 1
    full: float = 1.0
    rows: int = 4096


SHAPES = (
    Shape(name="csa 8 heads 64K", context=65536, heads=(1, 7), ratio=4, top_k=512, target=2.0),
    Shape(name="csa 8 heads 256K", context=262144, heads=(1, 7), ratio=4, top_k=512, target=2.0),
    Shape(name="csa 16 heads 256K", context=262144, heads=(2, 14), ratio=4, top_k=1024, target=1.8),
    Shape(name="csa 64 heads 64K", context=65536, heads=(8, 56), ratio=4, top_k=512, target=0.9),
    Shape(name="csa 8 heads 64K, 8 segments", context=65536, heads=(1, 7), ratio=4, top_k=512, segments=8),
    Shape(name="csa 8 heads 64K, 1/4 full rows", context=65536, heads=(1, 7), ratio=4, top_k=512, full=0.25),
    Shape(name="hca 8 heads 256K", context=262144, heads=(1, 7), ratio=128, top_k=None, target=3.0),
    Shape(name="hca 1 head 256K", context=262144, heads=(1, 0), ratio=128, top_k=None),
    Shape(name="hca 64 heads 256K", context=262144, heads=(8, 56), ratio=128, top_k=None),
    Shape(name="sliding 8 heads", context=65536, heads=(1, 7), ratio=0, top_k=None),
)


def make_case(shape: Shape, *, packed: bool, seed: int) -> AttentionCase:
    tokens = shape.context // shape.segments
    positions = torch.arange(shape.context - shape.rows, shape.context)
    return attention_case(
        Layout(sequences=((tokens,) * shape.segments,), ratio=shape.ratio), [(0, positions)],
        full_rows=int(shape.rows * shape.full), heads=shape.heads, top_k=shape.top_k, packed=packed, device="cuda",
        seed=seed,
    )  # fmt: skip


def our_call(case: AttentionCase, fill: float | None = None) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """The op on one pair of outputs, which it fills first where `fill` is given."""
    load_kernels()
    outputs = torch.empty_like(case.q_global), torch.empty_like(case.q_local)

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        if fill is not None:
            for output in outputs:
                output.fill_(fill)
        torch.ops.redknot.seg_latent_attention(
            *outputs, case.q_global, case.q_local, case.table.segments, case.table.row_segments, case.table.positions,
            case.table.visible, case.latents, case.entries, case.selected, case.sinks_global, case.sinks_local,
            case.rope, WINDOW,
        )  # fmt: skip
        return outputs

    return call


def error(case: AttentionCase) -> float:
    """Of the first and last rows: the distance from the fp64 reference over what the pools hold."""
    found = our_call(case, fill=float("nan"))()
    rows = case.q_global.shape[0]
    entries = None if case.entries_plain is None else case.entries_plain.double()
    errors = []
    for picked in (slice(0, SAMPLE), slice(rows - SAMPLE, rows)):
        wanted = reference.seg_latent_attention(
            case.q_global[picked].double(), case.q_local[picked].double(), case.table.rows(picked),
            case.latents_plain.double(), entries, None if case.selected is None else case.selected[picked],
            case.sinks_global.double(), case.sinks_local.double(), case.rope.double(), window=WINDOW,
        )  # fmt: skip
        errors += [relative_error(got[picked], want) for got, want in zip(found, wanted, strict=True)]
    if not all(bool(output.isfinite().all()) for output in found):
        return float("inf")
    return worst(*((value, TOLERANCE) for value in errors))


def keys_per_row(shape: Shape) -> int:
    entries = 0 if not shape.ratio else shape.top_k or shape.context // shape.ratio
    return WINDOW + entries


def peers(shape: Shape) -> tuple[Peer, ...]:
    """FlashMLA on as many keys, bf16, heads padded to 64, where the package is installed."""
    try:
        from flash_mla import flash_mla_sparse_fwd  # type: ignore[import-not-found]
    except ImportError:
        return ()
    heads = -(-sum(shape.heads) // 64) * 64
    q = torch.randn((shape.rows, heads, HEAD_DIM), device="cuda", dtype=torch.bfloat16)
    pool = torch.randn((shape.context, 1, HEAD_DIM), device="cuda", dtype=torch.bfloat16)
    keys = -(-keys_per_row(shape) // 128) * 128
    chosen = torch.randint(0, shape.context, (shape.rows, 1, keys), device="cuda", dtype=torch.int32)
    call = lambda: flash_mla_sparse_fwd(q, pool, chosen, HEAD_DIM**-0.5, d_v=HEAD_DIM, use_legacy=True)  # noqa: E731
    return (Peer(name="FlashMLA", call=call),)


def cases(*, seed: int = 0) -> Iterator[Case]:
    """Packed pools, then bf16 ones. Operations are those of the heads that exist, not of padding."""
    for packed in (True, False):
        for shape in SHAPES:
            yield _case(shape, packed=packed, seed=seed)


def _case(shape: Shape, *, packed: bool, seed: int) -> Case:
    case = make_case(shape, packed=packed, seed=seed)
    full = int(shape.rows * shape.full)
    head_rows = shape.rows * shape.heads[0] + full * shape.heads[1]
    keys = keys_per_row(shape)
    row_bytes = latent_row_bytes(HEAD_DIM, ROPE_DIM) if packed else 2 * HEAD_DIM
    return Case(
        op=f"attention {'packed' if packed else 'bf16'}",
        shape=shape.name,
        call=our_call(case),
        error=lambda: error(case),
        operations=4.0 * head_rows * keys * HEAD_DIM,
        moved=float(shape.rows * keys * row_bytes if shape.top_k else shape.context * row_bytes),
        peers=peers(shape),
        target=shape.target if packed else None,
        graph=False,
    )
