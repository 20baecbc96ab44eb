"""compress on the GPU against the fp64 reference: both ratios, partial windows, packed entries."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benches.common import random_rope, relative_error
from benches.elementwise_cases import CompressCase, compress_case
from tests.support.gpu import needs_gpu
from trt_redknot.errors import EngineError
from trt_redknot.ops.cuda.elementwise import RowFormat, compress
from trt_redknot.ops.reference import compress as reference
from trt_redknot.ops.reference.packing import pack_pool_latents, pack_rows
from trt_redknot.ops.tables import CompressTable

pytestmark = pytest.mark.usefixtures("poisoned_memory")
SEEDS = st.integers(0, 2**31)
TYPICAL = settings(deadline=None, max_examples=20)
EPS = 1e-6
# bf16 after the norm and after the rotation: each adds at most 2^-8.
TOLERANCE = 8e-3
SHAPES = st.sampled_from(
    [
        (4, 2, 512), (4, 2, 256), (4, 2, 1024), (4, 2, 128), (128, 1, 512), (128, 1, 128), (3, 2, 64), (1, 1, 8),
        (7, 1, 1024),
    ]
)  # fmt: skip


def expected(case: CompressCase, rope: torch.Tensor) -> torch.Tensor:
    return reference.compress(
        case.kv.double(), case.gate.double(), case.ape.double(), case.norm.double(), rope.double(), case.table, eps=EPS
    )


def run(case: CompressCase, rope: torch.Tensor, row_format: RowFormat = RowFormat.BF16) -> torch.Tensor:
    return compress(case.kv, case.gate, case.ape, case.norm, rope, case.table, eps=EPS, row_format=row_format)


@needs_gpu
@TYPICAL
@given(tokens=st.integers(1, 700), shape=SHAPES, float_weights=st.booleans(), gap=st.integers(0, 3), seed=SEEDS)
def test_entries_equal_the_reference(
    tokens: int, shape: tuple[int, int, int], float_weights: bool, gap: int, seed: int
) -> None:
    ratio, series, width = shape
    case = compress_case(tokens, ratio, series, width, seed=seed, device="cuda", float_weights=float_weights, gap=gap)
    rope = random_rope(1024, min(64, width)).to("cuda")
    found = run(case, rope)
    assert relative_error(found, expected(case, rope)) < TOLERANCE
    if width > 64:
        assert torch.equal(run(case, rope, RowFormat.PACKED_LATENT), pack_pool_latents(found, 64))
    assert torch.equal(run(case, rope, RowFormat.PACKED_ROW), pack_rows(found))


@needs_gpu
@TYPICAL
@given(tokens=st.integers(1, 700), width=st.sampled_from([256, 512, 1024]), float_weights=st.booleans(), seed=SEEDS)
def test_windows_with_holes_lie_beside_whole_ones(tokens: int, width: int, float_weights: bool, seed: int) -> None:
    """Whole windows of the model's shape are pooled without tests of their slots; these have some absent."""
    case = compress_case(tokens, 4, 2, width, seed=seed, device="cuda", float_weights=float_weights)
    generator = torch.Generator(device="cuda").manual_seed(seed)
    holes = torch.rand(case.table.slots.shape, generator=generator, device="cuda") < 0.05
    holes[:, 4] = False  # every window keeps its first token
    case.table.slots[holes] = -1
    rope = random_rope(1024, 64).to("cuda")
    assert relative_error(run(case, rope), expected(case, rope)) < TOLERANCE


@needs_gpu
@pytest.mark.parametrize("width", [256, 512, 1024])
def test_gates_that_are_not_finite_stay_in_their_channel(width: int) -> None:
    case = compress_case(24, 4, 2, width, seed=4, device="cuda", float_weights=True)
    rope = random_rope(32, 64).to("cuda")
    # Entry 2 pools rows 8 to 11, second series; entry 3 their first series.
    case.gate[9, width + 5] = float("-inf")
    wanted = expected(case, rope)
    assert relative_error(run(case, rope), wanted) < TOLERANCE
    case.gate[9, width + 5] = float("nan")
    found = run(case, rope)
    assert found[2].isnan().all(), "the norm is over all channels"
    others = torch.tensor([0, 1, 3, 4, 5], device="cuda")
    assert relative_error(found[others], wanted[others]) < TOLERANCE


@needs_gpu
@pytest.mark.parametrize(("ratio", "width"), [(128, 512), (33, 512), (20, 1024), (256, 8), (300, 64)])
@pytest.mark.parametrize("float_weights", [True, False])
def test_many_entries_share_their_weights(ratio: int, width: int, float_weights: bool) -> None:
    """So many entries that a block may take two, and an odd number of them."""
    tokens = 600 * ratio + 7
    case = compress_case(tokens, ratio, 1, width, seed=ratio, device="cuda", float_weights=float_weights, gap=1)
    case.table.slots[20, 3] = -1
    rope = random_rope(tokens, 8).to("cuda")
    wanted = expected(case, rope)
    case.table.slots[21] = -1
    case.table.slots[22, 5] = tokens + 1
    found = run(case, rope)
    spoilt = torch.zeros(601, dtype=torch.bool, device="cuda")
    spoilt[21:23] = True
    assert found[spoilt].isnan().all()
    assert relative_error(found[~spoilt], wanted[~spoilt]) < TOLERANCE


@needs_gpu
@TYPICAL
@given(tokens=st.integers(1, 300), seed=SEEDS)
def test_entries_go_straight_into_the_pool(tokens: int, seed: int) -> None:
    case = compress_case(tokens, 4, 2, 512, seed=seed, device="cuda", float_weights=True, gap=2)
    rope = random_rope(512, 64).to("cuda")
    pool = torch.full((case.table.entries.shape[0] + 5, 512), 3.0, dtype=torch.bfloat16, device="cuda")
    wanted = pool.clone()
    wanted[case.table.entries] = run(case, rope)
    compress(case.kv, case.gate, case.ape, case.norm, rope, case.table, eps=EPS, pool=pool)
    assert torch.equal(pool, wanted)


@needs_gpu
def test_no_entries_is_no_work() -> None:
    case = compress_case(4, 4, 2, 512, seed=1, device="cuda", float_weights=True)
    none = CompressTable(entries=case.table.entries[:0], slots=case.table.slots[:0], positions=case.table.positions[:0])
    rope = random_rope(16, 64).to("cuda")
    assert compress(case.kv, case.gate, case.ape, case.norm, rope, none, eps=EPS).shape == (0, 512)


@needs_gpu
def test_a_slot_outside_the_raw_rows_turns_its_entry_to_nan() -> None:
    case = compress_case(12, 4, 2, 512, seed=2, device="cuda", float_weights=True)
    case.table.slots[1, 3] = 12
    case.table.slots[2, 0] = -2
    found = run(case, random_rope(16, 64).to("cuda"))
    assert found[0].isfinite().all()
    assert found[1:].isnan().all()


@needs_gpu
def test_shapes_that_disagree_are_refused() -> None:
    case = compress_case(12, 4, 2, 512, seed=3, device="cuda", float_weights=True)
    with pytest.raises(EngineError, match="gate: expected shape"):
        compress(
            case.kv, case.gate[:-1], case.ape, case.norm, random_rope(16, 64).to("cuda"), case.table, eps=EPS
        )  # fmt: skip
