"""Holds plans against the reference backend: the same stage function, random inputs, errors by output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from trt_redknot.collectives import LocalCollectives
from trt_redknot.engine.tensorrt.profiles import Phase
from trt_redknot.engine.tensorrt.running import LoadedPlan, bind_sizes, empty_outputs
from trt_redknot.engine.tensorrt.samples import PlanSample
from trt_redknot.engine.tensorrt.specification import SCALE, PlanSpec
from trt_redknot.engine.tensorrt.stages import Stage, StageRun, run_stage
from trt_redknot.model.spec import LayerSpec
from trt_redknot.ops.reference.backend import ReferenceOps
from trt_redknot.ops.reference.packing import unpack_latents, unpack_rows
from trt_redknot.ops.tensorrt.experts import EXPERT_BLOCK
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


def verify_plan(spec: PlanSpec, run: Runner, *, seed: int) -> list[OutputError]:
    """Run a plan on random inputs and compare every output.

    Args:
        run: runs the plan: inputs by name on the CPU to outputs by name on the CPU.
    """
    assert not needs_other_ranks(spec), "a plan with collectives runs on all ranks together"
    sample = PlanSample(spec, seed)
    found = unpacked(spec, run(spec, sample.tensors))
    wanted = reference_outputs(sample, torch.float32)
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


def device_runner(plans: Mapping[str, LoadedPlan], device: torch.device) -> Runner:
    """Runs plans of an engine on a GPU, one at a time."""

    def run(spec: PlanSpec, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        inputs = {name: tensor.to(device) for name, tensor in tensors.items()}
        outputs = empty_outputs(spec, bind_sizes(spec, inputs), device)
        # A stream of its own, which must not overtake the copies.
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        plans[spec.kind.name].run(Phase.PREFILL, inputs, outputs, stream.cuda_stream)
        stream.synchronize()
        return {name: tensor.cpu() for name, tensor in outputs.items()}

    return run


def needs_other_ranks(spec: PlanSpec) -> bool:
    """Whether a plan has collectives, and one rank cannot run it alone."""
    return spec.world > 1 and spec.kind.stage in (Stage.SELECT, Stage.MIX)


def _tolerance(spec: PlanSpec, output: str) -> float:
    if spec.kind.stage is Stage.MIX:
        return EXPERT_TOLERANCE
    packed = any(tensor.name == output and tensor.type is ElementType.INT8 for tensor in spec.outputs)
    return PACKED_TOLERANCE if packed else FLOAT_TOLERANCE


def reference_outputs(sample: PlanSample, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What the reference backend gives for a sample, computing in `dtype`; nothing is packed."""
    spec, g = sample.spec, sample.spec.geometry
    tensors = {
        name: tensor.to(dtype) if tensor.dtype is torch.bfloat16 else tensor
        for name, tensor in unpacked(spec, sample.tensors, dtype).items()
    }
    tensors |= {
        name: _dequantised(tensors, name).to(dtype) for name in tensors.keys() & {"experts.gate_up", "experts.down"}
    }
    pools: dict[str, torch.Tensor] = {}
    if spec.kind.stage is Stage.COMPRESS:
        rows = tensors["slots"].shape[0]
        widths = {"entries": g.head_dim, "index_keys": g.index_dim}
        pools = {output.name: torch.empty(rows, widths[output.name], dtype=dtype) for output in spec.outputs}
        pools["entry_rows"] = torch.arange(rows)
    layers = spec.kind.layers(g)
    tau = float(tensors["tau"]) if "tau" in tensors else 1.0
    layer = LayerSpec(geometry=g, layer=layers[0] if layers else 0, tau=tau, first_expert=0)
    run = StageRun(spec=layer, tensors=tensors, full_rows=sample.full_rows, counts=(sample.own_rows,), pools=pools)
    results = run_stage(ReferenceOps(LocalCollectives()), spec.kind.stage, run)
    results |= {name: pool for name, pool in pools.items() if name != "entry_rows"}
    return results


def _dequantised(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    codes, scales = tensors[name].view(torch.float8_e4m3fn).float(), tensors[name + SCALE].transpose(1, 2)
    return codes * scales.repeat_interleave(EXPERT_BLOCK, dim=1).repeat_interleave(EXPERT_BLOCK, dim=2)


def unpacked(
    spec: PlanSpec, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Tensors with packed cache rows as numbers."""
    g = spec.geometry
    widths = {"index_keys": g.index_dim, "restored": g.projected // spec.world}
    result = dict(tensors)
    for name in ("latent", "latents", "entries"):
        if name in tensors and tensors[name].dtype in (torch.int8, torch.uint8):
            result[name] = unpack_latents(tensors[name].view(torch.uint8), g.head_dim, g.rope_dim, dtype)
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
