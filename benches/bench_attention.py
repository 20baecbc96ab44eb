"""seg_latent_attention beside FlashMLA, which a user without our kernel would call: there heads are padded to 64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from benches.common import WINDOW, AttentionCase, Layout, Row, attention_case, median_ms
from trt_redknot.ops.cuda.library import load_kernels

HEAD_DIM = 512


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


def our_call(case: AttentionCase) -> Callable[[], None]:
    load_kernels()
    outputs = torch.empty_like(case.q_global), torch.empty_like(case.q_local)

    def call() -> None:
        torch.ops.redknot.seg_latent_attention(
            *outputs, case.q_global, case.q_local, case.table.segments, case.table.row_segments, case.table.positions,
            case.table.visible, case.latents, case.entries, case.selected, case.sinks_global, case.sinks_local,
            case.rope, WINDOW,
        )  # fmt: skip

    return call


def keys_per_row(shape: Shape) -> int:
    entries = 0 if not shape.ratio else shape.top_k or shape.context // shape.ratio
    return WINDOW + entries


def peer_ms(shape: Shape) -> float | None:
    """FlashMLA on as many keys, bf16, heads padded to 64; None where the package is not installed."""
    try:
        from flash_mla import flash_mla_sparse_fwd  # type: ignore[import-not-found]
    except ImportError:
        return None
    heads = -(-sum(shape.heads) // 64) * 64
    q = torch.randn((shape.rows, heads, HEAD_DIM), device="cuda", dtype=torch.bfloat16)
    pool = torch.randn((shape.context, 1, HEAD_DIM), device="cuda", dtype=torch.bfloat16)
    keys = -(-keys_per_row(shape) // 128) * 128
    chosen = torch.randint(0, shape.context, (shape.rows, 1, keys), device="cuda", dtype=torch.int32)
    return median_ms(lambda: flash_mla_sparse_fwd(q, pool, chosen, HEAD_DIM**-0.5, d_v=HEAD_DIM, use_legacy=True))


def run(*, packed: bool = True, seed: int = 0) -> Iterator[Row]:
    """One row a shape. Operations are those of the heads that exist, not of padding."""
    for shape in SHAPES:
        ms = median_ms(our_call(make_case(shape, packed=packed, seed=seed)))
        full = int(shape.rows * shape.full)
        head_rows = shape.rows * shape.heads[0] + full * shape.heads[1]
        keys = keys_per_row(shape)
        row_bytes = 584 if packed else 2 * HEAD_DIM
        yield Row(
            name=f"{shape.name} ({'packed' if packed else 'bf16'})",
            ms=ms,
            operations=4.0 * head_rows * keys * HEAD_DIM,
            moved=float(shape.rows * keys * row_bytes if shape.top_k else shape.context * row_bytes),
            peer_ms=peer_ms(shape),
            target=shape.target if packed else None,
        )
