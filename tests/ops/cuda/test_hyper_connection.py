"""Hyper-connections on the GPU against the fp64 reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benches.common import relative_error
from benches.elementwise_cases import mix_case
from tests.support.gpu import needs_gpu
from trt_redknot.errors import EngineError
from trt_redknot.ops.cuda.elementwise import hyper_connection_post, hyper_connection_pre, hyper_head
from trt_redknot.ops.reference import hyper_connection as reference

pytestmark = pytest.mark.usefixtures("poisoned_memory")
SEEDS = st.integers(0, 2**31)
TYPICAL = settings(deadline=None, max_examples=20)
EPS, NORM_EPS, ITERATIONS = 1e-6, 1e-6, 20
# The collapse is rounded to bf16 before its norm and after it, as the network does: each adds at most 2^-8.
TOLERANCE = 8e-3
# One rounding.
POST_TOLERANCE = 4e-3
# Mixes are sums of bf16 times two bf16 terms of fn (16 bits) in fp32.
MIX_TOLERANCE = 2e-4
SIZES = st.one_of(
    st.tuples(st.just(4), st.integers(1, 40).map(lambda count: 8 * count)),
    st.tuples(st.just(2), st.integers(1, 40).map(lambda count: 16 * count)),
    st.sampled_from([(4, 4096), (4, 7168), (4, 2048)]),
)
ROWS = st.one_of(st.integers(0, 40), st.sampled_from([127, 128, 129, 300, 769, 900]))


@needs_gpu
@TYPICAL
@given(rows=ROWS, sizes=SIZES, float_norm=st.booleans(), seed=SEEDS)
def test_pre_equals_the_reference(rows: int, sizes: tuple[int, int], float_norm: bool, seed: int) -> None:
    case = mix_case(rows, *sizes, seed=seed, device="cuda")
    norm = case.norm.float() if float_norm else case.norm
    found = hyper_connection_pre(
        case.streams, case.fn, case.base, case.scale, norm, iterations=ITERATIONS, eps=EPS, norm_eps=NORM_EPS
    )
    wanted = reference.hyper_connection_pre(
        case.streams.double(), case.fn.double(), case.base.double(), case.scale.double(), norm.double(),
        iterations=ITERATIONS, eps=EPS, norm_eps=NORM_EPS,
    )  # fmt: skip
    assert relative_error(found[0], wanted[0]) < TOLERANCE
    assert relative_error(found[1], wanted[1]) < MIX_TOLERANCE
    assert relative_error(found[2], wanted[2]) < MIX_TOLERANCE


@needs_gpu
@pytest.mark.parametrize(("rows", "hidden"), [(4801, 4096), (769, 4096), (2603, 7168), (401, 7168)])
def test_pre_of_many_rows(rows: int, hidden: int) -> None:
    """More groups of rows than a cluster of blocks has slots for, or balances at once, and the same bits twice."""
    case = mix_case(rows, 4, hidden, seed=rows, device="cuda")
    first, second = (
        hyper_connection_pre(
            case.streams, case.fn, case.base, case.scale, case.norm,
            iterations=ITERATIONS, eps=EPS, norm_eps=NORM_EPS,
        )
        for _ in range(2)
    )  # fmt: skip
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
    for begin in range(0, rows, 512):
        part = slice(begin, begin + 512)
        wanted = reference.hyper_connection_pre(
            case.streams[part].double(), case.fn.double(), case.base.double(), case.scale.double(), case.norm.double(),
            iterations=ITERATIONS, eps=EPS, norm_eps=NORM_EPS,
        )  # fmt: skip
        for found, expected, tolerance in zip(first, wanted, (TOLERANCE, MIX_TOLERANCE, MIX_TOLERANCE), strict=True):
            assert relative_error(found[part], expected) < tolerance


@needs_gpu
@pytest.mark.parametrize("rows", [1, 2, 40, 900])
@pytest.mark.parametrize("hidden", [4096, 7168])
def test_a_call_that_starts_early_waits_for_what_it_reads(rows: int, hidden: int) -> None:
    """A call may start while the kernel before it ends: the one that wrote its streams, or its fn."""
    case = mix_case(rows, 4, hidden, seed=rows, device="cuda")

    def chain(wait: Callable[[], None]) -> torch.Tensor:
        streams = case.streams
        for step in range(6):
            wait()
            fn = case.fn * (1 + step)
            wait()
            normed, post, comb = hyper_connection_pre(
                streams, fn, case.base, case.scale, case.norm, iterations=ITERATIONS, eps=EPS, norm_eps=NORM_EPS
            )
            wait()
            streams = hyper_connection_post(streams, normed, post, comb)
        return streams

    assert torch.equal(chain(lambda: None), chain(torch.cuda.synchronize))


@needs_gpu
@pytest.mark.parametrize("hidden", [4096, 7168, 2048])
def test_a_row_that_is_not_finite_stays_alone(hidden: int) -> None:
    case = mix_case(70, 4, hidden, seed=3, device="cuda")

    def call() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return hyper_connection_pre(
            case.streams, case.fn, case.base, case.scale, case.norm, iterations=ITERATIONS, eps=EPS, norm_eps=NORM_EPS
        )

    clean = call()
    case.streams[37, 2, 5] = float("nan")
    others = torch.arange(70, device="cuda") != 37
    for before, after in zip(clean, call(), strict=True):
        assert torch.equal(before[others], after[others])
        assert after[37].isnan().any()


@needs_gpu
@TYPICAL
@given(rows=ROWS, sizes=SIZES, seed=SEEDS)
def test_head_equals_the_reference(rows: int, sizes: tuple[int, int], seed: int) -> None:
    case = mix_case(rows, *sizes, seed=seed, device="cuda")
    found = hyper_head(
        case.streams, case.head_fn, case.head_base, case.head_scale, case.norm, eps=EPS, norm_eps=NORM_EPS
    )
    wanted = reference.hyper_head(
        case.streams.double(), case.head_fn.double(), case.head_base.double(), case.head_scale.double(),
        case.norm.double(), eps=EPS, norm_eps=NORM_EPS,
    )  # fmt: skip
    assert relative_error(found, wanted) < TOLERANCE


@needs_gpu
@TYPICAL
@given(rows=ROWS, sizes=SIZES, seed=SEEDS)
def test_post_equals_the_reference(rows: int, sizes: tuple[int, int], seed: int) -> None:
    case = mix_case(rows, *sizes, seed=seed, device="cuda")
    _, post, comb = reference.hyper_connection_pre(
        case.streams.float(), case.fn, case.base, case.scale, case.norm.float(),
        iterations=ITERATIONS, eps=EPS, norm_eps=NORM_EPS,
    )  # fmt: skip
    # Out of the Sinkhorn's symmetry, so that a transposed comb shows.
    comb = comb * torch.linspace(0.5, 2.0, comb.shape[1] ** 2, device="cuda").view(comb.shape[1:])
    found = hyper_connection_post(case.streams, case.output, post, comb)
    wanted = reference.hyper_connection_post(case.streams.double(), case.output.double(), post.double(), comb.double())
    assert relative_error(found, wanted) < POST_TOLERANCE


@needs_gpu
@pytest.mark.parametrize("streams", [1, 3, 8])
def test_other_stream_counts_are_refused(streams: int) -> None:
    case = mix_case(4, streams, 64, seed=1, device="cuda")
    with pytest.raises(EngineError, match="not supported by this build"):
        hyper_connection_pre(
            case.streams, case.fn, case.base, case.scale, case.norm, iterations=2, eps=EPS, norm_eps=NORM_EPS
        )
