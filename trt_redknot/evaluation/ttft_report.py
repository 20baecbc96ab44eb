"""What a run of the TTFT bench shows to people: tables, and a page with speed-ups by length and where the time went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from rich.table import Table

from trt_redknot.cli.output import Output
from trt_redknot.evaluation.evidence import Evidence
from trt_redknot.reports.charts import Frame, bars, spans

# Speed-up of hot artifacts over full recomputation, published for eight H200s, TP=8, by length in tokens.
PUBLISHED = {65536: 2.91, 131072: 3.20, 262144: 2.02, 440000: 3.84}
_TEMPLATE = "ttft.html.jinja"
# Stages that are drawn; the rest of a bar is one part.
_DRAWN = 7


def describe(run: dict[str, Any]) -> str:
    """What ran, in a line."""
    ranks = (
        f"{run['ranks']} ranks over NCCL"
        if run["real_ranks"]
        else f"one rank of TP={run['ranks']}, the others replaced"
    )
    tiles = run["artifacts"]
    where = f"artifacts {tiles['format']} in {tiles['place']} memory"
    experts = "FP8" if run["experts"] == "fp8" else "bf16"
    whole = run.get("layers_of", run["layers"])
    layers = str(whole) if run["layers"] == whole else f"{run['layers']} of {whole}"
    return f"{run['geometry']}, {layers} layers, {experts} experts, {ranks}, {run['machine']['gpu']}, {where}"


def print_run(out: Output, run: dict[str, Any]) -> None:
    """Tables of one run."""
    evidence = Evidence(run["evidence"])
    arms = Table(title=f"Time to first token ({evidence.value}): {describe(run)}")
    for column in (
        "length",
        "arm",
        "ttft s",
        "spread s",
        "speed-up",
        "protected",
        "active",
        "rows saved",
        "late s",
        "of roofline",
    ):
        arms.add_column(column, justify="right")
    for length in run["lengths"]:
        for name, arm in length["arms"].items():
            arms.add_row(
                f"{length['length']:,}", name, f"{arm['ttft_s']:.3f}", f"{arm['spread_s']:.3f}",
                f"{arm['speedup']:.2f}",
                f"{arm['rows']['protected']:,}", f"{arm['rows']['active']:,}",
                f"{arm['ledgers']['token_rows']['share']:.1%}", f"{max(arm['late_s'], default=0.0):.4f}",
                f"{arm['share_of_roofline']:.0%}",
            )  # fmt: skip
    out.show(
        arms,
        *(_stages(length, name) for length in run["lengths"][-1:] for name in length["arms"]),
        _cold(run),
        *_decoding(run),
        _memory(run),
    )


def print_check(out: Output, run: dict[str, Any]) -> None:
    """The table of what the check found before anything was timed."""
    for check in run["check"]:
        table = Table(
            title=f"Protected rows against recomputation, {check['routers']} routers, {check['runs']} prompts; "
            f"{check['equal']:.0%} of the protected rows equal bit for bit"
        )
        for column in (
            "segment",
            "rows",
            "protected rms",
            "recomputed rms",
            "protected largest",
            "recomputed largest",
            "unrelated rms",
        ):
            table.add_column(column, justify="right")
        places = [*((str(index), each) for index, each in enumerate(check["segments"])), ("reuse", check["reused"])]
        for place, segment in places:
            protected, recomputed = segment["protected"], segment["recomputed"]
            table.add_row(
                place, f"{segment['rows']:,}", f"{protected['rms']:.5f}", f"{recomputed['rms']:.5f}",
                f"{protected['largest']:.5f}", f"{recomputed['largest']:.5f}", f"{segment['unrelated']['rms']:.3f}",
            )  # fmt: skip
        out.show(table)
        for fault in check["faults"]:
            out.note(fault)


def _memory(run: dict[str, Any]) -> Table:
    table = Table(title="Peak memory of the GPU")
    for column in ("length", "torch GiB", "nvidia-smi GiB"):
        table.add_column(column, justify="right")
    for length in run["lengths"]:
        driver = length["driver_peak_gib"]
        table.add_row(f"{length['length']:,}", f"{length['peak_gib']:.1f}", "-" if driver is None else f"{driver:.1f}")
    return table


def _stages(length: dict[str, Any], name: str) -> Table:
    table = Table(title=f"Stages at {length['length']:,} tokens, {name}")
    for column in ("op", "calls", "ms", "floor ms", "of floor", "GB", "Tflop"):
        table.add_column(column, justify="right")
    for line in length["arms"][name]["stages"]:
        table.add_row(
            line["op"], f"{line['calls']:,}", f"{line['seconds'] * 1e3:.2f}", f"{line['floor_s'] * 1e3:.2f}",
            f"{line['share']:.0%}", f"{line['bytes'] / 1e9:.2f}", f"{line['operations'] / 1e12:.3f}",
        )  # fmt: skip
    return table


def _cold(run: dict[str, Any]) -> Table:
    table = Table(title="Cold path: making all artifacts of a request, disk not included")
    for column in (
        "length",
        "built in s",
        "in recomputations",
        "GB of a rank",
        "arm",
        "won back after",
    ):
        table.add_column(column, justify="right")
    for length in run["lengths"]:
        cold = length["cold"]
        for name in length["arms"]:
            even = cold["break_even"].get(name)
            table.add_row(
                f"{length['length']:,}", f"{cold['built_s']:.3f}", f"{cold['in_recomputations']:.2f}",
                f"{cold['bytes_of_rank'] / 1e9:.2f}", name, "-" if even is None else f"{even:.1f} requests",
            )  # fmt: skip
    return table


def _decoding(run: dict[str, Any]) -> list[Table]:
    """A table where tokens were decoded."""
    table = Table(title="Decoding after the prompt, one sequence")
    for column in ("length", "arm", "tokens/s", "of recompute", "of roofline", "graphs", "eager because"):
        table.add_column(column, justify="right")
    for length in run["lengths"]:
        for name, arm in length["arms"].items():
            if "decode" in arm:
                found = arm["decode"]
                table.add_row(
                    f"{length['length']:,}", name, f"{found['tokens_per_s']:.1f}", f"{found['of_recompute']:.3f}",
                    f"{found['share_of_roofline']:.0%}", str(found["graphs"]), found["eager_because"] or "-",
                )  # fmt: skip
    return [table] if table.row_count else []


def render_page(runs: Sequence[dict[str, Any]]) -> str:
    """One page about several runs: a chart of speed-ups a run, and a bar of stages an arm and length."""
    charts = [chart for run in runs for chart in (_speed_ups(run), *_rates(run), *_waterfalls(run))]
    environment = Environment(
        loader=PackageLoader("trt_redknot", "evaluation"), autoescape=True, undefined=StrictUndefined
    )
    template = environment.get_template(_TEMPLATE)
    return template.render(charts=charts, runs=[describe(run) for run in runs], evidence=list(Evidence))


def _speed_ups(run: dict[str, Any]) -> Markup:
    lengths = run["lengths"]
    names = [name for name in lengths[0]["arms"] if name != "recompute"] if lengths else []
    series: dict[str, list[float | None]] = {
        name: [length["arms"][name]["speedup"] for length in lengths] for name in names
    }
    series[f"published, 8 ranks ({Evidence.ARCHIVED.value})"] = [PUBLISHED.get(length["length"]) for length in lengths]
    frame = Frame(
        title="Speed-up of time to first token over recomputation",
        note=f"{Evidence(run['evidence']).value}: {describe(run)}",
        unit="x",
    )
    return bars(frame, [f"{length['length']:,} tokens" for length in lengths], series)


def _rates(run: dict[str, Any]) -> list[Markup]:
    """A chart where tokens were decoded."""
    lengths = [length for length in run["lengths"] if all("decode" in arm for arm in length["arms"].values())]
    if not lengths:
        return []
    series: dict[str, list[float | None]] = {
        name: [length["arms"][name]["decode"]["tokens_per_s"] for length in lengths] for name in lengths[0]["arms"]
    }
    least = min(arm["decode"]["of_recompute"] for length in lengths for arm in length["arms"].values())
    frame = Frame(
        title="Decoding after the prompt, one sequence",
        note=f"{Evidence(run['evidence']).value}; the slowest arm decodes at {least:.1%} of the speed after "
        "recomputation",
        unit="tokens/s",
    )
    return [bars(frame, [f"{length['length']:,} tokens" for length in lengths], series)]


def _waterfalls(run: dict[str, Any]) -> list[Markup]:
    charts, drawn = [], _longest_stages(run)
    for length in run["lengths"]:
        rows = {name: _parts(arm, drawn) for name, arm in length["arms"].items()}
        frame = Frame(
            title=f"Where the time goes at {length['length']:,} tokens",
            note=f"{Evidence(run['evidence']).value}: one more pass with every op timed, without what lies between ops",
            unit="s",
        )
        charts.append(spans(frame, rows))
    return charts


def _longest_stages(run: dict[str, Any]) -> list[str]:
    """The stages that take most of a run, in that order: one colour has one meaning in all its charts."""
    taken: Counter[str] = Counter()
    for length in run["lengths"]:
        for arm in length["arms"].values():
            taken.update({line["op"]: line["seconds"] for line in arm["stages"]})
    return [op for op, _ in taken.most_common(_DRAWN)]


def _parts(arm: dict[str, Any], drawn: Sequence[str]) -> dict[str, float]:
    seconds = {line["op"]: line["seconds"] for line in arm["stages"]}
    parts = {op: seconds.pop(op, 0.0) for op in drawn}
    return {**parts, "other ops": sum(seconds.values())}
