"""Every plan of nano, Flash and Pro is emitted and compiled by a TensorRT builder, plugins cut."""

from __future__ import annotations

import pytest

from tests.support.plans import BFLOAT16, PACKED, WORLDS, specs
from trt_redknot.engine.tensorrt.builder import BuilderSettings, PlanBuilder
from trt_redknot.engine.tensorrt.platform import Platform
from trt_redknot.engine.tensorrt.profiles import PlanLimits
from trt_redknot.engine.tensorrt.progress import STEPS_PER_PLAN
from trt_redknot.engine.tensorrt.specification import PlanFormat, PlanSpec
from trt_redknot.ops.tensorrt.plugins import CutPort
from trt_redknot.ops.tensorrt.tensors import network_dims

LIMITS = PlanLimits(chunk_rows=4096, max_length=440_000)
PLANS = [
    pytest.param(spec, id=f"{name}-{spec.kind.name}{'-packed' if form is PACKED else ''}")
    for name in WORLDS
    for form in (BFLOAT16, PACKED)
    for spec in specs(name, form)
    # Packed caches change what plugins read; native layers of the released sizes are the same.
    if form is BFLOAT16 or name == "nano"
]


def test_the_plans_of_a_network_are_those_of_its_layers() -> None:
    stages = ["project", "compress", "select", "attend"]
    found = {name: [spec.kind.name for spec in specs(name)] for name in WORLDS}
    assert found["pro"] == [
        "embed", "project-hca", "compress-hca", "attend-hca", *(f"{stage}-csa" for stage in stages), "mix-hash",
        "mix-learned", "head",
    ]  # fmt: skip
    assert found["flash"] == found["nano"]
    assert sorted(found["flash"]) == sorted([*found["pro"], "project-sliding", "attend-sliding"])


@pytest.mark.parametrize("spec", PLANS)
def test_a_tensorrt_builder_compiles_the_plan(platform: Platform, spec: PlanSpec) -> None:
    builder = PlanBuilder(platform, LIMITS, BuilderSettings(optimization_level=0))
    network, port = builder.define(spec)
    assert isinstance(port, CutPort)
    tensors = [network.get_input(index) for index in range(network.num_inputs)]
    tensors += [network.get_output(index) for index in range(network.num_outputs)]
    cuts = port.added_inputs.keys() | port.added_outputs.keys()
    found = {tensor.name: (tensor.dtype, tuple(tensor.shape)) for tensor in tensors if tensor.name not in cuts}
    assert found == {
        tensor.name: (tensor.type.of(platform.module), network_dims(tensor.shape))
        for tensor in (*spec.inputs, *spec.outputs)
    }
    steps: list[int] = []
    plan = builder.build(spec, steps.append)
    assert sum(steps) == STEPS_PER_PLAN
    assert min(steps) > 0
    # The plan cannot be opened without a GPU; what can be seen is that every name is in it.
    missing = [tensor.name for tensor in tensors if tensor.name.encode() not in plan]
    assert not missing


def test_packed_plans_differ_from_others_in_their_caches_only() -> None:
    for plain, packed in zip(specs("nano"), specs("nano", PACKED), strict=True):
        pairs = zip((*plain.inputs, *plain.outputs), (*packed.inputs, *packed.outputs), strict=True)
        changed = {a.name for a, b in pairs if a != b}
        assert changed <= {"latent", "latents", "entries", "index_keys", "restored"}, plain.kind.name
    assert PlanFormat() != PACKED
