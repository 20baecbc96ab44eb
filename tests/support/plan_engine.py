"""An engine that answers by interpreted plans, from the files of a torch engine, and a network that plans can serve."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tests.support.interpreter import Interpreter
from tests.support.plans import BFLOAT16
from trt_redknot import Engine
from trt_redknot.collectives import Collectives, from_communicator
from trt_redknot.engine.loading import LoadedRank, load_rank
from trt_redknot.engine.tensorrt.backend import PlanBackend, PlanRuntime
from trt_redknot.engine.tensorrt.build import plan_specs
from trt_redknot.engine.tensorrt.platform import Platform
from trt_redknot.engine.tensorrt.profiles import PlanLimits
from trt_redknot.engine.tensorrt.running import aligned
from trt_redknot.engine.tensorrt.specification import PlanFormat, PlanSpec
from trt_redknot.engine.weights import quantised
from trt_redknot.model.layers import Weights
from trt_redknot.ops.experts import quantise_experts

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

# The head sizes that our kernels serve; everything else as small as every kind of layer allows.
VOCAB = 97
OPTIONS = {
    "vocab": VOCAB,
    "kinds": "scchcs", "hash_layers": 3, "groups": 2, "heads_per_group": 2, "hca": 8, "window": 12, "topk": 4,
    "hidden": 128, "head_dim": 512, "rope_dim": 64, "index_heads": 64, "index_dim": 128, "expert_width": 128,
}  # fmt: skip


def write_plan_network(directory: Path, seed: int) -> Path:
    """A checkpoint whose expert weights are what FP8 blocks can hold, so that plans and ops read the same numbers."""
    # Here, because it brings transformers along, which the ranks of a job need not wait for.
    from tests.support.networks import NetworkOptions, network, write_network

    model = network(NetworkOptions(**OPTIONS, seed=seed))  # type: ignore[arg-type]
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                weight = quantise_experts(tensor)
                tensor.copy_(torch.stack([weight.expert(each, tensor.dtype) for each in range(len(tensor))]))
    return write_network(model, directory)


@dataclass(frozen=True, kw_only=True)
class PlanFiles:
    """A rank of an engine whose stages plans can run.

    Attributes:
        layers, shared: its weights as plans read them, at addresses that TensorRT takes.
    """

    loaded: LoadedRank
    layers: list[Weights]
    shared: Weights
    collectives: Collectives
    specs: tuple[PlanSpec, ...]
    limits: PlanLimits

    def engine(self, runtime: PlanRuntime) -> Engine:
        """The engine, its plans run by `runtime`."""
        return Engine(
            self.loaded.manifest, self.loaded.geometry, self.layers, self.shared, self.collectives,
            self.loaded.device, plans=PlanBackend(specs=self.specs, limits=self.limits, runtime=runtime),
        )  # fmt: skip

    def interpreter(self, platform: Platform) -> Interpreter:
        return Interpreter(platform, self.specs, self.limits, self.collectives, self.loaded.manifest.torch_dtype)


def load_for_plans(directory: Path, comm: Intracomm | None, form: PlanFormat = BFLOAT16) -> PlanFiles:
    """This rank of the torch engine in `directory`."""
    collectives = from_communicator(comm)
    loaded = load_rank(directory, collectives.rank, collectives.size, torch.device("cpu"), verify=False)
    return PlanFiles(
        loaded=loaded,
        layers=[_aligned(quantised(dict(layer))) for layer in loaded.layers],
        shared=_aligned(loaded.shared),
        collectives=collectives,
        specs=plan_specs(loaded.geometry, world=collectives.size, format=form),
        limits=PlanLimits(chunk_rows=loaded.manifest.chunk_rows, max_length=512, decode_rows=2),
    )


def _aligned(tensors: Weights) -> Weights:
    return {name: aligned(tensor) for name, tensor in tensors.items()}
