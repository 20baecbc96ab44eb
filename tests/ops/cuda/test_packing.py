"""Unpacking on the GPU against the reference, bit for bit, over rows that were packed from anything."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.gpu import needs_gpu
from trt_redknot.artifacts.contents import Part
from trt_redknot.artifacts.formats import ArtifactFormat, TensorCodec
from trt_redknot.errors import EngineError
from trt_redknot.ops.cuda import packing
from trt_redknot.ops.reference import packing as reference

SEEDS = st.integers(0, 2**31)
EXPONENTS = st.sampled_from([-140, -126, -40, -3, 0, 5, 100])


def values(rows: int, width: int, seed: int, exponent: int) -> torch.Tensor:
    """bf16 rows with zeros, blocks of zeros and channels that are no number among them."""
    generator = torch.Generator().manual_seed(seed)
    found = (torch.randn(rows, width, generator=generator, dtype=torch.float64) * 2.0**exponent).to(torch.bfloat16)
    found[torch.rand(rows, width, generator=generator) < 0.1] = 0
    found[torch.rand(rows, width, generator=generator) < 0.01] = float("nan")
    found[torch.rand(rows, width, generator=generator) < 0.01] = float("inf")
    found[: rows // 3, : width // 2] = 0
    return found


def assert_equal(found: torch.Tensor, wanted: torch.Tensor) -> None:
    found, lost = found.cpu(), wanted.isnan()
    assert found.dtype is torch.bfloat16
    assert torch.equal(found.isnan(), lost)
    assert torch.equal(found[~lost].view(torch.int16), wanted[~lost].view(torch.int16))


@needs_gpu
@settings(deadline=None, max_examples=30)
@given(rows=st.integers(0, 70), seed=SEEDS, exponent=EXPONENTS)
def test_latents(rows: int, seed: int, exponent: int) -> None:
    packed = reference.pack_latents(values(rows, 512, seed, exponent), 64)
    assert_equal(packing.unpack_latents(packed.cuda()), reference.unpack_latents(packed, 512, 64, torch.bfloat16))


@needs_gpu
@settings(deadline=None, max_examples=30)
@given(rows=st.integers(0, 70), width=st.sampled_from([8, 64, 128, 136, 1024, 2048]), seed=SEEDS, exponent=EXPONENTS)
def test_plain_rows(rows: int, width: int, seed: int, exponent: int) -> None:
    packed = reference.pack_rows(values(rows, width, seed, exponent))
    assert_equal(packing.unpack_rows(packed.cuda(), width), reference.unpack_rows(packed, width, torch.bfloat16))


@needs_gpu
def test_every_code_and_every_scale() -> None:
    packed = torch.zeros((256, 584), dtype=torch.uint8)
    packed[:, :448] = torch.arange(256, dtype=torch.uint8).repeat(2)[:448]
    packed[1:, 576:583] = torch.arange(1, 256, dtype=torch.uint8).unsqueeze(1)
    packed[0, 576:583] = 127
    assert_equal(packing.unpack_latents(packed.cuda()), reference.unpack_latents(packed, 512, 64, torch.bfloat16))


@needs_gpu
@pytest.mark.parametrize("part", [Part.LATENTS, Part.ENTRIES, Part.INDEX_KEYS, Part.LOCAL])
def test_parts_of_artifacts_are_unpacked_by_the_kernel(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a longer tensor, too; and other dtypes by the reference."""
    width = {Part.INDEX_KEYS: 128, Part.LOCAL: 1024}.get(part, 512)
    codec = TensorCodec(part=part, format=ArtifactFormat.FP8, width=width, rope_dim=64)
    stored = codec.encode(values(40, width, 3, 0))
    wanted = {dtype: codec.decode(stored, dtype) for dtype in (torch.bfloat16, torch.float32)}
    launched = []
    call = packing.call_op
    monkeypatch.setattr(packing, "call_op", lambda name, *args: launched.append(name) or call(name, *args))
    for rows in (slice(None), slice(7, 31), slice(7, 31, 2)):
        assert_equal(codec.decode(stored.cuda()[rows], torch.bfloat16), wanted[torch.bfloat16][rows])
    assert launched == ["unpack"] * 3
    found = codec.decode(stored.cuda(), torch.float32).cpu()
    assert torch.equal(found.nan_to_num(1.5), wanted[torch.float32].nan_to_num(1.5))
    assert launched == ["unpack"] * 3


@needs_gpu
def test_what_the_kernel_does_not_serve_is_refused() -> None:
    with pytest.raises(EngineError, match="refused"):
        packing.unpack_latents(torch.zeros((3, 580), dtype=torch.uint8, device="cuda"))
    with pytest.raises(EngineError, match="refused"):
        packing.unpack_rows(torch.zeros((3, 13), dtype=torch.uint8, device="cuda"), 9)
    with pytest.raises(EngineError, match="refused"):
        packing.unpack_rows(torch.zeros((3, 132), dtype=torch.float32, device="cuda"), 128)
