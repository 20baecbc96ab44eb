"""The verification of plans: a backend that rounds as plans do passes, one that is wrong does not."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
import torch

from tests.artifacts.support import together
from tests.support.plans import BFLOAT16, PACKED, specs
from trt_redknot.collectives import Collectives, LocalCollectives
from trt_redknot.engine.tensorrt.running import bind_sizes
from trt_redknot.engine.tensorrt.samples import PlanSample
from trt_redknot.engine.tensorrt.specification import PlanSpec, needs_other_ranks
from trt_redknot.engine.tensorrt.verification import OutputError, reference_outputs, verify_plan, worst
from trt_redknot.ops.reference.packing import pack_pool_latents, pack_rows
from trt_redknot.ops.tensorrt.tensors import ElementType

PLANS = [
    pytest.param(spec, id=f"{spec.kind.name}-{world}{'-packed' if form is PACKED else ''}")
    for world in (1, 2)
    for form in (BFLOAT16, PACKED)
    for spec in specs("nano", form, world=world)
    if not needs_other_ranks(spec)
]


class Rounding:
    """Runs a plan as the reference in bf16, and stores what a plan stores."""

    def __init__(self, seed: int, collectives: Collectives | None = None) -> None:
        self.seed = seed
        self.collectives = collectives or LocalCollectives()

    def __call__(self, spec: PlanSpec, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        sample = PlanSample(spec, self.seed, rank=self.collectives.rank)
        assert all(torch.equal(sample.tensors[name], tensor) for name, tensor in tensors.items())
        outputs = reference_outputs(sample, torch.bfloat16, self.collectives)
        for tensor in spec.outputs:
            if tensor.type is ElementType.INT8:
                values = outputs[tensor.name]
                is_key = tensor.name == "index_keys"
                outputs[tensor.name] = (
                    pack_rows(values) if is_key else pack_pool_latents(values, spec.geometry.rope_dim)
                )
            if tensor.name == "faults":
                outputs["faults"] = torch.zeros(1, dtype=torch.int32)
        return outputs


@pytest.mark.parametrize("spec", PLANS)
def test_rounding_to_bf16_passes_and_samples_fit_the_plan(spec: PlanSpec) -> None:
    seed = random.randrange(2**31)
    bind_sizes(spec, PlanSample(spec, seed).tensors)
    errors = verify_plan(spec, Rounding(seed), seed=seed)
    assert {error.output for error in errors} == {tensor.name for tensor in spec.outputs}
    assert all(error.passed for error in errors), (seed, errors)


@pytest.mark.parametrize("spec", specs("nano", world=1), ids=lambda spec: spec.kind.name)
def test_an_output_with_one_wrong_row_does_not_pass(spec: PlanSpec) -> None:
    seed = random.randrange(2**31)

    def wrong(spec: PlanSpec, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        outputs = Rounding(seed)(spec, tensors)
        for name, tensor in outputs.items():
            if tensor.is_floating_point():
                outputs[name] = torch.cat((-tensor[:1], tensor[1:]))
            else:
                outputs[name] = torch.cat((tensor[:1] + 1000, tensor[1:]))
        return outputs

    errors = verify_plan(spec, wrong, seed=seed)
    kept = [error for error in errors if error.passed]
    # In `mixed` the row whose experts were spoilt too is counted with the choices.
    assert [error.output for error in kept] == (["mixed"] if spec.kind.stage == "mix" else []), (seed, errors)


def test_nan_and_wrong_shapes_do_not_pass() -> None:
    spec, seed = specs("nano", world=1)[0], 5

    def empty(spec: PlanSpec, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor[1:] for name, tensor in Rounding(seed)(spec, tensors).items()}

    def poisoned(spec: PlanSpec, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: torch.full_like(tensor, torch.nan) for name, tensor in Rounding(seed)(spec, tensors).items()}

    for run in (empty, poisoned):
        assert not any(error.passed for error in verify_plan(spec, run, seed=seed))


@pytest.mark.parametrize(
    "spec", [spec for spec in specs("nano", world=2) if needs_other_ranks(spec)], ids=lambda spec: spec.kind.name
)
def test_plans_with_collectives_are_verified_by_all_ranks_together(spec: PlanSpec) -> None:
    """Every rank has inputs of its own, and what is wrong on one rank is seen by the ranks that get its rows."""
    seeds = [random.randrange(2**31) for _ in range(2)]
    wrong = spec.kind.stage == "select"

    def work(ranks: Collectives) -> list[OutputError]:
        seed = seeds[ranks.rank]
        return verify_plan(spec, Rounding(seed, ranks), seed=seed, collectives=ranks)

    def spoilt(ranks: Collectives) -> list[OutputError]:
        seed = seeds[ranks.rank]

        def run(spec: PlanSpec, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            outputs = Rounding(seed, ranks)(spec, tensors)
            # As if the first rank's rows had not been gathered.
            name = "selected" if wrong else "mixed"
            return {**outputs, name: outputs[name].roll(len(outputs[name]) // 2 or 1, 0)}

        return verify_plan(spec, run, seed=seed, collectives=ranks)

    found = together(2, work)
    assert all(error.passed for errors in found for error in checked(errors)), (seeds, found)
    assert {error.output for error in checked(found[0])} == {tensor.name for tensor in spec.outputs}
    merged = worst([checked(errors) for errors in together(2, spoilt)])
    assert not all(error.passed for error in merged)


def checked(errors: object) -> list[OutputError]:
    assert isinstance(errors, list), errors
    return errors


def test_the_worst_rank_is_what_is_shown() -> None:
    def errors(*values: float) -> list[OutputError]:
        return [OutputError(plan="p", output=str(i), error=value, tolerance=0.1) for i, value in enumerate(values)]

    merged = worst([errors(0.0, 0.2, float("nan")), errors(0.05, 0.1, 0.0)])
    assert [error.error for error in merged[:2]] == [0.05, 0.2]
    assert not merged[2].passed
