"""Routers and experts on the GPU; meaning and arguments are those of `ops/reference/moe.py`.

Activations are bf16, router sums fp32. Nothing synchronises, except `route_hash` without a fault cell.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from trt_redknot.ops.cuda.elementwise import call_op
from trt_redknot.ops.experts import QuantisedExperts

_SCORING = {"sqrtsoftplus": 0, "sigmoid": 1, "softmax": 2}
# Up to so many rows read weights for themselves: of more, some share an expert.
_FEW_ROWS = 4
FAULT_TOKEN = 1
FAULT_EXPERT = 2


def route_learned(
    x_RM: torch.Tensor,
    weight_XM: torch.Tensor,
    bias_X: torch.Tensor,
    *,
    top_k: int,
    scale: float,
    scoring: str,
    tau: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(expert ids int64 [R, k], weights fp32 [R, k]), heaviest first; what adaptive fanout drops is -1 with 0."""
    ids, weights = _outputs(x_RM, top_k)
    logits = F.linear(x_RM, weight_XM.to(x_RM.dtype))
    call_op("moe_route_learned", ids, weights, logits, bias_X.float(), scale, tau, _SCORING[scoring])
    return ids, weights


def route_hash(
    x_RM: torch.Tensor,
    weight_XM: torch.Tensor,
    table_Vk: torch.Tensor,
    tokens_R: torch.Tensor,
    *,
    scale: float,
    scoring: str,
    faults: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by the token's row of a fixed table.

    A token outside the table gets experts -1 with weight 0.

    Args:
        faults: int32 [1] that takes FAULT_TOKEN | FAULT_EXPERT, to be read later; without it the op waits for the
            device.

    Raises:
        ValueError: a token or expert is out of range and no fault cell was given.
    """
    ids, weights = _outputs(x_RM, table_Vk.shape[1])
    cell = torch.zeros(1, dtype=torch.int32, device=x_RM.device) if faults is None else faults
    logits = F.linear(x_RM, weight_XM.to(x_RM.dtype))
    call_op("moe_route_hash", ids, weights, cell, logits, table_Vk.long(), tokens_R, scale, _SCORING[scoring])
    if faults is None and int(cell) & FAULT_TOKEN:
        raise ValueError(f"token ids must be in [0, {table_Vk.shape[0]})")
    if faults is None and int(cell) & FAULT_EXPERT:
        raise ValueError(f"the hash table names experts outside [0, {weight_XM.shape[0]})")
    return ids, weights


def permute(
    x_RM: torch.Tensor,
    ids_Rk: torch.Tensor,
    *,
    first: int,
    experts: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows ordered by expert `first` .. `first + experts - 1`, inside an expert by row.

    Returns:
        Permuted rows bf16 [R * k, M] (rows from the last end on hold nothing), the place of every row and slot among
        them int32 [R, k] (-1: not held here), one past the last permuted row of each expert int32 [experts].
    """
    rows, slots = ids_Rk.shape
    permuted = x_RM.new_empty((rows * slots, x_RM.shape[1]))
    inverse = torch.empty((rows, slots), dtype=torch.int32, device=x_RM.device)
    ends = torch.empty(experts, dtype=torch.int32, device=x_RM.device)
    call_op("moe_permute", permuted, inverse, ends, x_RM, ids_Rk, first)
    return permuted, inverse, ends


def activate(gate_up: torch.Tensor, ends: torch.Tensor, *, limit: float) -> torch.Tensor:
    """Clamped SwiGLU of permuted rows bf16 [P, 2 F]: bf16 [P, F]; rows from the last end on hold nothing."""
    out = gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))
    call_op("moe_activation", out, gate_up, ends, limit)
    return out


def grouped_gemm_fp8(
    x: torch.Tensor, ends: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor
) -> torch.Tensor:
    """Permuted rows bf16 [P, K] through their experts' e4m3 weights [E, N, K]: bf16 [P, N].

    Rows are quantised as :func:`trt_redknot.ops.reference.packing.pack_rows` does. Those from the last end on hold
    nothing.

    Raises:
        EngineError: the GPU is no Hopper, or K or N is no multiple of 128.
    """
    out = x.new_empty((x.shape[0], weight.shape[1]))
    call_op("moe_grouped_gemm", out, x, ends, weight, weight_scale)
    return out


def combine(y: torch.Tensor, inverse: torch.Tensor, weights_Rk: torch.Tensor) -> torch.Tensor:
    """Weighted sum of each row's permuted rows bf16 [P, M], in slot order, fp32 inside: bf16 [R, M]."""
    out = y.new_empty((inverse.shape[0], y.shape[1]))
    call_op("moe_combine", out, y, inverse, weights_Rk.float())
    return out


def experts(
    x_RM: torch.Tensor,
    ids_Rk: torch.Tensor,
    weights_Rk: torch.Tensor,
    gate_up: torch.Tensor | QuantisedExperts,
    down: torch.Tensor | QuantisedExperts,
    *,
    first: int,
    limit: float,
) -> torch.Tensor:
    """Weighted sum over the experts held here: gate_up [E, 2 F, M], down [E, M, F], bf16 or FP8 -> bf16 [R, M]."""
    if x_RM.shape[0] == 0:
        return torch.empty_like(x_RM)
    if x_RM.shape[0] <= _FEW_ROWS and gate_up.shape[0]:
        return few_rows(x_RM, ids_Rk, weights_Rk, gate_up, down, first=first, limit=limit)
    permuted, inverse, ends = permute(x_RM, ids_Rk, first=first, experts=gate_up.shape[0])
    wide = _grouped_gemm(permuted, ends, gate_up)
    # Each of these is several times as large as the rows: no more of them are held than a product needs.
    del permuted
    hidden = activate(wide, ends, limit=limit)
    del wide
    return combine(_grouped_gemm(hidden, ends, down), inverse, weights_Rk)


def few_rows(
    x_RM: torch.Tensor,
    ids_Rk: torch.Tensor,
    weights_Rk: torch.Tensor,
    gate_up: torch.Tensor | QuantisedExperts,
    down: torch.Tensor | QuantisedExperts,
    *,
    first: int,
    limit: float,
) -> torch.Tensor:
    """`experts` without sorting: every row reads the weights of its own experts, in two launches."""
    out = torch.empty_like(x_RM)
    inner = x_RM.new_empty((*ids_Rk.shape, down.shape[2]))
    (up_codes, up_scales), (down_codes, down_scales) = _stored(gate_up), _stored(down)
    call_op(
        "moe_few_rows", out, inner, x_RM, ids_Rk, weights_Rk.float(), up_codes, down_codes, up_scales, down_scales,
        first, limit,
    )  # fmt: skip
    return out


def _stored(weight: torch.Tensor | QuantisedExperts) -> tuple[torch.Tensor, torch.Tensor | None]:
    return (weight.codes, weight.scales) if isinstance(weight, QuantisedExperts) else (weight, None)


def shared_expert(
    x_RM: torch.Tensor, gate_up: torch.Tensor, down_MF: torch.Tensor, every_row: torch.Tensor, *, limit: float
) -> torch.Tensor:
    """Clamped SwiGLU of all rows: bf16 [R, M].

    Args:
        gate_up: bf16 [2 F, M], gate first.
        every_row: int32 [1], no less than R.
    """
    return F.linear(activate(F.linear(x_RM, gate_up), every_row, limit=limit), down_MF)


def _grouped_gemm(x: torch.Tensor, ends: torch.Tensor, weight: torch.Tensor | QuantisedExperts) -> torch.Tensor:
    if isinstance(weight, QuantisedExperts):
        return grouped_gemm_fp8(x, ends, weight.codes, weight.scales)
    return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)


def _outputs(x_RM: torch.Tensor, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (x_RM.shape[0], slots)
    return x_RM.new_empty(shape, dtype=torch.int64), x_RM.new_empty(shape, dtype=torch.float32)
