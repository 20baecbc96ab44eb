"""The TTFT bench: checks that the arms agree, then times them at every length, and shows what it found."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from trt_redknot.artifacts.formats import ArtifactFormat
from trt_redknot.cli.output import Output
from trt_redknot.collectives import Collectives, LocalCollectives, from_communicator
from trt_redknot.collectives.device import connect
from trt_redknot.config.geometry import ModelGeometry, RouterKind
from trt_redknot.config.policy import ReusePolicy
from trt_redknot.config.released import released_geometry
from trt_redknot.engine.chunking import free_memory
from trt_redknot.engine.loading import find_device
from trt_redknot.engine.manifest import ExpertStorage
from trt_redknot.engine.tiles import TileOptions
from trt_redknot.errors import EngineError
from trt_redknot.evaluation.fitting import first_layers, layers_that_fit
from trt_redknot.evaluation.machine import Gpu, Machine
from trt_redknot.evaluation.metering import Ceilings
from trt_redknot.evaluation.standin import StandInArtifact, StandInCollectives, StandInRank, make_rank
from trt_redknot.evaluation.ttft import document_length
from trt_redknot.evaluation.ttft_check import Agreement, check_arms, checked_geometry
from trt_redknot.evaluation.ttft_decode import decode_room
from trt_redknot.evaluation.ttft_report import print_check, print_run, render_page
from trt_redknot.evaluation.ttft_run import measure_length
from trt_redknot.reports.page import write_page

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """A whole network is checked, also where the rank that is timed has no fellows: few layers and experts, so that it
    has room on one GPU. The fences and, between them, a reusable layer of each kind are in it.

    Attributes:
        length: tokens; more compressed entries than the Indexer selects.
        chunks: rows of a chunk, at most, by turns.
        runs: prompts; 0: no check.
    """

    layers: int = 9
    experts: int = 32
    vocab: int = 4096
    documents: int = 4
    length: int = 4 * 1024 + 256
    chunks: tuple[int, ...] = (8192, 1536, 640)
    runs: int = 12


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What to measure.

    Attributes:
        tp: ranks of the group that a lone rank belongs to; real ranks count themselves.
        layers: only so many layers (fences kept), or as many as fit the GPU's memory; None: all.
        lengths: tokens of the requests; none: only the check.
        chunk_rows: rows of a chunk, at most; None: what memory has room for.
        place: where artifacts lie; `read_ahead` layers are copied ahead where that is host memory.
        decode: tokens to decode after each arm at every length; 0: none.
        json_file, page: where the figures go.
    """

    geometry: Literal["flash", "pro"] = "flash"
    tp: int = 8
    layers: int | Literal["fit"] | None = None
    lengths: tuple[int, ...] = (65536,)
    documents: int = 8
    budgets: tuple[float, ...] = (0.10,)
    tail: int = 32768
    chunk_rows: int | None = None
    repeat: int = 5
    place: Literal["device", "host"] = "device"
    form: ArtifactFormat = ArtifactFormat.BFLOAT16
    experts: ExpertStorage = "same"
    read_ahead: int = 3
    decode: int = 32
    check: CheckOptions = CheckOptions()
    json_file: Path | None = None
    page: Path | None = None

    @property
    def tiles(self) -> TileOptions:
        return TileOptions(depth=self.read_ahead if self.place == "host" else 0)

    def network(self, ranks: int, free_bytes: int) -> ModelGeometry:
        """What is timed.

        Args:
            ranks: that share it.
            free_bytes: of the GPU that has least.

        Raises:
            EngineError: as many layers as fit are too few.
        """
        geometry = released_geometry(self.geometry)
        if self.layers is None:
            return geometry
        if self.layers != "fit":
            return first_layers(geometry, self.layers)
        length = max(self.lengths, default=self.check.length)
        fitting = layers_that_fit(
            geometry, tp_size=ranks, length=length, experts=self.experts, free_bytes=free_bytes
        )  # fmt: skip
        return first_layers(geometry, fitting)

    @property
    def arms(self) -> dict[str, ReusePolicy | None]:
        policies = {
            f"{epilogue}, budget {budget:.0%}": ReusePolicy(budget=budget, tail=self.tail, epilogue=epilogue)
            for budget in self.budgets
            for epilogue in ("full", "active")
        }
        return {"recompute": None, **policies, "fast": ReusePolicy(budget=0.05, tail=4096, epilogue="active")}


def run_bench(options: BenchOptions, comm: Intracomm | None) -> None:
    """Check and time both arms on this process's GPU, and show and write what was found. Collective.

    Args:
        comm: of the ranks, each with a GPU of its own; None: one rank of `options.tp`, without its fellows.

    Raises:
        EngineError: protected rows are further from recomputation than rounding explains. That is shown before
            anything is timed, and the error comes when all is shown and written.
        ReportError: a file cannot be written.
    """
    device = find_device("cuda", comm)
    torch.cuda.set_device(device)
    control = from_communicator(comm)
    out = Output(control.rank)
    real = None if comm is None else connect(control, device)
    free = min(int(reply) for reply in control.exchange(str(free_memory(device)).encode()))
    network = options.network(options.tp if comm is None else control.size, free)
    result = measure(options, network, Gpu(device), real, out)
    if control.rank == 0:
        if options.json_file is not None:
            write_page(options.json_file, json.dumps(result, indent=1) + "\n")
        if options.page is not None and result["lengths"]:
            write_page(options.page, render_page([result]))
    faults = [fault for check in result["check"] for fault in check["faults"]]
    if faults:
        raise EngineError(
            "a request with all documents protected is not what recomputation gives", expected="distances of rounding",
            found="; ".join(faults),
            remedy="The times above are those of wrong answers. Run tests/ops/cuda on this machine.",
        )  # fmt: skip


@torch.inference_mode()
def measure(
    options: BenchOptions, geometry: ModelGeometry, machine: Machine, real: Collectives | None, out: Output
) -> dict[str, Any]:
    """What a run found, as JSON values; printed as well, what the check found at once. Collective.

    Args:
        real: collectives between real ranks; None: there is one of `options.tp`.
    """
    result: dict[str, Any] = {
        "evidence": "measured",
        "ranks": options.tp if real is None else real.size,
        "real_ranks": real is not None,
        "geometry": options.geometry,
        "layers": geometry.layers,
        "layers_of": released_geometry(options.geometry).layers,
        "experts": options.experts,
        "tail": options.tail,
        "artifacts": {"place": options.place, "format": options.form.value, "read_ahead": options.tiles.depth},
        "machine": machine.describe(),
        "check": [],
        "lengths": [],
    }
    if options.check.runs:
        alone = LocalCollectives() if real is None else real
        checks = [_check(options, geometry, machine, alone, routers) for routers in RouterKind]
        result["check"] = [check.to_json() for check in checks]
        print_check(out, result)
    if options.lengths:
        room = decode_room(geometry.csa_ratio, options.decode)
        result["ceilings"] = dataclasses.asdict(ceilings := machine.ceilings())
        rank = make_rank(
            geometry, StandInCollectives(0, options.tp) if real is None else real, chunk_rows=options.chunk_rows,
            length=max(options.lengths) + room, dtype=torch.bfloat16, device=machine.device,
            tiles=options.tiles, experts=options.experts,
        )  # fmt: skip
        result["chunk_rows"] = rank.context.chunk_rows
        result["lengths"] = [_measured(options, rank, length, ceilings, machine, out) for length in options.lengths]
        print_run(out, result)
    return result


def _check(
    options: BenchOptions, geometry: ModelGeometry, machine: Machine, collectives: Collectives, routers: RouterKind
) -> Agreement:
    check = options.check
    few = checked_geometry(geometry, routers, layers=check.layers, experts=check.experts, vocab=check.vocab)
    machine.begin()
    rank = make_rank(
        few, collectives, chunk_rows=max(check.chunks), length=check.length, dtype=torch.bfloat16,
        device=machine.device, tiles=TileOptions(depth=0), experts=options.experts,
    )  # fmt: skip
    return check_arms(rank, check.length, check.documents, runs=check.runs, chunks=check.chunks)


def _measured(
    options: BenchOptions, rank: StandInRank, length: int, ceilings: Ceilings, machine: Machine, out: Output
) -> dict[str, Any]:
    # What is cached for one length does not fit the next.
    machine.begin()
    arms, size = options.arms, document_length(length, options.documents)
    place = machine.device if options.place == "device" else torch.device("cpu")
    artifacts = {
        index: StandInArtifact(
            rank.context.geometry, size, rank.context.local_width, form=options.form, content_digest=str(index),
            place=place,
        )
        for index in range(options.documents)
    }  # fmt: skip
    with out.progress(f"{length:,} tokens", (options.repeat + 1) * len(arms)) as advance:
        measured = measure_length(
            rank, length, options.documents, artifacts, arms, ceilings=ceilings, clock=machine.clock,
            repeat=options.repeat, form=options.form,
            decode=options.decode, turn_done=lambda: advance(1),
        )  # fmt: skip
    tensors, driver = machine.peak_gib()
    return {**measured, "peak_gib": tensors, "driver_peak_gib": driver}
