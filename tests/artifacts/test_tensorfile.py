"""Tensor files: other readers read them, their size is known before, and one test per malformed header."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from trt_redknot.artifacts.faults import ArtifactError, ArtifactFault
from trt_redknot.artifacts.files import Descriptor, Files, write_file
from trt_redknot.artifacts.tensorfile import MAX_HEADER_BYTES, TensorEntry, TensorFile, file_bytes, file_chunks
from trt_redknot.digests import digest_file

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.int64])
SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
TABLES = st.dictionaries(st.from_regex(r"[a-z.]{1,12}", fullmatch=True), st.tuples(DTYPES, SHAPES), max_size=6)


def write(path: Path, tensors: Mapping[str, torch.Tensor]) -> tuple[int, str]:
    entries = [TensorEntry(name=name, dtype=t.dtype, shape=tuple(t.shape)) for name, t in tensors.items()]
    size, digest = write_file(Files(), path, file_chunks(entries, tensors))
    assert size == file_bytes(entries) == path.stat().st_size
    return size, digest


def read(path: Path) -> TensorFile:
    with Descriptor(os.open(path, os.O_RDONLY)) as target:
        return TensorFile(target.fd, path.stat().st_size, label=str(path), files=Files())


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TABLES, st.integers(0, 2**31))
def test_the_library_and_we_read_the_same(
    tmp_path: Path, table: dict[str, tuple[torch.dtype, tuple[int, ...]]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randint(0, 100, shape, generator=generator).to(dtype) for name, (dtype, shape) in table.items()
    }
    path = tmp_path / f"{seed}-{len(list(tmp_path.iterdir()))}.safetensors"
    _, digest = write(path, tensors)
    assert digest == digest_file(path)
    if path.stat().st_size > 16:
        loaded, ours = load_file(path), read(path)
        assert set(loaded) == set(tensors) == set(ours.names())
        for name, tensor in tensors.items():
            assert torch.equal(loaded[name], tensor)
            assert torch.equal(ours.tensor(name), tensor)
            assert ours.tensor(name).dtype is tensor.dtype


def test_we_read_what_the_library_writes(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5), "b": torch.arange(7), "c": torch.randn(2, 2).bfloat16()}
    save_file(tensors, tmp_path / "x")
    ours = read(tmp_path / "x")
    assert all(torch.equal(ours.tensor(name), tensor) for name, tensor in tensors.items())


def test_writing_to_a_view_leaves_the_file_alone(tmp_path: Path) -> None:
    _, digest = write(tmp_path / "x", {"a": torch.ones(1000)})
    read(tmp_path / "x").tensor("a").fill_(7.0)
    assert digest_file(tmp_path / "x") == digest


def header(table: object) -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def one(**changes: object) -> bytes:
    return header({"a": {"dtype": "U8", "shape": [16], "data_offsets": [0, 16], **changes}}) + bytes(16)


MALFORMED = {
    "empty": b"",
    "seven bytes": bytes(7),
    "header of nothing": bytes(8),
    "header longer than the file": (1 << 20).to_bytes(8, "little") + bytes(16),
    "huge header": (1 << 63).to_bytes(8, "little") + bytes(64),
    "negative header": b"\xff" * 8 + bytes(64),
    "header above the limit": (MAX_HEADER_BYTES + 8).to_bytes(8, "little") + bytes(MAX_HEADER_BYTES + 8),
    "odd header": (3).to_bytes(8, "little") + b"{} " + bytes(8),
    "not json": header(b"{nothing"),
    "not utf-8": header(b"\xff\xff\xff\xff"),
    "deep": header(b"[" * 100_000),
    "endless number": header(b'{"a": {"dtype": "U8", "shape": [16], "data_offsets": [0, ' + b"9" * 5000 + b"]}}")
    + bytes(16),
    "twice the same name": header(
        b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},'
        b' "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}'
    )
    + bytes(1),
    "not an object": header([1]),
    "tensor not an object": header({"a": 3}),
    "extra key": one(more=1),
    "missing key": header({"a": {"dtype": "U8", "shape": [16]}}) + bytes(16),
    "unknown dtype": one(dtype="F64"),
    "dtype not text": one(dtype=["U8"]),
    "negative shape": one(shape=[-16]),
    "shape as float": one(shape=[16.0]),
    "shape as bool": one(shape=[True]),
    "huge shape": one(shape=[1 << 60]),
    "product overflows": one(shape=[1 << 40, 1 << 40]),
    "shape not a list": one(shape=16),
    "three offsets": one(data_offsets=[0, 16, 16]),
    "offsets reversed": one(data_offsets=[16, 0]),
    "offsets beyond the end": one(shape=[32], data_offsets=[0, 32]),
    "hole before": one(shape=[8], data_offsets=[8, 16]),
    "data left over": one(shape=[8], data_offsets=[0, 8]),
    "truncated data": one()[:-1],
    "trailing byte": one() + b"\0",
    "overlap": header(
        {
            "a": {"dtype": "U8", "shape": [16], "data_offsets": [0, 16]},
            "b": {"dtype": "U8", "shape": [16], "data_offsets": [0, 16]},
        }
    )
    + bytes(16),
    "misaligned": header(
        {
            "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
            "b": {"dtype": "I64", "shape": [1], "data_offsets": [4, 12]},
        }
    )
    + bytes(12),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_file_is_refused(case: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(MALFORMED[case])
    with pytest.raises(ArtifactError) as caught:
        read(path)
    assert caught.value.fault is ArtifactFault.FILE_HEADER
    assert "bad.safetensors" in str(caught.value)


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=120), st.integers(0, 60))
def test_garbage_is_refused_or_covered(tmp_path: Path, garbage: bytes, at: int) -> None:
    raw = bytearray(one())
    raw[at : at + len(garbage)] = garbage
    path = tmp_path / "fuzz"
    path.write_bytes(raw)
    outcome = outcome_of(path)
    if isinstance(outcome, TensorFile):
        assert sum(outcome.tensor(name).nbytes for name in outcome.names()) < len(raw)
    else:
        assert outcome.fault is ArtifactFault.FILE_HEADER


def outcome_of(path: Path) -> TensorFile | ArtifactError:
    try:
        return read(path)
    except ArtifactError as error:
        return error


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    write(tmp_path / "x", {"a": torch.ones(1)})
    with pytest.raises(ArtifactError, match="no such tensor"):
        read(tmp_path / "x").tensor("b")
