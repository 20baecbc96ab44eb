"""norm_rope_pack, rms_norm and query_norm on the GPU against the fp64 reference, packed rows bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benches.common import random_rope, relative_error
from benches.elementwise_cases import generator_of, normal
from tests.support.gpu import needs_gpu
from trt_redknot.errors import EngineError
from trt_redknot.ops.cuda.elementwise import RowFormat, norm_rope_pack, query_norm, rms_norm
from trt_redknot.ops.reference import norms as reference
from trt_redknot.ops.reference.packing import pack_pool_latents, pack_rows

pytestmark = pytest.mark.usefixtures("poisoned_memory")
SEEDS = st.integers(0, 2**31)
TYPICAL = settings(deadline=None, max_examples=20)
EPS = 1e-6
# The kernel rounds to bf16 after the norm and after the rotation, as the network does: each adds at most 2^-8.
TOLERANCE = 8e-3
WIDTHS = st.integers(1, 128).map(lambda eighths: eighths * 8)


def latents(rows: int, width: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = generator_of(seed, "cuda")
    # Rows of very different size, so that the norm matters.
    sizes = torch.randn((rows, 1), generator=generator, device="cuda").exp2()
    return normal(generator, rows, width) * sizes.bfloat16(), normal(generator, width) + 1


@needs_gpu
@TYPICAL
@given(rows=st.integers(0, 300), width=WIDTHS, share=st.integers(1, 8), float_norm=st.booleans(), seed=SEEDS)
def test_rows_equal_the_reference(rows: int, width: int, share: int, float_norm: bool, seed: int) -> None:
    x, weight = latents(rows, width, seed)
    weight = weight.float() if float_norm else weight
    rope = random_rope(512, max(8, width * share // 64 * 8)).to("cuda")
    positions = torch.randint(0, 512, (rows,), device="cuda", generator=generator_of(seed, "cuda"))
    found = norm_rope_pack(x, weight, rope, positions, eps=EPS)
    wanted = reference.norm_rope_pack(x.double(), weight.double(), rope.double(), positions, eps=EPS)
    assert found.shape == (rows, width)
    assert relative_error(found, wanted) < TOLERANCE


@needs_gpu
@TYPICAL
@given(rows=st.integers(1, 200), width=st.sampled_from([128, 136, 256, 512, 576, 1024]), seed=SEEDS, data=st.data())
def test_packed_rows_are_the_packing_of_the_bf16_rows(rows: int, width: int, seed: int, data: st.DataObject) -> None:
    x, weight = latents(rows, width, seed)
    if data.draw(st.booleans()):
        x[data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, width - 1))] = float("nan")
        weight[data.draw(st.integers(0, width - 1))] = float("inf")
        weight[: data.draw(st.sampled_from([0, 64, 128]))] = 0
    rope = random_rope(512, 64).to("cuda")
    positions = torch.arange(rows, device="cuda")
    plain = norm_rope_pack(x, weight, rope, positions, eps=EPS)
    latent = norm_rope_pack(x, weight, rope, positions, eps=EPS, row_format=RowFormat.PACKED_LATENT)
    row = norm_rope_pack(x, weight, rope, positions, eps=EPS, row_format=RowFormat.PACKED_ROW)
    wanted = pack_pool_latents(plain, 64)
    # NaN rope channels are bf16 and may carry any payload.
    nope, rope_end = width - 64, width + 64
    assert torch.equal(latent[:, :nope], wanted[:, :nope])
    assert torch.equal(latent[:, rope_end:], wanted[:, rope_end:])
    found_rope = latent[:, nope:rope_end].contiguous().view(torch.bfloat16)
    assert torch.equal(found_rope.nan_to_num(nan=7e3), plain[:, nope:].nan_to_num(nan=7e3))
    assert torch.equal(row, pack_rows(plain))


@needs_gpu
@TYPICAL
@given(
    rows=st.integers(1, 60),
    heads=st.sampled_from([1, 2, 7, 64]),
    width=st.sampled_from([64, 512, 1024, 1536, 4096, 7168]),
    seed=SEEDS,
)
def test_norms_without_rotation(rows: int, heads: int, width: int, seed: int) -> None:
    x, weight = latents(rows * heads, width, seed)
    assert (
        relative_error(rms_norm(x, weight, eps=EPS), reference.rms_norm(x.double(), weight.double(), eps=EPS))
        < TOLERANCE
    )
    q = x.view(rows, heads, width)
    assert relative_error(query_norm(q, eps=EPS), reference.query_norm(q.double(), eps=EPS)) < TOLERANCE


@needs_gpu
@TYPICAL
@given(rows=st.integers(1, 100), pool=st.integers(1, 200), seed=SEEDS)
def test_only_the_named_pool_rows_are_written(rows: int, pool: int, seed: int) -> None:
    x, weight = latents(rows, 512, seed)
    rope, positions = random_rope(512, 64).to("cuda"), torch.arange(rows, device="cuda")
    targets = torch.randperm(rows + pool, device="cuda", generator=generator_of(seed, "cuda"))[:rows] - rows // 2
    kept = torch.full((pool, 512), 3.0, dtype=torch.bfloat16, device="cuda")
    norm_rope_pack(x, weight, rope, positions, eps=EPS, pool=kept, pool_rows=targets)
    wanted = torch.full_like(kept, 3.0)
    inside = (targets >= 0) & (targets < pool)
    wanted[targets[inside]] = norm_rope_pack(x, weight, rope, positions, eps=EPS)[inside]
    assert torch.equal(kept, wanted)


@needs_gpu
@pytest.mark.parametrize("float_norm", [True, False])
def test_many_packed_latents_go_straight_into_the_pool(float_norm: bool) -> None:
    """Several rows a warp: each is the packing of its bf16 row, rows that are not finite and dropped ones included."""
    rows = 9001
    x, weight = latents(rows, 512, 5)
    weight = weight.float() if float_norm else weight
    x[::97, 11] = float("nan")
    x[5::97, 470] = float("inf")
    x[7::97] = 0
    rope = random_rope(512, 64).to("cuda")
    positions = torch.randint(0, 520, (rows,), device="cuda", generator=generator_of(6, "cuda"))
    targets = torch.randperm(rows, device="cuda", generator=generator_of(7, "cuda")) - 50
    pool = torch.full((rows - 90, 640), 0xA5, dtype=torch.uint8, device="cuda")
    wanted = pool.clone()
    norm_rope_pack(
        x, weight, rope, positions, eps=EPS, row_format=RowFormat.PACKED_LATENT, pool=pool, pool_rows=targets
    )
    inside = (targets >= 0) & (targets < pool.shape[0])
    plain = norm_rope_pack(x, weight, rope, positions, eps=EPS)
    wanted[targets[inside]] = pack_pool_latents(plain, 64)[inside]
    assert torch.equal(pool[:, :448], wanted[:, :448])
    assert torch.equal(pool[:, 576:], wanted[:, 576:])
    # NaN rope channels are bf16 and may carry any payload.
    found_rope, wanted_rope = (part[:, 448:576].contiguous().view(torch.bfloat16) for part in (pool, wanted))
    assert torch.equal(found_rope.nan_to_num(nan=7e3), wanted_rope.nan_to_num(nan=7e3))


@needs_gpu
def test_positions_outside_the_table_turn_the_rope_channels_to_nan() -> None:
    x, weight = latents(4, 512, 1)
    rope, positions = random_rope(16, 64).to("cuda"), torch.tensor([0, 16, -1, 2**40], device="cuda")
    found = norm_rope_pack(x, weight, rope, positions, eps=EPS)
    assert found[0].isfinite().all()
    assert found[:, :448].isfinite().all()
    assert found[1:, 448:].isnan().all()


@needs_gpu
@pytest.mark.parametrize("spoil", ["dtype", "width", "rope", "positions", "strides"])
def test_what_the_kernel_does_not_serve_is_refused(spoil: str) -> None:
    x, weight = latents(4, 512, 2)
    rope, positions = random_rope(16, 64).to("cuda"), torch.zeros(4, dtype=torch.int64, device="cuda")
    if spoil == "dtype":
        x = x.half()
    elif spoil == "width":
        x, weight = x[:, :509].contiguous(), weight[:509].contiguous()
    elif spoil == "rope":
        rope = rope.bfloat16()
    elif spoil == "positions":
        positions = positions[:3]
    else:
        x = x.T.contiguous().T
    with pytest.raises(EngineError, match="norm_rope_pack refused"):
        norm_rope_pack(x, weight, rope, positions, eps=EPS)
