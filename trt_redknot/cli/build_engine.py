"""The command behind `build_engine.py`: a checkpoint becomes an engine directory."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import click

from trt_redknot.artifacts.formats import ArtifactFormat
from trt_redknot.cli.numbers import FiniteRange
from trt_redknot.cli.output import Output
from trt_redknot.cli.plan_options import plan_options, verify_plans, with_plan_options
from trt_redknot.collectives import from_communicator
from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.config.parse import load_geometry
from trt_redknot.config.profiles import load_profile
from trt_redknot.config.released import released_geometry
from trt_redknot.errors import EngineError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

    from trt_redknot.engine.manifest import ExpertStorage
    from trt_redknot.engine.tensorrt.build import PlanOptions

_FORMATS = [form.value for form in ArtifactFormat]


def build_engine_command(comm: Intracomm | None) -> click.Command:
    """The click command of one rank."""

    @click.command(
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
        epilog="""\b
Examples:
  python build_engine.py --checkpoint DIR --output engine                      one rank
  mpirun -n 2 python -m mpi4py build_engine.py --checkpoint DIR --output engine      two ranks, each builds its part
  python build_engine.py --dry-run --profile flash --tp 8                      bytes per rank, no checkpoint needed
""",
    )
    @click.option("--checkpoint", type=click.Path(path_type=Path), help="Checkpoint folder: config.json, safetensors.")
    @click.option("--output", type=click.Path(path_type=Path), help="Engine folder to write; must not exist.")
    @click.option(
        "--profile", default="auto", show_default=True, help="Split profile: auto, flash, pro or a JSON file."
    )
    @click.option("--tp", type=click.IntRange(1), help="Ranks of the engine. Left out: the ranks of this MPI job.")
    @click.option("--backend", type=click.Choice(["torch", "tensorrt"]), default="torch", show_default=True)
    @click.option(
        "--dtype",
        type=click.Choice(["float32", "bfloat16", "float64"]),
        show_default="float32; bfloat16 for tensorrt",
        help="What the ranks compute in; FP8 and FP4 checkpoints are dequantised to it. float64 is for verification.",
    )
    @click.option(
        "--artifact-format",
        type=click.Choice(["auto", *_FORMATS]),
        default="auto",
        show_default=True,
        help="How artifacts are stored; auto keeps the engine's dtype, which is exact.",
    )
    @click.option(
        "--experts",
        type=click.Choice(["same", "fp8"]),
        default="same",
        show_default=True,
        help="Store expert weights in the engine's dtype or in FP8, rounded to nearest even. Plans always read FP8.",
    )
    @click.option("--max-length", type=click.IntRange(2), help="Most tokens of a request. Left out: the checkpoint's.")
    @click.option(
        "--chunk-rows",
        type=click.IntRange(1),
        default=4096,
        show_default=True,
        help="Rows that go through a stage together: bounds the memory of a prefill.",
    )
    @click.option(
        "--length",
        type=click.IntRange(1),
        default=262144,
        show_default=True,
        help="Prompt length that --dry-run estimates activations for.",
    )
    @click.option(
        "--gpu-memory", type=FiniteRange(0, 2**20, min_open=True), metavar="GIB",
        show_default="this machine's GPU; without one, an H200",
        help="Memory of a GPU that --dry-run compares with, GiB.",
    )  # fmt: skip
    @click.option(
        "--dry-run", is_flag=True, help="Only show what would be built: bytes per rank, artifacts, activations."
    )
    @with_plan_options
    @click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
    def command(
        checkpoint: Path | None, output: Path | None, profile: str, tp: int | None, backend: str, dtype: str | None,
        artifact_format: str, experts: str, max_length: int | None, chunk_rows: int, length: int,
        gpu_memory: float | None, dry_run: bool, as_json: bool, **plan_choices: Any,
    ) -> None:  # fmt: skip
        """Build an engine from a DeepSeek-V4 checkpoint. Under mpirun every rank builds its own part."""
        import torch

        from trt_redknot.checkpoint import Checkpoint
        from trt_redknot.checkpoint.specs import check_parallelism
        from trt_redknot.engine.build import BuildOptions, build_torch_engine
        from trt_redknot.engine.tensorrt.build import build_tensorrt_engine, plan_specs, progress_steps
        from trt_redknot.engine.tensorrt.platform import find_platform
        from trt_redknot.engine.tokenizer import EngineTokenizer
        from trt_redknot.reports.estimate import show_estimate
        from trt_redknot.reports.fitting import find_memory
        from trt_redknot.reports.plans import plans_to_json, show_plans

        collectives = from_communicator(comm)
        out = Output(collectives.rank)
        geometry = _geometry(checkpoint, profile, dry_run)
        split = load_profile(profile, geometry)
        dtype = dtype or ("bfloat16" if backend == "tensorrt" else "float32")
        form = ArtifactFormat(dtype if artifact_format == "auto" else artifact_format)
        ranks = tp or collectives.size
        if max_length is not None and max_length > geometry.max_positions:
            raise EngineError(
                "--max-length is more than the network has positions for", expected=f"at most {geometry.max_positions}",
                found=max_length,
            )  # fmt: skip
        check_parallelism(geometry, 0, ranks)
        plans: PlanOptions | None = None
        if plan_choices["verify"] and (backend != "tensorrt" or dry_run):
            raise click.UsageError("--verify runs the plans of --backend tensorrt after they are built.")
        if backend == "tensorrt":
            plans = plan_options(
                plan_choices, chunk_rows=chunk_rows, max_length=max_length or geometry.max_positions, form=form,
                rank=collectives.rank, ranks=ranks,
            )  # fmt: skip
        if dry_run:
            specs = () if plans is None else plan_specs(geometry, world=ranks, format=plans.format)
            more = {} if plans is None else {"plans": plans_to_json(specs, plans.limits)}
            memory = find_memory() if gpu_memory is None else (int(gpu_memory * 2**30), "named by --gpu-memory")
            verdict = show_estimate(
                out, geometry, split, tp_size=ranks, dtype=dtype, artifact_format=form, length=length,
                chunk_rows=chunk_rows, experts=experts if plans is None else "fp8", memory=memory, as_json=as_json,
                more=more,
            )  # fmt: skip
            if plans is not None and not as_json:
                show_plans(out, specs, plans.limits)
            if not as_json:
                out.show(verdict)
            return
        if checkpoint is None or output is None:
            raise click.UsageError("--checkpoint and --output are needed, unless with --dry-run.")
        if ranks != collectives.size:
            raise EngineError(
                "every rank of the engine builds its own part", expected=f"{ranks} MPI ranks", found=collectives.size,
                remedy=f"Start it with: mpirun -n {ranks} python -m mpi4py build_engine.py --tp {ranks} ...",
            )  # fmt: skip
        opened = Checkpoint.open(checkpoint, geometry)
        if (checkpoint / EngineTokenizer.FILE).is_file():
            # The engine is asked with it: a damaged one is told now, not after hours of building.
            EngineTokenizer(checkpoint)
        options = BuildOptions(
            dtype=cast('Literal["float64", "float32", "bfloat16"]', dtype), artifact_format=form, max_length=max_length,
            chunk_rows=chunk_rows, experts=cast("ExpertStorage", experts),
        )  # fmt: skip
        # TensorRT's registry takes a library once.
        platform = cache(partial(find_platform, collectives.rank, plan_choices["plugin_library"]))
        steps = geometry.layers + 1 if plans is None else progress_steps(geometry, collectives.size, collectives.rank)
        with out.progress(f"building {output}", steps) as advance:
            if plans is None:
                manifest = build_torch_engine(
                    opened, split, output, options, collectives, progress=lambda _: advance(1)
                )
            else:
                manifest = build_tensorrt_engine(
                    opened, split, output, options, plans, collectives, platform, progress=advance
                )
        if plan_choices["verify"]:
            verify_plans(out, output, platform(), collectives, torch.device("cuda", torch.cuda.current_device()))
        if as_json:
            out.json(
                {"engine": str(output), "tp_size": manifest.tp_size, "checkpoint": manifest.checkpoint_fingerprint}
            )
        else:
            total = sum(file.bytes for rank in manifest.ranks for file in rank.files)
            content = "weights" if plans is None else "weights and plans"
            out.note(f"{output}: {manifest.tp_size} rank(s), {total:,} bytes of {content}, profile {split.name}")

    return command


def _geometry(checkpoint: Path | None, profile: str, dry_run: bool) -> ModelGeometry:
    if checkpoint is not None:
        return load_geometry(checkpoint)
    if dry_run and profile in ("flash", "pro"):
        return released_geometry(cast('Literal["flash", "pro"]', profile))
    raise click.UsageError("--checkpoint is needed, unless with --dry-run --profile flash or pro.")
