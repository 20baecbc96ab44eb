"""Where the time of a prefill and of decoding goes, by kernel and by host function: torch's profiler over each arm."""

from __future__ import annotations

import time
from pathlib import Path

import click
import torch
from torch.profiler import ProfilerActivity, profile

from trt_redknot.artifacts.formats import ArtifactFormat
from trt_redknot.config.policy import ReusePolicy
from trt_redknot.config.released import released_geometry
from trt_redknot.engine.decode import Decoder
from trt_redknot.engine.tiles import TileOptions
from trt_redknot.evaluation.standin import StandInArtifact, StandInCollectives, make_rank
from trt_redknot.evaluation.ttft import document_length, first_token, segment_table

# Tokens after the prompt: enough that steps of the common shapes are captured before the profiler looks.
WARM_UP = 8
STEPS = 8
ROOM = WARM_UP + STEPS + 1


@click.command()
@click.option("--length", type=click.IntRange(1024), default=65536, show_default=True)
@click.option("--documents", type=click.IntRange(1), default=8, show_default=True)
@click.option("--chunk-rows", type=click.IntRange(1), help="Rows of a chunk; left out: what memory has room for.")
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Folder for the tables.")
@torch.inference_mode()
def main(length: int, documents: int, chunk_rows: int | None, output: Path) -> None:
    """Profile both arms."""
    device = torch.device("cuda", 0)
    geometry = released_geometry("flash")
    context = make_rank(
        geometry, StandInCollectives(0, 8), chunk_rows=chunk_rows, length=length + ROOM, dtype=torch.bfloat16,
        device=device, tiles=TileOptions(depth=0),
    ).context  # fmt: skip
    size = document_length(length, documents)
    artifacts = {
        index: StandInArtifact(
            geometry, size, context.local_width, form=ArtifactFormat.BFLOAT16, place=device, content_digest=str(index)
        )
        for index in range(documents)
    }
    output.mkdir(parents=True, exist_ok=True)
    for arm, policy in (("active", ReusePolicy(epilogue="active")), ("recompute", None)):
        segments = segment_table(length, documents, reuse=policy is not None)
        held = artifacts if policy is not None else {}
        for _ in range(2):
            first_token(context, segments, held, policy)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            found = first_token(context, segments, held, policy, room=ROOM)
        write(output / f"{arm}.txt", f"{arm}: {found.seconds:.3f} s with the profiler on", profiled)
        decoder = Decoder(context, found.pool)
        for token in range(WARM_UP):
            decoder.step([found.state], [token])
        torch.cuda.synchronize()
        started = time.perf_counter()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            for token in range(STEPS):
                decoder.step([found.state], [token])
            torch.cuda.synchronize()
        taken = (time.perf_counter() - started) / STEPS
        title = f"{arm}: a decode step in {taken * 1e3:.2f} ms with the profiler on, {decoder.captured} graphs"
        write(output / f"{arm}-decode.txt", title, profiled)
        del found, decoder


def write(path: Path, title: str, profiled: profile) -> None:
    """A table by time on the device and one by time on the host."""
    averages = profiled.key_averages()
    tables = [
        averages.table(sort_by=key, row_limit=limit, max_name_column_width=70)
        for key, limit in (("self_cuda_time_total", 40), ("self_cpu_time_total", 25))
    ]
    path.write_text("\n".join([title, *tables]))


if __name__ == "__main__":
    main()
