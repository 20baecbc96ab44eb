"""The checks that the benches make before they time: reference ops pass them, spoiled ones do not."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import pytest
import torch

from benches import bench_bytes, bench_experts
from benches.measure import Case
from trt_redknot.ops.cuda import elementwise, moe
from trt_redknot.ops.cuda.elementwise import RowFormat
from trt_redknot.ops.experts import QuantisedExperts
from trt_redknot.ops.reference import compress, hyper_connection, norms, projection
from trt_redknot.ops.reference import moe as reference
from trt_redknot.ops.reference.packing import pack_pool_latents, pack_rows, unpack_rows

# What the smallest network of the benches is divided by.
SCALE = 512


def stored(rows: torch.Tensor, row_format: RowFormat) -> torch.Tensor:
    return rows if row_format is RowFormat.BF16 else pack_pool_latents(rows, 64)


def pre(*tensors: torch.Tensor, **options: float) -> tuple[torch.Tensor, ...]:
    found = hyper_connection.hyper_connection_pre(*(tensor.double() for tensor in tensors), **options)  # type: ignore[arg-type]
    return found[0].bfloat16(), found[1].float(), found[2].float()


def post(*tensors: torch.Tensor) -> torch.Tensor:
    return hyper_connection.hyper_connection_post(*(tensor.double() for tensor in tensors)).bfloat16()


def norm_rope_pack(
    x: torch.Tensor, norm: torch.Tensor, rope: torch.Tensor, positions: torch.Tensor, *, eps: float,
    row_format: RowFormat,
) -> torch.Tensor:  # fmt: skip
    found = norms.norm_rope_pack(x.double(), norm.double(), rope.double(), positions, eps=eps)
    return stored(found.bfloat16(), row_format)


def query_norm(q: torch.Tensor, *, eps: float) -> torch.Tensor:
    return norms.query_norm(q.double(), eps=eps).bfloat16()


def pooled(*arguments: object, eps: float, row_format: RowFormat) -> torch.Tensor:
    wide = [a.double() if isinstance(a, torch.Tensor) else a for a in arguments]
    return stored(compress.compress(*wide, eps=eps).bfloat16(), row_format)  # type: ignore[arg-type]


def restored(state: torch.Tensor, kept: torch.Tensor, tile: torch.Tensor) -> torch.Tensor:
    packed = tile.dtype == torch.uint8
    return projection.restore_replace(
        state, kept, unpack_rows(tile, state.shape[1], torch.bfloat16) if packed else tile
    )


def call_op(name: str, ids: torch.Tensor, weights: torch.Tensor, logits: torch.Tensor, *rest: object) -> None:
    assert name == "moe_route_learned"
    bias, scale, tau, _ = rest
    unit = torch.eye(logits.shape[1])
    found = reference.route_learned(
        logits.float(), unit, bias, top_k=ids.shape[1], scale=scale, scoring="sqrtsoftplus", tau=tau  # type: ignore[arg-type]
    )  # fmt: skip
    ids.copy_(found[0])
    weights.copy_(found[1])


def permute(
    x: torch.Tensor, ids: torch.Tensor, *, first: int, experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    local = (ids - first).flatten()
    here = (local >= 0) & (local < experts)
    order = torch.where(here, local, experts).argsort(stable=True)[: int(here.sum())]
    inverse = torch.full((ids.numel(),), -1, dtype=torch.int32)
    inverse[order] = torch.arange(order.shape[0], dtype=torch.int32)
    permuted = torch.empty((ids.numel(), x.shape[1]), dtype=x.dtype)
    permuted[: order.shape[0]] = x[order // ids.shape[1]]
    ends = torch.bincount(local[here], minlength=experts).cumsum(0).int()
    return permuted, inverse.view(ids.shape), ends


def activate(gate_up: torch.Tensor, ends: torch.Tensor, *, limit: float) -> torch.Tensor:
    return reference._swiglu(*gate_up.double().chunk(2, 1), limit).bfloat16()


def combine(y: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    terms = y[inverse.long().clamp(min=0)].double() * weights.double().unsqueeze(-1)
    return terms.masked_fill((inverse < 0).unsqueeze(-1), 0).sum(1).bfloat16()


def grouped_gemm(x: torch.Tensor, ends: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    weight, rows = QuantisedExperts(codes=codes, scales=scales), unpack_rows(pack_rows(x), x.shape[1], torch.float32)
    out, first = torch.empty((x.shape[0], codes.shape[1]), dtype=torch.bfloat16), 0
    for expert, last in enumerate(ends.tolist()):
        out[first:last] = (rows[first:last] @ weight.expert(expert, torch.float32).T).bfloat16()
        first = last
    return out


def all_cases() -> Iterator[Case]:
    return chain(bench_bytes.cases("cpu", SCALE), bench_experts.cases("cpu", SCALE, hidden=256, width=128))


@pytest.fixture
def reference_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU references in place of the kernels."""
    monkeypatch.setattr(elementwise, "hyper_connection_pre", pre)
    monkeypatch.setattr(elementwise, "hyper_connection_post", post)
    monkeypatch.setattr(elementwise, "norm_rope_pack", norm_rope_pack)
    monkeypatch.setattr(elementwise, "query_norm", query_norm)
    monkeypatch.setattr(elementwise, "compress", pooled)
    monkeypatch.setattr(elementwise, "restore_replace", restored)
    monkeypatch.setattr(bench_experts, "call_op", call_op)
    monkeypatch.setattr(moe, "permute", permute)
    monkeypatch.setattr(moe, "activate", activate)
    monkeypatch.setattr(moe, "combine", combine)
    monkeypatch.setattr(moe, "grouped_gemm_fp8", grouped_gemm)


@pytest.mark.usefixtures("reference_ops")
def test_references_pass_every_check() -> None:
    errors = {(case.op, case.shape): case.error() for case in all_cases()}
    assert len(errors) == 27
    assert all(error <= 1 for error in errors.values()), errors


def spoiled(op: object) -> object:
    """The op with one element of its first output changed by far more than rounding."""

    def call(*arguments: object, **options: object) -> object:
        found = op(*arguments, **options)  # type: ignore[operator]
        first = found[0] if isinstance(found, tuple) else found
        first[:] = first.roll(1, 0)
        return found

    return call


@pytest.mark.usefixtures("reference_ops")
@pytest.mark.parametrize(
    ("module", "name", "op"),
    [
        (elementwise, "hyper_connection_pre", "hyper_connection_pre"),
        (elementwise, "hyper_connection_post", "hyper_connection_post"),
        (elementwise, "norm_rope_pack", "norm_rope_pack"),
        (elementwise, "query_norm", "query_norm"),
        (elementwise, "compress", "compress"),
        (elementwise, "restore_replace", "restore_replace"),
        (moe, "permute", "moe_permute"),
        (moe, "activate", "moe_activation"),
        (moe, "combine", "moe_combine"),
        (moe, "grouped_gemm_fp8", "moe_grouped_gemm"),
    ],
)
def test_an_op_that_mixes_rows_up_is_wrong(monkeypatch: pytest.MonkeyPatch, module: object, name: str, op: str) -> None:
    cases = (
        bench_experts.cases("cpu", SCALE, hidden=256, width=128) if module is moe else bench_bytes.cases("cpu", SCALE)
    )
    case = next(case for case in cases if case.op.startswith(op) and case.op != "norm_rope_pack packed")
    monkeypatch.setattr(module, name, spoiled(getattr(module, name)))
    assert not case.error() <= 1
