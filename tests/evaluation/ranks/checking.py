"""The bench's check over real ranks: GEOMETRY_FOLDER LENGTH DOCUMENTS. Prints what it found, as one line of JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from trt_redknot.collectives import from_communicator
from trt_redknot.config.geometry import RouterKind
from trt_redknot.config.parse import load_geometry
from trt_redknot.engine.tiles import TileOptions
from trt_redknot.evaluation.standin import make_rank
from trt_redknot.evaluation.ttft_check import check_arms, checked_geometry
from trt_redknot.launch import world_communicator

if __name__ == "__main__":
    folder, length, documents = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    collectives = from_communicator(world_communicator())
    geometry = checked_geometry(load_geometry(folder), RouterKind.HASH, layers=7, experts=8, vocab=97)
    rank = make_rank(
        geometry, collectives, chunk_rows=length, length=length, dtype=torch.float32, device=torch.device("cpu"),
        tiles=TileOptions(depth=0),
    )  # fmt: skip
    with torch.inference_mode():
        found = check_arms(rank, length, documents, runs=1, chunks=(300,))
    if collectives.rank == 0:
        print(json.dumps({"ranks": collectives.size, **found.to_json()}))
