"""Router, permutation and experts of one rank of eight of Flash: 32 of 256 experts, hidden 4096, width 2048."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from benches.common import relative_error
from benches.elementwise_cases import ExpertCase, expert_case, generator_of, normal
from benches.measure import Case, Peer, unless_equal, worst
from trt_redknot.ops.cuda import moe
from trt_redknot.ops.cuda.elementwise import call_op
from trt_redknot.ops.experts import QuantisedExperts, quantise_experts
from trt_redknot.ops.reference import moe as reference
from trt_redknot.ops.reference.packing import pack_rows, unpack_rows

BF16 = 2
BYTES_TARGET, PRODUCT_TARGET = 0.75, 0.55
SAMPLE = 512
# Scores are fp32; outputs of the others are bf16, and sums of the matrix units keep about 13 bits.
SCORE, ONE_ROUNDING, PRODUCT = 1e-5, 4e-3, 1e-2
TOTAL, HELD, FIRST, TOP_K = 256, 32, 64, 6
LIMIT = 10.0


def cases(device: torch.device | str = "cuda", scale: int = 1, hidden: int = 4096, width: int = 2048) -> Iterator[Case]:
    """`scale` divides the rows."""
    for dtype in (torch.float32, torch.bfloat16):
        yield _route_case((1 << 17) // scale, dtype, device)
    for rows in (16384 // scale, 65536 // scale):
        yield from _row_cases(rows, hidden, width, device)
    for depth, columns in ((hidden, 2 * width), (width, hidden)):
        weight = quantise_experts(normal(generator_of(4, device), HELD, columns, depth, dtype=torch.float32))
        plain = torch.stack([weight.expert(index, torch.bfloat16) for index in range(HELD)]).transpose(1, 2)
        for rows in (12288 // scale, 49152 // scale, 98304 // scale):
            yield _product_case(rows, weight, plain, device)


def _route_case(rows: int, dtype: torch.dtype, device: torch.device | str) -> Case:
    generator = generator_of(5, device)
    logits, bias = normal(generator, rows, TOTAL, dtype=dtype), normal(generator, TOTAL, dtype=torch.float32) * 0.1
    scale, tau = 1.5, 0.85

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.empty((rows, TOP_K), dtype=torch.int64, device=device)
        weights = torch.empty((rows, TOP_K), device=device)
        call_op("moe_route_learned", ids, weights, logits, bias, scale, tau, moe._SCORING["sqrtsoftplus"])
        return ids, weights

    def wanted(tau: float) -> tuple[torch.Tensor, torch.Tensor]:
        return reference.route_learned(
            logits.double(), torch.eye(TOTAL, device=device), bias.double(), top_k=TOP_K, scale=scale,
            scoring="sqrtsoftplus", tau=tau,
        )  # fmt: skip

    def error() -> float:
        ids, weights = call()
        wanted_ids, wanted_weights = wanted(tau)
        # Rows where rounding decides an order or which side of tau a share falls on are left out; they are few.
        scores = F.softplus(logits.double()).sqrt()
        best = (scores + bias.double()).topk(TOP_K + 1).values
        native = wanted(1.0)[1] / scale
        between = native.diff(dim=1).abs()
        clear = (
            (best.diff(dim=1).abs() > 1e-5).all(1)
            & ((between > 1e-5) | (between == 0)).all(1)
            & ((native.cumsum(1) - tau).abs() > 1e-5).all(1)
        )
        if float(clear.float().mean()) < 0.9:
            return math.inf
        return max(
            unless_equal(ids[clear], wanted_ids[clear]),
            worst((relative_error(weights[clear], wanted_weights[clear]), SCORE)),
        )

    return Case(
        op=f"moe_route_learned {str(dtype).removeprefix('torch.')}", shape=f"{rows} x {TOTAL}", call=call, error=error,
        moved=logits.nbytes + rows * TOP_K * 12, floor="copy", target=BYTES_TARGET,
    )  # fmt: skip


def _row_cases(rows: int, hidden: int, width: int, device: torch.device | str) -> Iterator[Case]:
    case = expert_case(
        rows, hidden, 8, total=TOTAL, held=HELD, first=FIRST, top_k=TOP_K, dropped=0.2, seed=3, device=device
    )
    permuted, inverse, ends = moe.permute(case.x, case.ids, first=FIRST, experts=HELD)
    routed, touched = int(ends[-1]), int((inverse >= 0).any(1).sum())
    yield Case(
        op="moe_permute", shape=f"{rows} rows, {routed} routed", call=lambda: _permute(case),
        error=lambda: permutation_error(case, HELD), moved=(routed + touched) * hidden * BF16 + 2 * case.ids.nbytes,
        floor="copy", target=BYTES_TARGET,
    )  # fmt: skip
    yield _activation_case(permuted.shape[0], ends, width, device)
    yield _combine_case(case, inverse, routed, device)


def _activation_case(capacity: int, ends: torch.Tensor, width: int, device: torch.device | str) -> Case:
    gate_up, routed = normal(generator_of(6, device), capacity, 2 * width), int(ends[-1])

    def call() -> torch.Tensor:
        return moe.activate(gate_up, ends, limit=LIMIT)

    def error() -> float:
        gate, up = gate_up[:routed].double().chunk(2, dim=1)
        return worst((relative_error(call()[:routed], reference._swiglu(gate, up, LIMIT)), ONE_ROUNDING))

    return Case(
        op="moe_activation", shape=f"{routed} x {2 * width}", call=call, error=error,
        moved=routed * 3 * width * BF16, floor="copy", target=BYTES_TARGET,
    )  # fmt: skip


def _combine_case(case: ExpertCase, inverse: torch.Tensor, routed: int, device: torch.device | str) -> Case:
    rows, hidden = case.x.shape
    y = normal(generator_of(7, device), inverse.numel(), hidden)

    def call() -> torch.Tensor:
        return moe.combine(y, inverse, case.weights)

    def error() -> float:
        picked = torch.randperm(rows, device=device)[:SAMPLE]
        places = inverse[picked].long()
        terms = y[places.clamp(min=0)].double() * case.weights[picked].double().unsqueeze(-1)
        wanted = terms.masked_fill((places < 0).unsqueeze(-1), 0).sum(1)
        return worst((relative_error(call()[picked], wanted), ONE_ROUNDING))

    return Case(
        op="moe_combine", shape=f"{routed} routed to {rows}", call=call, error=error,
        moved=(routed + rows) * hidden * BF16 + 3 * inverse.nbytes, floor="copy", target=BYTES_TARGET,
    )  # fmt: skip


def _permute(case: ExpertCase) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return moe.permute(case.x, case.ids, first=case.first, experts=case.gate_up.shape[0])


def permutation_error(case: ExpertCase, held: int) -> float:
    """0 where `moe.permute` is a stable sort of the pairs held here, else infinity."""
    permuted, inverse, ends = moe.permute(case.x, case.ids, first=case.first, experts=held)
    local = (case.ids - case.first).flatten()
    here = (local >= 0) & (local < held)
    order = local[here].argsort(stable=True)
    wanted = torch.full_like(local, -1, dtype=torch.int32)
    places = torch.empty_like(order)
    places[order] = torch.arange(order.shape[0], device=order.device)
    wanted[here] = places.int()
    rows = torch.arange(case.x.shape[0], device=order.device).repeat_interleave(case.ids.shape[1])[here]
    return max(
        unless_equal(inverse.flatten(), wanted),
        unless_equal(ends.long(), torch.bincount(local[here], minlength=held).cumsum(0)),
        unless_equal(permuted[: order.shape[0]], case.x[rows[order]]),
    )


def product_error(
    found: torch.Tensor, x: torch.Tensor, ends: torch.Tensor, weight: QuantisedExperts, picked: torch.Tensor
) -> float:
    """Of some rows of the grouped product: the distance from the fp64 product of its dequantised operands."""
    rows = unpack_rows(pack_rows(x[picked]), x.shape[1], torch.float64)
    owners = torch.searchsorted(ends, picked.int(), right=True)
    wanted = torch.empty((picked.shape[0], weight.shape[1]), dtype=torch.float64, device=x.device)
    for expert in owners.unique().tolist():
        wanted[owners == expert] = rows[owners == expert] @ weight.expert(expert, torch.float64).T
    return worst((relative_error(found[picked], wanted), PRODUCT))


def _product_case(rows: int, weight: QuantisedExperts, plain: torch.Tensor, device: torch.device | str) -> Case:
    """Rows spread over the experts as a router does it: every expert has another number of them."""
    generator = generator_of(8, device)
    experts, columns, depth = weight.shape
    owners = torch.randint(0, experts, (rows,), generator=generator, device=device)
    ends = torch.bincount(owners, minlength=experts).cumsum(0).int()
    x = normal(generator, rows, depth)

    def call() -> torch.Tensor:
        return moe.grouped_gemm_fp8(x, ends, weight.codes, weight.scales)

    return Case(
        op="moe_grouped_gemm", shape=f"{experts} experts, {rows} x {depth} x {columns}", call=call,
        error=lambda: product_error(call(), x, ends, weight, torch.randperm(rows, device=device)[:SAMPLE]),
        operations=2.0 * rows * depth * columns,
        moved=x.nbytes + weight.codes.nbytes + weight.scales.nbytes + rows * columns * BF16,
        floor="fp8", target=PRODUCT_TARGET, peers=_peers(x, ends, weight, plain),
    )  # fmt: skip


def _peers(x: torch.Tensor, ends: torch.Tensor, weight: QuantisedExperts, plain: torch.Tensor) -> tuple[Peer, ...]:
    """torch's grouped products: bf16, and e4m3 with one scale a row, without the time of the quantisation."""
    codes, scales = x.to(torch.float8_e4m3fn), torch.ones(x.shape[0], device=x.device)
    columns = torch.ones(weight.shape[:2], device=x.device)

    def fp8() -> torch.Tensor:
        return torch._scaled_grouped_mm(
            codes, weight.codes.transpose(1, 2), scales, columns, offs=ends, out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )  # fmt: skip

    bf16 = Peer(name="torch bf16", call=lambda: F.grouped_mm(x, plain, offs=ends))
    try:
        fp8()
    except (RuntimeError, ValueError):
        # Builds of torch differ in the GPUs they have this product for.
        return (bf16,)
    return bf16, Peer(name="torch fp8", call=fp8)
