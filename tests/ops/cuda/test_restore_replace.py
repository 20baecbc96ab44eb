"""restore_replace on the GPU against the reference: bf16 and packed tiles, gathered and in order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benches.elementwise_cases import generator_of, normal
from tests.support.gpu import needs_gpu
from trt_redknot.errors import EngineError
from trt_redknot.ops.cuda.elementwise import restore_replace
from trt_redknot.ops.reference import projection as reference
from trt_redknot.ops.reference.packing import pack_rows, unpack_rows

pytestmark = pytest.mark.usefixtures("poisoned_memory")
SEEDS = st.integers(0, 2**31)
TYPICAL = settings(deadline=None, max_examples=20)


@needs_gpu
@TYPICAL
@given(
    rows=st.integers(0, 200),
    local=st.integers(0, 200),
    width=st.sampled_from([8, 16, 136, 1000, 1024, 2048]),
    packed=st.booleans(),
    indexed=st.booleans(),
    seed=SEEDS,
)
def test_state_equals_the_reference(rows: int, local: int, width: int, packed: bool, indexed: bool, seed: int) -> None:
    local = min(local, rows)
    generator = generator_of(seed, "cuda")
    global_state, local_state = normal(generator, rows, width), normal(generator, local, width)
    tile = normal(generator, rows - local + (5 if indexed else 0), width) * 3
    tile = pack_rows(tile) if packed else tile
    index = None
    restored = tile
    if indexed:
        index = torch.randperm(tile.shape[0], generator=generator, device="cuda")[: rows - local]
        restored = tile[index]
    plain = unpack_rows(restored, width, torch.bfloat16) if packed else restored
    # One bf16 addition: the reference rounds once, so does the kernel.
    assert torch.equal(
        restore_replace(global_state, local_state, tile, index=index),
        reference.restore_replace(global_state, local_state, plain),
    )


@needs_gpu
def test_a_restored_row_under_a_local_row_is_never_read() -> None:
    generator = generator_of(3, "cuda")
    global_state, local_state = normal(generator, 6, 64), normal(generator, 4, 64)
    tile = normal(generator, 6, 64)
    tile[:4] = float("nan")
    index = torch.tensor([4, 5], device="cuda")
    assert restore_replace(global_state, local_state, tile, index=index).isfinite().all()


@needs_gpu
def test_an_index_outside_the_tile_turns_its_row_to_nan() -> None:
    generator = generator_of(4, "cuda")
    global_state, local_state, tile = normal(generator, 4, 64), normal(generator, 1, 64), normal(generator, 3, 64)
    found = restore_replace(global_state, local_state, tile, index=torch.tensor([3, -1, 2], device="cuda"))
    assert found[[0, 3]].isfinite().all()
    assert found[[1, 2]].isnan().all()


@needs_gpu
def test_row_counts_that_disagree_are_refused() -> None:
    generator = generator_of(5, "cuda")
    with pytest.raises(EngineError, match="restored: expected shape"):
        restore_replace(normal(generator, 4, 64), normal(generator, 1, 64), normal(generator, 2, 64))
