"""Holds plans against the reference backend: the same stage function, random inputs, errors by output."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trt_redknot.collectives import Collectives, LocalCollectives
from trt_redknot.engine.tensorrt.backend import PlanRuntime
from trt_redknot.engine.tensorrt.running import aligned
from trt_redknot.engine.tensorrt.samples import PlanSample
from trt_redknot.engine.tensorrt.specification import PlanSpec, needs_other_ranks
from trt_redknot.engine.tensorrt.stages import Stage, StageRun, run_stage
from trt_redknot.engine.weights import SCALE
from trt_redknot.model.spec import LayerSpec
from trt_redknot.ops.experts import QuantisedExperts
from trt_redknot.ops.reference.backend import ReferenceOps
from trt_redknot.ops.reference.packing import unpack_pool_latents, unpack_rows
from trt_redknot.ops.tensorrt.tensors import ElementType

# Root mean square of the error over that of the reference. bf16 keeps 8 bits; FP8 experts round activations to 4.
FLOAT_TOLERANCE = 0.03
EXPERT_TOLERANCE = 0.06
# Packed cache rows keep 4 bits.
PACKED_TOLERANCE = 0.06
# Near ties of a router or of the Indexer may be decided the other way, and there are few choices in a sample.
CHOICE_TOLERANCE = 0.1

Runner = Callable[[PlanSpec, Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class OutputError:
    """One output of one plan.

    Attributes:
        error: relative root mean square error; of choices, the share that differs.
    """

    plan: str
    output: str
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        # NaN passes no comparison.
        return self.error <= self.tolerance


def verify_plan(spec: PlanSpec, run: Runner, *, seed: int, collectives: Collectives | None = None) -> list[OutputError]:
    """Run a plan on random inputs and compare every output. Collective where the plan has collectives.

    Args:
        run: runs the plan: inputs by name on the CPU to outputs by name on the CPU.
        seed: of this rank's inputs.
        collectives: of the ranks that run the plan together, on tensors of the CPU; None: one rank.
    """
    ranks = collectives or LocalCollectives()
    assert ranks.size == spec.world or not needs_other_ranks(spec), "a plan with collectives runs on all ranks together"
    sample = PlanSample(spec, seed, rank=ranks.rank)
    found = unpacked(spec, run(spec, sample.tensors))
    wanted = reference_outputs(sample, torch.float32, ranks)
    same = None
    if spec.kind.stage is Stage.MIX:
        # Rows that a near tie sent to other experts are counted as choices, not as arithmetic.
        same = (found["expert_ids"].sort(1).values == wanted["expert_ids"].sort(1).values).all(1)
    errors = []
    for name, reference in wanted.items():
        if reference.is_floating_point():
            error, tolerance = _float_error(found[name], reference, same), _tolerance(spec, name)
        else:
            error, tolerance = _choice_error(found[name], reference), CHOICE_TOLERANCE
        errors.append(OutputError(plan=spec.kind.name, output=name, error=error, tolerance=tolerance))
    if "faults" in found:
        count = float(found["faults"].count_nonzero())
        errors.append(OutputError(plan=spec.kind.name, output="faults", error=count, tolerance=0))
    return errors


def device_runner(runtime: PlanRuntime, device: torch.device) -> Runner:
    """Runs plans of an engine on a GPU, one at a time, as a request does."""

    def run(spec: PlanSpec, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        outputs = runtime.run(spec.kind.name, {name: aligned(tensor.to(device)) for name, tensor in tensors.items()})
        return {name: tensor.cpu() for name, tensor in outputs.items()}

    return run


def worst(ranks: Sequence[Sequence[OutputError]]) -> list[OutputError]:
    """Of every output the largest error of any rank; NaN is larger than any number."""
    return [
        max(same, key=lambda error: math.inf if math.isnan(error.error) else error.error)
        for same in zip(*ranks, strict=True)
    ]


def _tolerance(spec: PlanSpec, output: str) -> float:
    if spec.kind.stage is Stage.MIX:
        return EXPERT_TOLERANCE
    packed = any(tensor.name == output and tensor.type is ElementType.INT8 for tensor in spec.outputs)
    return PACKED_TOLERANCE if packed else FLOAT_TOLERANCE


def reference_outputs(
    sample: PlanSample, dtype: torch.dtype, collectives: Collectives | None = None
) -> dict[str, torch.Tensor]:
    """What the reference backend gives for a sample, computing in `dtype`; nothing is packed. Collective where the plan
    has collectives."""
    spec, g = sample.spec, sample.spec.geometry
    tensors = {
        name: tensor.to(dtype) if tensor.dtype is torch.bfloat16 else tensor
        for name, tensor in unpacked(spec, sample.tensors, dtype).items()
    }
    inputs: dict[str, Any] = dict(tensors)
    inputs |= {
        name: QuantisedExperts(codes=tensors[name].view(torch.float8_e4m3fn), scales=tensors[name + SCALE])
        for name in tensors.keys() & {"experts.gate_up", "experts.down"}
    }
    pools: dict[str, torch.Tensor] = {}
    if spec.kind.stage is Stage.COMPRESS:
        rows = tensors["slots"].shape[0]
        widths = {"entries": g.head_dim, "index_keys": g.index_dim}
        pools = {output.name: torch.empty(rows, widths[output.name], dtype=dtype) for output in spec.outputs}
        pools["entry_rows"] = torch.arange(rows)
    layers = spec.kind.layers(g)
    tau = float(tensors["tau"]) if "tau" in tensors else 1.0
    layer = LayerSpec(geometry=g, layer=layers[0] if layers else 0, tau=tau, first_expert=sample.first_expert)
    ranks = collectives or LocalCollectives()
    run = StageRun(
        spec=layer, tensors=inputs, full_rows=sample.full_rows, counts=(sample.own_rows,) * ranks.size, pools=pools
    )
    results = run_stage(ReferenceOps(ranks), spec.kind.stage, run)
    results |= {name: pool for name, pool in pools.items() if name != "entry_rows"}
    return results


def unpacked(
    spec: PlanSpec, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Tensors with packed cache rows as numbers."""
    g = spec.geometry
    widths = {"index_keys": g.index_dim, "restored": g.projected // spec.world}
    result = dict(tensors)
    for name in ("latent", "latents", "entries"):
        if name in tensors and tensors[name].dtype in (torch.int8, torch.uint8):
            result[name] = unpack_pool_latents(tensors[name].view(torch.uint8), g.head_dim, g.rope_dim, dtype)
    for name, width in widths.items():
        if name in tensors and tensors[name].dtype in (torch.int8, torch.uint8):
            result[name] = unpack_rows(tensors[name].view(torch.uint8), width, dtype)
    return result


def _float_error(found: torch.Tensor, wanted: torch.Tensor, rows: torch.Tensor | None) -> float:
    if found.shape != wanted.shape:
        return float("inf")
    if rows is not None:
        found, wanted = found[rows], wanted[rows]
    difference = (found.double() - wanted.double()).square().mean().sqrt()
    return float(difference / wanted.double().square().mean().sqrt())


def _choice_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Share of the choices of a row that the other does not make, whatever their order."""
    if found.shape != wanted.shape:
        return float("inf")
    differ = sum(
        (Counter(one) - Counter(other)).total() for one, other in zip(found.tolist(), wanted.tolist(), strict=True)
    )
    return differ / max(1, wanted.numel())
