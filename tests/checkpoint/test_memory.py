"""A rank reads its own slices: peak memory while loading from a file several times larger than its part."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trt_redknot.checkpoint import layer_specs, rank_bytes, shared_specs
from trt_redknot.checkpoint.inventory import stored_shape
from trt_redknot.checkpoint.names import Piece, released_name
from trt_redknot.config import load_geometry

CONFIG = {
    "model_type": "deepseek_v4",
    "vocab_size": 512,
    "hidden_size": 512,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "head_dim": 64,
    "q_lora_rank": 128,
    "o_groups": 8,
    "o_lora_rank": 32,
    "n_routed_experts": 64,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "qk_rope_head_dim": 16,
    "num_hash_layers": 1,
    "compress_ratios": [0, 4],
}

PROBE = """
import contextlib, re, sys
from pathlib import Path
import torch
from trt_redknot.checkpoint import Checkpoint
from trt_redknot.config import load_geometry

def status(field):
    return int(re.search(field + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

torch.set_num_threads(1)
directory, size = Path(sys.argv[1]), int(sys.argv[2])
geometry = load_geometry(directory)
# Everything that is loaded lazily is loaded before the measurement.
torch.zeros(256, 256).to(torch.bfloat16).clone()
before = status("VmRSS")
# Where the peak cannot be reset it contains that of the imports: the growth measured is larger, never smaller.
with contextlib.suppress(OSError):
    Path("/proc/self/clear_refs").write_text("5")
checkpoint = Checkpoint.open(directory, geometry)
kept = [checkpoint.load_layer(layer, 0, size, torch.bfloat16) for layer in range(geometry.layers)]
kept.append(checkpoint.load_shared(0, size, torch.bfloat16))
print(status("VmHWM") - before)
"""


@pytest.fixture(scope="module")
def sparse_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of zeros, over 400 MB long and nearly nothing on disk."""
    directory = tmp_path_factory.mktemp("sparse")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    geometry = load_geometry(directory)
    header, end = {}, 0
    specs = [("", spec) for spec in shared_specs(geometry)]
    specs += [(f"layers.{layer}.", spec) for layer in range(geometry.layers) for spec in layer_specs(geometry, layer)]
    for prefix, spec in specs:
        shape = stored_shape(spec)
        name = released_name(Piece(prefix + spec.name))
        dtype, width = ("I64", 8) if name.endswith("tid2eid") else ("F32", 4)
        stop = end + math.prod(shape) * width
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, stop]}
        end = stop
    encoded = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as stream:
        stream.write(struct.pack("<Q", len(encoded)) + encoded)
        stream.truncate(8 + len(encoded) + end)
    return directory


def peak_growth(directory: Path, size: int) -> int:
    command = [sys.executable, "-c", PROBE, str(directory), str(size)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_a_rank_of_eight_stays_far_below_the_whole(sparse_checkpoint: Path) -> None:
    geometry = load_geometry(sparse_checkpoint)
    whole = (sparse_checkpoint / "model.safetensors").stat().st_size
    own = rank_bytes(geometry, 0, 8, torch.bfloat16)
    assert whole > 400e6
    assert own < whole / 10
    growth = peak_growth(sparse_checkpoint, 8)
    assert own * 0.9 < growth < whole / 4, f"{growth / 1e6:.0f} MB for a part of {own / 1e6:.0f} MB"


def test_the_probe_sees_what_is_read(sparse_checkpoint: Path) -> None:
    geometry = load_geometry(sparse_checkpoint)
    assert peak_growth(sparse_checkpoint, 1) > rank_bytes(geometry, 0, 1, torch.bfloat16)
