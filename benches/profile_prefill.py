"""Where the time of a prefill and of decoding goes, by kernel and by host function: torch's profiler over each arm."""

from __future__ import annotations

import time
from pathlib import Path

import click
import torch
from torch.profiler import ProfilerActivity, profile

from trt_redknot.artifacts.formats import ArtifactFormat
from trt_redknot.cli.command import run_command
from trt_redknot.config.policy import ReusePolicy
from trt_redknot.config.released import released_geometry
from trt_redknot.engine.decode import Decoder
from trt_redknot.engine.loading import find_device
from trt_redknot.engine.lookahead import Asked, DecodeSteps
from trt_redknot.engine.pool import SequenceState
from trt_redknot.engine.tiles import TileOptions
from trt_redknot.evaluation.standin import StandInArtifact, StandInCollectives, make_rank
from trt_redknot.evaluation.ttft import document_length, first_token, segment_table

# Tokens after the prompt: enough that steps of the common shapes are captured before the profiler looks.
WARM_UP = 8
STEPS = 8
# The timed steps come three times: one after the other, one ahead, and so with the profiler on.
ROOM = WARM_UP + 3 * STEPS + 1


@click.command()
@click.option("--length", type=click.IntRange(1024), default=65536, show_default=True)
@click.option("--documents", type=click.IntRange(1), default=8, show_default=True)
@click.option("--chunk-rows", type=click.IntRange(1), help="Rows of a chunk; left out: what memory has room for.")
@click.option("--decode-only", is_flag=True, help="Profile decoding alone, after a prefill that is not.")
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Folder for the tables.")
@torch.inference_mode()
def main(length: int, documents: int, chunk_rows: int | None, decode_only: bool, output: Path) -> None:
    """Profile both arms."""
    device = find_device("cuda", None)
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
        if not decode_only:
            plain = [first_token(context, segments, held, policy).seconds for _ in range(3)][-1]
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
                seconds = first_token(context, segments, held, policy).seconds
            title = f"{arm}: {_shares(plain, seconds, profiled)}; {_gaps(profiled)}"
            write(output / f"{arm}.txt", title, profiled)
        found = first_token(context, segments, held, policy, room=ROOM)
        decoder = Decoder(context, found.pool)
        steps = DecodeSteps(decoder)
        _decode(steps, found.state, WARM_UP)
        plain_s, _ = _decode(DecodeSteps(decoder, ahead=False), found.state, STEPS)
        taken, waited = _decode(steps, found.state, STEPS)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            slowed, _ = _decode(steps, found.state, STEPS)
        title = (
            f"{arm}: a decode step in {taken * 1e3:.2f} ms ({plain_s * 1e3:.2f} ms where none is queued ahead), "
            f"the host waits for its token {waited * 1e3:.2f} ms, "
            f"{slowed * 1e3:.2f} ms with the profiler on; {_decode_shares(profiled)}, {decoder.captured} graphs; "
            f"{_gaps(profiled)}"
        )
        write(output / f"{arm}-decode.txt", title, profiled)
        del found, decoder, steps


def _decode(steps: DecodeSteps, state: SequenceState, count: int) -> tuple[float, float]:
    """Seconds of a step, and of it those that the host waits for its tokens; no step is left queued."""
    torch.cuda.synchronize()
    waited = 0.0
    token, started = 0, time.perf_counter()
    for left in range(count, 0, -1):
        found = steps.next([Asked(state=state, token=token, greedy=True, last=left == 1)])
        queued = time.perf_counter()
        token = found.tokens()[0]
        waited += time.perf_counter() - queued
    return (time.perf_counter() - started) / count, waited / count


def _decode_shares(profiled: profile) -> str:
    """What a step gives the device to do."""
    kernels = [event for event in profiled.key_averages() if event.device_type.name == "CUDA"]
    device = sum(event.self_device_time_total for event in kernels) / STEPS
    return f"{device / 1e3:.2f} ms of kernels and copies, {sum(event.count for event in kernels) / STEPS:.0f} of them"


def _shares(plain: float, seconds: float, profiled: profile) -> str:
    """How much of a prefill the device worked and the host, in all and for each step: a chunk's half of a layer."""
    events = profiled.key_averages()
    # By kernels: an op's own line counts them once more.
    device = sum(event.self_device_time_total for event in events if event.device_type.name == "CUDA")
    waits = ("Synchronize", "Command Buffer Full")
    host = sum(event.self_cpu_time_total for event in events if not any(word in event.key for word in waits))
    steps = 2 * sum(event.count for event in events if event.key.endswith("seg_latent_attention"))
    return (
        f"{plain * 1e3:.1f} ms, {seconds * 1e3:.1f} ms with the profiler on; of these the device worked "
        f"{device / 1e3:.1f} ms, the host {host / 1e3:.1f} ms; {steps} steps, a step "
        f"{device / max(1, steps):.0f} us of the device and {host / max(1, steps):.0f} us of the host"
    )


def _gaps(profiled: profile, most: int = 12) -> str:
    """When the device had nothing to do, longest first."""
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiled.events() or ()
        if event.device_type.name == "CUDA"
    )
    first = end = spans[0][0] if spans else 0.0
    gaps = []
    for start, stop in spans:
        if start > end:
            gaps.append((start - end, end - first))
        end = max(end, stop)
    gaps.sort(reverse=True)
    listed = ", ".join(f"{gap:.0f} us at {at / 1e3:.1f} ms" for gap, at in gaps[:most])
    return f"idle {sum(gap for gap, _ in gaps) / 1e3:.1f} ms of {(end - first) / 1e3:.1f} ms: {listed}"


def write(path: Path, title: str, profiled: profile) -> None:
    """A table by time on the device and one by time on the host."""
    averages = profiled.key_averages()
    tables = [
        averages.table(sort_by=key, row_limit=limit, max_name_column_width=70)
        for key, limit in (("self_cuda_time_total", 40), ("self_cpu_time_total", 25))
    ]
    path.write_text("\n".join([title, *tables]))
    click.echo(title)


if __name__ == "__main__":
    run_command(lambda: main(standalone_mode=False))
