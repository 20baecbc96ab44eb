"""An engine that answers by interpreted plans, from the files of a torch engine, and a network that plans can serve."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tests.support.interpreter import Interpreter
from tests.support.networks import NetworkOptions, network, write_network
from trt_redknot import Engine
from trt_redknot.collectives import from_communicator
from trt_redknot.engine.loading import load_rank
from trt_redknot.engine.tensorrt.build import fp8_experts, plan_specs
from trt_redknot.engine.tensorrt.execution import PlanBackend
from trt_redknot.engine.tensorrt.platform import Platform
from trt_redknot.engine.tensorrt.profiles import PlanLimits
from trt_redknot.engine.tensorrt.specification import PlanFormat
from trt_redknot.ops.cuda.moe import quantise_weight
from trt_redknot.ops.tensorrt.experts import EXPERT_BLOCK

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

# The head sizes that our kernels serve; everything else as small as every kind of layer allows.
OPTIONS = NetworkOptions(
    kinds="scchcs", hash_layers=3, groups=2, heads_per_group=2, hca=8, window=12, topk=4, hidden=128, head_dim=512,
    rope_dim=64, index_heads=64, index_dim=128, expert_width=128,
)  # fmt: skip


def write_plan_network(directory: Path, seed: int) -> Path:
    """A checkpoint whose expert weights are what FP8 blocks can hold, so that plans and ops read the same numbers."""
    model = network(NetworkOptions(**{**OPTIONS.__dict__, "seed": seed}))
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                codes, scales = quantise_weight(tensor)
                spread = scales.transpose(1, 2).repeat_interleave(EXPERT_BLOCK, 1).repeat_interleave(EXPERT_BLOCK, 2)
                tensor.copy_(codes.float() * spread)
    return write_network(model, directory)


def open_by_plans(directory: Path, comm: Intracomm | None, platform: Platform) -> tuple[Engine, Interpreter]:
    """This rank of the engine in `directory`, its stages run by plans. Collective."""
    collectives = from_communicator(comm)
    loaded = load_rank(directory, collectives.rank, collectives.size, torch.device("cpu"), verify=False)
    specs = plan_specs(loaded.geometry, world=collectives.size, format=PlanFormat())
    manifest = loaded.manifest
    limits = PlanLimits(chunk_rows=manifest.chunk_rows, max_length=512, decode_rows=2)
    interpreter = Interpreter(platform, specs, limits, collectives, manifest.torch_dtype)
    engine = Engine(
        manifest, loaded.geometry, [fp8_experts(dict(layer)) for layer in loaded.layers], loaded.shared, collectives,
        loaded.device, plans=PlanBackend(specs=specs, limits=limits, runtime=interpreter),
    )  # fmt: skip
    return engine, interpreter
