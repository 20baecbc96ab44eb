"""Figures of the pages are those of the saved runs in docs/data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
PERFORMANCE = (DOCS / "performance.md").read_text(encoding="utf-8")
# File, and the heading of the section that shows it.
RUNS = {
    "ttft-flash-tp8-rank-h200": "## Time to first token, Flash geometry, one H200 as one rank of TP=8",
    "ttft-pro-tp16-rank-h200": "### Pro, one H200 as one rank of TP=16",
    "ttft-flash-2-ranks-nccl-h200": "### Two real ranks over NCCL",
    "ttft-flash-fp8-host-tiles-h200": "### FP8 experts, packed artifacts in host memory",
}


def saved(name: str) -> Any:
    return json.loads((DOCS / "data" / f"{name}.json").read_text(encoding="utf-8"))


def section(heading: str) -> str:
    _, _, text = PERFORMANCE.partition(f"\n{heading}\n")
    assert text, heading
    return text


def rows(text: str, first: str) -> list[list[str]]:
    """Cells of the table rows whose first cell is this."""
    found = [line.strip("|").split("|") for line in text.splitlines() if line.startswith(f"| {first} |")]
    assert found, first
    return [[cell.strip() for cell in cells] for cells in found]


@pytest.mark.parametrize("name", RUNS)
def test_times_to_the_first_token(name: str) -> None:
    text = section(RUNS[name])
    for entry in saved(name)["lengths"]:
        cells = rows(text, f"{entry['length']:,}")[0]
        for cell, (arm, figures) in zip(cells[1:], entry["arms"].items(), strict=False):
            assert cell.startswith(f"{figures['ttft_s']:.3f} s"), (arm, cell)
            assert arm == "recompute" or cell.endswith(f"{figures['speedup']:.2f}x"), (arm, cell)
        if "memory" in text.partition(f"| {entry['length']:,} |")[0].rpartition("| tokens |")[2]:
            saving = [figures["ledgers"]["token_rows"]["share"] for figures in list(entry["arms"].values())[1:]]
            assert cells[-2] == ", ".join(f"{100 * share:.1f} %" for share in saving)
            assert cells[-1] == f"{entry['peak_gib']:.1f}, {entry['driver_peak_gib']:.1f} GiB"


def test_rates_of_decoding() -> None:
    text = section("### Decoding")
    for entry in saved("ttft-flash-tp8-rank-h200")["lengths"]:
        cells = rows(text, f"{entry['length']:,}")[0]
        found = [float(cell.split()[0]) for cell in cells[1:5]]
        arms = [figures["decode"] for figures in entry["arms"].values()]
        assert found == [round(decode["tokens_per_s"], 1) for decode in arms]
        floor, share = arms[0]["floor_s"], arms[0]["share_of_roofline"]
        assert cells[5] == f"{1e3 * floor:.2f} ms, {100 * share:.0f} %"


def test_what_the_check_found() -> None:
    text = section("### What is checked before times are taken")
    for found in saved("ttft-flash-tp8-rank-h200")["check"]:
        cells = rows(text, found["routers"])[0]
        parts = found["segments"]
        assert cells[1].startswith("0,") == (found["equal"] == 1)
        assert cells[2] == f"{found['reused']['protected']['rms']:.3f}"
        for cell, name, places in ((cells[3], "recomputed", 3), (cells[4], "unrelated", 2)):
            distances = [part[name]["rms"] for part in parts]
            assert cell == f"{min(distances):.{places}f} to {max(distances):.{places}f}"


def test_the_speedups_of_the_readme() -> None:
    text = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    entries = saved("ttft-flash-tp8-rank-h200")["lengths"]
    for arm in list(entries[0]["arms"])[1:]:
        assert ", ".join(f"{entry['arms'][arm]['speedup']:.1f}x" for entry in entries) in text, arm


def test_times_of_ops() -> None:
    lines = saved("ops-h200")["lines"]
    attention = section("## Attention and Indexer kernels")
    bytes_moved, _, _ = section("## Byte-moving ops, one H200").partition("\nMissed:")
    product = section("## Grouped FP8 product of the experts, one H200")
    for line in lines:
        op, milliseconds, ratio = line["op"], line["ms"], line["ratio"]
        target = f", {line['verdict'].lower()}"
        if op.startswith("attention"):
            cells = rows(attention, f"{line['shape']} ({op.split()[1]})")[0]
            peer = line["peers"]["FlashMLA"]
            rate = line["operations"] / milliseconds / 1e9
            assert cells[1:5] == [f"{milliseconds:.3f}", f"{rate:.0f}", f"{peer:.3f}", f"{ratio:.2f}"], cells
            assert line["target"] is None or cells[5] == f"{line['target']}{target}"
        elif op == "indexer":
            entries, top = (part.split()[-1] for part in line["shape"].removesuffix(" entries").split(" entries, "))
            cells = rows(attention, f"{int(entries):,}, {top}")[0]
            assert cells[1:3] == [f"{milliseconds:.3f}", f"{100 * ratio:.1f} %"], cells
            assert line["target"] is None or cells[3].endswith(target)
        elif op == "moe_grouped_gemm":
            cells = rows(product, line["shape"].split(", ")[1])[0]
            rate = line["operations"] / milliseconds / 1e9
            assert cells[1:4] == [f"{1e3 * milliseconds:.1f}", f"{rate:.0f}", f"{100 * ratio:.1f} %"], cells
            assert target.endswith(cells[4])
            peers = [f"{1e3 * line['peers'][name]:.1f}" for name in ("torch bf16", "torch fp8")]
            assert cells[5:] == peers, cells
        else:
            assert f"{1e3 * milliseconds:.1f}" in bytes_moved, line
            assert f"{100 * ratio:.1f} %" in bytes_moved, line
            assert f"{100 * line['copy_ratio']:.0f} %" in bytes_moved, line
