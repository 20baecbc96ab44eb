"""Arrays that travel together arrive as they were; what the device gave is what the host gets."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from trt_redknot.engine.uploads import ArrayBatch, Arriving, upload

CPU = torch.device("cpu")
NUMBERS = arrays(np.int64, array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=40))


@given(st.lists(NUMBERS, max_size=8))
def test_arrays_arrive_in_order_and_whole(sent: list[np.ndarray]) -> None:
    batch = ArrayBatch(sent)
    arrived = batch.upload(CPU)
    assert len(arrived) == len(sent)
    for tensor, array in zip(arrived, sent, strict=True):
        assert tensor.shape == array.shape
        assert np.array_equal(tensor.numpy(), array)
    again = torch.empty(batch.size, dtype=torch.int64)
    again.copy_(batch.packed(CPU))
    for tensor, array in zip(batch.views(again), sent, strict=True):
        assert np.array_equal(tensor.numpy(), array)


@given(st.lists(NUMBERS, min_size=1, max_size=4))
def test_an_array_travels_once(sent: list[np.ndarray]) -> None:
    once, twice = ArrayBatch(sent), ArrayBatch([*sent, *sent])
    assert twice.size == once.size
    for tensor, array in zip(twice.upload(CPU), [*sent, *sent], strict=True):
        assert np.array_equal(tensor.numpy(), array)


def test_an_array_without_elements_that_comes_again_hides_no_other() -> None:
    nothing, some = np.empty(0, dtype=np.int64), np.arange(3)
    before, between, after = ArrayBatch([nothing, some, nothing]).upload(CPU)
    assert before.shape == after.shape == (0,)
    assert np.array_equal(between.numpy(), some)


def test_equal_layouts_are_equal_shapes_in_equal_places() -> None:
    one, other = np.arange(6).reshape(2, 3), np.arange(10, 16).reshape(2, 3)
    assert ArrayBatch([one, other]).layout == ArrayBatch([other, one]).layout
    assert ArrayBatch([one, other]).layout != ArrayBatch([one, one]).layout
    assert ArrayBatch([one]).layout != ArrayBatch([one.reshape(6)]).layout


def test_views_and_columns_are_arrays_like_others() -> None:
    table = np.arange(12).reshape(3, 4)
    assert np.array_equal(upload(table[:, 1], CPU).numpy(), [1, 5, 9])


def test_what_arrives_is_what_was_there() -> None:
    assert Arriving(torch.tensor([3, 1])).wait().tolist() == [3, 1]
    assert Arriving(torch.tensor([1.5, -2.25], dtype=torch.float64)).wait().tolist() == [1.5, -2.25]
    assert Arriving(torch.arange(3)).wait().dtype == np.int64
