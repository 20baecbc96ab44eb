"""Damaged, incomplete and foreign checkpoints: one error, everything listed, nothing served."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trt_redknot.checkpoint import Checkpoint
from trt_redknot.errors import CheckpointError

Write = Callable[..., Path]
INDEX = "model.safetensors.index.json"


def fault_text(directory: Path, network) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(directory, network.geometry)
    message = str(caught.value)
    assert "\n" not in message
    assert str(directory) in message
    return message


@pytest.mark.parametrize("shards", [1, 3])
def test_everything_wrong_is_in_one_error(network, write: Write, shards: int) -> None:
    tensors = dict(network.released)
    del tensors["layers.1.attn.wq_a.weight"]
    del tensors["norm.weight"]
    for expert in (0, 1, 2, 5):
        del tensors[f"layers.2.ffn.experts.{expert}.w3.weight"]
    tensors["layers.0.attn.wq_a.bias"] = torch.zeros(3)
    tensors["layers.4.attn_norm.weight"] = torch.zeros(160)
    tensors["layers.0.attn.compressor.ape"] = torch.zeros(4, 80)
    tensors["layers.1.ffn.gate.tid2eid"] = torch.zeros(131, 2, dtype=torch.int64)
    tensors["layers.2.attn.wo_a.weight"] = torch.zeros(160, 288)
    tensors["layers.3.hc_ffn_scale"] = torch.zeros(3, dtype=torch.int32)
    tensors["layers.3.ffn_norm.weight"] = torch.zeros(159)
    message = fault_text(write(tensors, shards=shards), network)
    for expected in (
        "has 13 faults",
        "missing layers.1.attn.wq_a.weight (shape [136, 160])",
        "missing norm.weight",
        "missing layers.2.ffn.experts.{0-2,5}.w3.weight",
        "unexpected layers.0.attn.wq_a.bias",
        "unexpected layers.4.attn_norm.weight",
        "unexpected layers.0.attn.compressor.ape",
        "unexpected layers.1.ffn.gate.tid2eid",
        "misshapen layers.2.attn.wo_a.weight (expected [288, 80], found [160, 288]",
        "misshapen layers.3.hc_ffn_scale (dtype I32",
        "misshapen layers.3.ffn_norm.weight (expected [160], found [159]",
    ):
        assert expected in message, expected


def test_block_scales_missing_extra_and_misshapen(network, write: Write) -> None:
    tensors = dict(network.released)
    for name in ("wq_a", "wq_b", "wkv", "wo_b"):
        weight = tensors[f"layers.0.attn.{name}.weight"]
        tensors[f"layers.0.attn.{name}.weight"] = weight.to(torch.float8_e4m3fn)
    tensors["layers.0.attn.wq_b.scale"] = torch.ones(3, 1)
    tensors["layers.0.attn.wkv.scale"] = torch.ones(1, 2, dtype=torch.bfloat16)
    tensors["layers.0.attn.wo_b.scale"] = torch.ones(2, 3)
    tensors["layers.0.attn.wo_a.scale"] = torch.ones(3, 1)
    tensors["layers.0.attn.q_norm.weight"] = tensors["layers.0.attn.q_norm.weight"].to(torch.float8_e4m3fn)
    tensors["layers.0.attn.compressor.scale"] = torch.ones(1)
    message = fault_text(write(tensors), network)
    assert "has 6 faults" in message
    assert "missing layers.0.attn.wq_a.scale (block scales, shape [2, 2])" in message
    assert "misshapen layers.0.attn.wq_b.scale (expected [3, 2], found [3, 1]" in message
    assert "misshapen layers.0.attn.wkv.scale (dtype BF16" in message
    assert "unexpected layers.0.attn.wo_a.scale" in message
    assert "misshapen layers.0.attn.q_norm.weight (dtype F8_E4M3" in message
    assert "unexpected layers.0.attn.compressor.scale" in message


def test_the_same_tensor_under_two_names(network, write: Write) -> None:
    double = {"layers.0.attn.norm.weight": network.released["layers.0.attn.kv_norm.weight"].clone()}
    message = fault_text(write(network.released | double), network)
    assert "has 1 fault," in message
    assert "the same as layers.0.attn." in message


@pytest.mark.parametrize("shards", [1, 3])
def test_truncated_files_name_the_tensors_they_lost(network, write: Write, shards: int) -> None:
    directory = write(network.released, shards=shards)
    path = sorted(directory.glob("*.safetensors"))[-1]
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    ends = sorted((entry["data_offsets"][1], name) for name, entry in header.items())
    path.write_bytes(content[: 8 + length + ends[-4][0]])
    message = fault_text(directory, network)
    assert "has 3 faults" in message
    for _, name in ends[-3:]:
        assert f"truncated {name}" in message.replace("{", "").replace("}", "")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "too short"),
        (b"\x01\x02", "too short"),
        (struct.pack("<Q", 2**63) + b"{}", "claims 9223372036854775808 bytes"),
        (struct.pack("<Q", 2**64 - 1), "claims"),
        (struct.pack("<Q", 100) + b"{}", "truncated header"),
        (struct.pack("<Q", 0), "garbage header"),
        (struct.pack("<Q", 4) + b"abcd", "garbage header"),
        (struct.pack("<Q", 4) + b"\xff\xfe\xfd\xfc", "garbage header"),
        (struct.pack("<Q", 2) + b"[]", "garbage header"),
        (struct.pack("<Q", 60_000) + b"[" * 60_000, "garbage header"),
        (b"\x80\x04\x95" + b"cos\nsystem\n" * 20, "claims"),
    ],
)
@pytest.mark.parametrize("shards", [1, 3])
def test_files_that_are_no_safetensors(network, write: Write, content: bytes, reason: str, shards: int) -> None:
    directory = write(network.released, shards=shards)
    path = sorted(directory.glob("*.safetensors"))[0]
    path.write_bytes(content)
    message = fault_text(directory, network)
    assert "has 1 fault," in message
    assert f"unreadable {path.name}" in message
    assert reason in message


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"dtype": "F32", "shape": [160], "data_offsets": [0, 641]}, "needs 640 bytes, has 641"),
        ({"dtype": "F32", "shape": [160], "data_offsets": [640, 0]}, "data_offsets"),
        ({"dtype": "F32", "shape": [160], "data_offsets": [-640, 0]}, "data_offsets"),
        ({"dtype": "F32", "shape": [160], "data_offsets": [0]}, "data_offsets"),
        ({"dtype": "F32", "shape": [-160], "data_offsets": [0, 640]}, "shape"),
        ({"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}, "shape"),
        ({"dtype": "F32", "shape": "160", "data_offsets": [0, 640]}, "shape"),
        ({"dtype": "pickle", "shape": [160], "data_offsets": [0, 640]}, "unknown dtype"),
        ({"dtype": None, "shape": [160], "data_offsets": [0, 640]}, "unknown dtype"),
        ({"shape": [160]}, "unknown dtype"),
        ("F32", "no description"),
    ],
)
def test_header_entries_are_not_believed(
    network, write: Write, rewrite_header: Callable[..., None], entry: object, reason: str
) -> None:
    directory = write(network.released)
    path = directory / "model.safetensors"
    rewrite_header(path, lambda header: header | {"norm.weight": entry})
    message = fault_text(directory, network)
    assert "unreadable model.safetensors" in message
    assert reason in message


def test_overlapping_tensors_are_refused(network, write: Write, rewrite_header: Callable[..., None]) -> None:
    directory = write(network.released)

    def overlap(header: dict) -> dict:
        other = header["layers.0.attn_norm.weight"]
        return header | {"norm.weight": other}

    rewrite_header(directory / "model.safetensors", overlap)
    assert "unreadable model.safetensors" in fault_text(directory, network)


def test_trailing_bytes_are_refused(network, write: Write) -> None:
    directory = write(network.released)
    with (directory / "model.safetensors").open("ab") as stream:
        stream.write(b"x")
    assert "unreadable model.safetensors" in fault_text(directory, network)


def test_an_index_that_names_a_missing_file(network, write: Write) -> None:
    directory = write(network.released, shards=3)
    (directory / "model-00002-of-00003.safetensors").unlink()
    message = fault_text(directory, network)
    assert "has 1 fault," in message
    assert "unreadable model-00002-of-00003.safetensors (No such file" in message


@pytest.mark.parametrize(
    "file",
    [
        "../model.safetensors",
        "/etc/model.safetensors",
        "sub/model.safetensors",
        "..",
        "",
        "model.bin",
        "a\\b.safetensors",
        "a\0.safetensors",
    ],
)
def test_an_index_that_names_a_file_elsewhere(network, write: Write, file: str) -> None:
    directory = write(network.released, shards=3)
    (directory.parent / "model.safetensors").write_bytes(b"")
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"]["norm.weight"] = file
    (directory / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="names a file that is no safetensors file beside it"):
        Checkpoint.open(directory, network.geometry)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}'])
def test_ill_formed_indices(network, write: Write, content: str) -> None:
    directory = write(network.released, shards=3)
    (directory / INDEX).write_text(content)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        Checkpoint.open(directory, network.geometry)


def test_an_index_that_disagrees_with_the_files(network, write: Write) -> None:
    directory = write(network.released, shards=3)
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"]["norm.weight"], index["weight_map"]["ghost.weight"] = sorted(set(index["weight_map"].values()))[
        :2
    ]
    home = next(file.name for file in directory.glob("*.safetensors") if b'"norm.weight"' in file.read_bytes())
    index["weight_map"]["norm.weight"] = next(f for f in set(index["weight_map"].values()) if f != home)
    (directory / INDEX).write_text(json.dumps(index))
    message = fault_text(directory, network)
    assert "missing norm.weight (the index places it in" in message
    assert f"unexpected norm.weight ({home} holds it, the index places it in" in message
    assert "missing ghost.weight" in message


def test_no_weights_and_no_directory(network, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no weights"):
        Checkpoint.open(tmp_path, network.geometry)
    with pytest.raises(CheckpointError, match="not a directory"):
        Checkpoint.open(tmp_path / "nowhere", network.geometry)


def test_linked_files_are_followed(network, write: Write, tmp_path: Path) -> None:
    directory = write(network.released)
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "model.safetensors").symlink_to(directory / "model.safetensors")
    assert Checkpoint.open(cache, network.geometry).load_layer(0, 0, 1, torch.float32)


@pytest.mark.parametrize("value", [6, -1, 2**31, 2**32, -(2**40)])
def test_a_hash_table_that_names_a_missing_expert(network, write: Write, value: int) -> None:
    tensors = dict(network.released)
    table = tensors["layers.3.ffn.gate.tid2eid"].clone()
    table[7, 1] = value
    tensors["layers.3.ffn.gate.tid2eid"] = table
    checkpoint = Checkpoint.open(write(tensors), network.geometry)
    assert checkpoint.load_layer(0, 0, 1, torch.float32)
    with pytest.raises(CheckpointError, match=r"layers\.3\.ffn\.gate\.tid2eid.*token 7, column 1.*expected 0 to 5"):
        checkpoint.load_layer(3, 0, 1, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e8m0fnu])
def test_a_scale_that_is_not_finite(network, write: Write, dtype: torch.dtype) -> None:
    tensors = dict(network.released)
    tensors["layers.0.attn.wq_a.weight"] = tensors["layers.0.attn.wq_a.weight"].to(torch.float8_e4m3fn)
    tensors["layers.0.attn.wq_a.scale"] = torch.tensor([[1.0, 1.0], [1.0, float("nan")]]).to(dtype)
    checkpoint = Checkpoint.open(write(tensors), network.geometry)
    with pytest.raises(CheckpointError, match=r"layers\.0\.attn\.wq_a\.scale has a block scale that is not finite"):
        checkpoint.load_layer(0, 0, 1, torch.float32)


@pytest.mark.parametrize("change", ["remove", "garbage", "reshape"])
def test_files_that_change_after_opening(network, write: Write, change: str) -> None:
    directory = write(network.released)
    checkpoint = Checkpoint.open(directory, network.geometry)
    path = directory / "model.safetensors"
    path.unlink()
    if change == "garbage":
        path.write_bytes(b"garbage")
    elif change == "reshape":
        shifted = {name: tensor.to(torch.float16) for name, tensor in network.released.items()}
        directory.rename(directory.parent / "before")
        write(shifted)
    with pytest.raises(CheckpointError, match="cannot be read any more"):
        checkpoint.load_layer(0, 0, 1, torch.float32)
