"""Options of `build_engine.py` that only the tensorrt backend reads."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from trt_redknot.artifacts.formats import ArtifactFormat
from trt_redknot.cli.output import Output
from trt_redknot.collectives import Collectives
from trt_redknot.collectives.agreement import agree
from trt_redknot.errors import EngineError, RedKnotError

if TYPE_CHECKING:
    import torch

    from trt_redknot.engine.tensorrt.build import PlanOptions
    from trt_redknot.engine.tensorrt.opening import OpenedPlans
    from trt_redknot.engine.tensorrt.platform import Platform
    from trt_redknot.engine.tensorrt.verification import OutputError

_Command = TypeVar("_Command", bound=Callable[..., Any])

_OPTIONS = (
    click.option("--decode-rows", type=click.IntRange(1), default=64, show_default=True,
                 help="tensorrt: most sequences that are decoded together."),
    click.option("--pool-tokens", type=click.IntRange(1),
                 help="tensorrt: most tokens of all requests that are open together. Left out: --max-length."),
    click.option("--workspace-gib", type=click.IntRange(1), default=4, show_default=True,
                 help="tensorrt: scratch memory that a plan may use, GiB."),
    click.option("--optimization-level", type=click.IntRange(0, 5), default=3, show_default=True,
                 help="tensorrt: how long the builder looks for fast tactics."),
    click.option("--timing-cache", type=click.Path(path_type=Path),
                 help="tensorrt: file of measured tactics, read and written; with several ranks one for each."),
    click.option("--collectives", type=click.Choice(["auto", "plugin", "native"]), default="auto", show_default=True,
                 help="tensorrt: what moves rows between ranks inside plans. auto takes TensorRT's own layers (11 and "
                 "newer) where they work, else our plugin."),
    click.option("--plugin-library", type=click.Path(path_type=Path),
                 help="tensorrt: plugin library. Left out: the one that `make plugins` built."),
    click.option("--verify", is_flag=True,
                 help="tensorrt: after the build, hold every plan against the reference backend on random inputs."),
)  # fmt: skip


def with_plan_options(command: _Command) -> _Command:
    """Add the options to a command; it gets them as keywords."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def plan_options(
    chosen: dict[str, Any], *, chunk_rows: int, max_length: int, form: ArtifactFormat, rank: int, ranks: int
) -> PlanOptions:
    """What the options mean for one rank.

    Raises:
        EngineError: rows or lengths beyond what plans can index.
    """
    from trt_redknot.engine.tensorrt.build import PlanOptions
    from trt_redknot.engine.tensorrt.builder import BuilderSettings
    from trt_redknot.engine.tensorrt.profiles import PlanLimits
    from trt_redknot.engine.tensorrt.specification import PlanFormat

    packed = form is ArtifactFormat.FP8
    cache: Path | None = chosen["timing_cache"]
    if cache is not None and ranks > 1:
        cache = cache.with_name(f"{cache.name}.{rank}")
    return PlanOptions(
        limits=PlanLimits(
            chunk_rows=chunk_rows,
            max_length=max_length,
            decode_rows=chosen["decode_rows"],
            pool_tokens=chosen["pool_tokens"],
        ),
        format=PlanFormat(packed_cache=packed, packed_local=packed),
        settings=BuilderSettings(
            workspace_bytes=chosen["workspace_gib"] * 2**30,
            optimization_level=chosen["optimization_level"],
            timing_cache=cache,
        ),
        collectives=chosen["collectives"],
    )


def verify_plans(out: Output, output: Path, platform: Platform, collectives: Collectives, device: torch.device) -> None:
    """Run the plans of a built engine on random inputs and show their errors, the largest of any rank. Collective.

    Args:
        collectives: of tensors on the CPU.
        device: this rank's GPU.

    Raises:
        EngineError: a plan cannot be opened or run, or gives something else than the reference backend; on all ranks.
    """
    from trt_redknot.collectives.device import connect
    from trt_redknot.engine.tensorrt.opening import open_plans
    from trt_redknot.engine.tensorrt.starting import start_plans
    from trt_redknot.engine.tensorrt.verification import OutputError, device_runner, verify_plan, worst
    from trt_redknot.reports.plans import show_errors

    opened: OpenedPlans | None = None
    failure: RedKnotError | None = None
    try:
        opened = open_plans(output, platform)
    except RedKnotError as error:
        failure = error
    agree(collectives, None, failure)
    assert opened is not None
    backend = start_plans(opened, connect(collectives, device), device)
    run = device_runner(backend.runtime, device)
    mine: list[OutputError] = []
    for spec in backend.specs:
        mine += verify_plan(spec, run, seed=secrets.randbits(31), collectives=collectives)
    replies = agree(collectives, [dataclasses.asdict(error) for error in mine], None)
    errors = worst([[OutputError(**error) for error in reply] for reply in replies])  # type: ignore[attr-defined]
    show_errors(out, errors)
    wrong = [f"{error.plan}.{error.output}" for error in errors if not error.passed]
    if wrong:
        raise EngineError(
            "plans give something else than the reference backend", found=", ".join(wrong), path=output,
            remedy="Do not use this engine; the table has the errors.",
        )  # fmt: skip
