"""Tensors that are in host memory already travel nowhere; those of a GPU are in tests/engine/test_gpu.py."""

from __future__ import annotations

import torch

from trt_redknot.artifacts.contents import Part
from trt_redknot.artifacts.copies import HostCopies
from trt_redknot.artifacts.formats import ArtifactFormat, TensorCodec


def test_what_is_taken_is_not_what_the_caller_writes_next() -> None:
    copies = HostCopies()
    for form in (ArtifactFormat.FLOAT32, ArtifactFormat.BFLOAT16, ArtifactFormat.FP8):
        codec = TensorCodec(part=Part.LOCAL, format=form, width=256, rope_dim=0)
        rows = torch.randn(5, 256, generator=torch.Generator().manual_seed(1)).bfloat16().float()
        copy = copies.begin(codec.encode(rows))
        wanted = codec.encode(rows)
        rows.fill_(float("nan"))
        assert torch.equal(copy.wait(), wanted)
        assert copy.nbytes == wanted.nbytes
        assert copy.wait().shape == codec.stored_shape((5, 256))
