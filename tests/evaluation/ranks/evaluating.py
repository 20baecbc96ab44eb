"""Builds an engine, then runs run/evaluate.py on it, on the same ranks: CHECKPOINT ENGINE ARGUMENT..."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from trt_redknot.cli.build_engine import build_engine_command
from trt_redknot.launch import world_communicator

PROJECT = Path(__file__).resolve().parents[3]

if __name__ == "__main__":
    checkpoint, engine, *arguments = sys.argv[1:]
    build_engine_command(world_communicator()).main(
        ["--checkpoint", checkpoint, "--output", engine], standalone_mode=False
    )  # fmt: skip
    script = str(PROJECT / "run" / "evaluate.py")
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
