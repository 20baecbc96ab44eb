"""Rows between blocks of equal size, as a transport wants them, and rows side by side, as the engine has them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trt_redknot.collectives.device import _with_padding, _without_padding
from trt_redknot.partition import even_split

COUNTS = st.one_of(
    st.lists(st.integers(0, 6), min_size=1, max_size=9),
    st.tuples(st.integers(0, 60), st.integers(1, 9)).map(lambda case: [len(part) for part in even_split(*case)]),
)


@given(COUNTS, st.sampled_from([(), (3,), (2, 5)]))
def test_rows_are_spread_over_blocks_and_put_side_by_side_again(counts: list[int], shape: tuple[int, ...]) -> None:
    size = torch.Size(shape).numel()
    rows = torch.arange(1, sum(counts) * size + 1, dtype=torch.float64).view(sum(counts), *shape)
    padded = _with_padding(rows, counts)
    most = max(counts)
    assert padded.shape == (len(counts) * most, *shape)
    for rank, (block, own) in enumerate(zip(padded.split(most) if most else [], rows.split(counts), strict=False)):
        assert torch.equal(block[: counts[rank]], own)
        assert not block[counts[rank] :].any()
    assert torch.equal(_without_padding(padded, counts), rows)


@pytest.mark.parametrize(
    ("meanwhile", "left"),
    [
        ("", "False 0"),
        ("dist.destroy_process_group(); dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)",
         "True 1"),
    ],
    ids=["open", "the application's own"],
)  # fmt: skip
def test_groups_that_we_made_are_gone_at_the_end_of_the_process(meanwhile: str, left: str) -> None:
    """The default group, too, and no other."""
    program = f"""
import atexit
import torch.distributed as dist
from trt_redknot.collectives.device import DeviceCollectives, make_group
from trt_redknot.collectives.local import LocalCollectives

atexit.register(lambda: print(dist.is_initialized(), len(dist.distributed_c10d._world.pg_map)))
control = LocalCollectives()
collectives = DeviceCollectives(control, make_group(control, "gloo"))
assert dist.is_initialized()
{meanwhile}
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout.strip()) == (0, left), ended.stderr
    assert "Exception" not in ended.stderr
    assert "destroy_process_group" not in ended.stderr
