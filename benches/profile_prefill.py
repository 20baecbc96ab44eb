"""Where the time of a prefill goes, by kernel and by host function: torch's profiler over one pass of each arm."""

from __future__ import annotations

from pathlib import Path

import click
import torch
from torch.profiler import ProfilerActivity, profile

from trt_redknot.artifacts.formats import ArtifactFormat
from trt_redknot.config.policy import ReusePolicy
from trt_redknot.config.released import released_geometry
from trt_redknot.evaluation.standin import StandInArtifact, rank_context
from trt_redknot.evaluation.ttft import first_token, segment_table


@click.command()
@click.option("--length", type=click.IntRange(1024), default=65536, show_default=True)
@click.option("--documents", type=click.IntRange(1), default=8, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Folder for the tables.")
@torch.inference_mode()
def main(length: int, documents: int, output: Path) -> None:
    """Profile both arms."""
    device = torch.device("cuda")
    geometry = released_geometry("flash")
    context = rank_context(geometry, 0, 8, chunk_rows=8192, length=length + 1, device=device)
    size = (length - 256) // documents
    artifacts = {
        index: StandInArtifact(geometry, size, context.local_width, form=ArtifactFormat.BFLOAT16, place=device)
        for index in range(documents)
    }
    for arm, policy in (("active", ReusePolicy(epilogue="active")), ("recompute", None)):
        segments = segment_table(length, documents, reuse=policy is not None)
        held = artifacts if policy is not None else {}
        for _ in range(2):
            first_token(context, segments, held, policy)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            seconds, _ = first_token(context, segments, held, policy)
        averages = profiled.key_averages()
        text = [f"{arm}: {seconds:.3f} s with the profiler on"]
        text.append(averages.table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=70))
        text.append(averages.table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=70))
        (output / f"{arm}.txt").write_text("\n".join(text))


if __name__ == "__main__":
    main()
