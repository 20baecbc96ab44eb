"""seg_latent_attention on the GPU against the fp64 reference: random layouts, heads, formats, poisoned outputs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benches.common import AttentionCase, Layout, attention_case, relative_error
from tests.support.gpu import needs_gpu, needs_kernels
from trt_redknot.errors import EngineError
from trt_redknot.ops.cuda.attention import seg_latent_attention
from trt_redknot.ops.cuda.library import load_kernels
from trt_redknot.ops.reference import attention as reference

# bf16 outputs, bf16 rotated queries and probabilities of 8 to 11 bits: each contributes about 2^-9.
TOLERANCE = 6e-3
ROW_TOLERANCE = 3e-2
SEEDS = st.integers(0, 2**31)
HEADS = st.sampled_from(
    [(1, 0), (1, 1), (1, 3), (1, 7), (2, 14), (8, 56), (16, 112), (0, 8), (3, 2), (33, 0), (36, 44), (64, 8)]
)
LENGTHS = st.one_of(st.integers(0, 9), st.integers(1, 300), st.integers(300, 900))
SEQUENCES = st.lists(st.lists(LENGTHS, min_size=1, max_size=6).map(tuple), min_size=1, max_size=3).map(tuple)
TYPICAL = settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def picked_rows(layout: Layout, data: st.DataObject, most: int) -> list[tuple[int, torch.Tensor]]:
    """Some positions of every sequence, ascending or in any order."""
    rows = []
    for index, lengths in enumerate(layout.sequences):
        total = sum(lengths)
        if total == 0:
            continue
        generator = torch.Generator().manual_seed(data.draw(SEEDS))
        count = min(total, data.draw(st.integers(1, most)))
        positions = torch.randperm(total, generator=generator)[:count]
        if data.draw(st.booleans()):
            first = data.draw(st.integers(0, total - count))
            positions = torch.arange(first, first + count)
        rows.append((index, positions if data.draw(st.booleans()) else positions.sort().values))
    return rows or [(0, torch.zeros(0, dtype=torch.int64))]


def expected(case: AttentionCase, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The fp64 reference over what the pools hold."""
    return reference.seg_latent_attention(
        case.q_global.double(), case.q_local.double(), case.table, case.latents_plain.double(),
        None if case.entries_plain is None else case.entries_plain.double(), case.selected, case.sinks_global.double(),
        case.sinks_local.double(), case.rope.double(), window=window,
    )  # fmt: skip


def found(case: AttentionCase, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel, its outputs poisoned before the launch."""
    load_kernels()
    outputs = tuple(torch.full_like(q, float("nan")) for q in (case.q_global, case.q_local))
    torch.ops.redknot.seg_latent_attention(
        *outputs, case.q_global, case.q_local, case.table.segments, case.table.row_segments, case.table.positions,
        case.table.visible, case.latents, case.entries, case.selected, case.sinks_global, case.sinks_local, case.rope,
        window,
    )  # fmt: skip
    return outputs


def assert_matches(case: AttentionCase, window: int = 128) -> None:
    for name, got, want in zip(("global", "local"), found(case, window), expected(case, window), strict=True):
        assert relative_error(got, want) < TOLERANCE, name
        if got.numel():
            error = (got.double() - want).norm(dim=-1) / want.norm(dim=-1).clamp(
                min=1e-3 * float(want.norm(dim=-1).max())
            )
            assert float(error.max()) < ROW_TOLERANCE, f"{name}: row, head {divmod(int(error.argmax()), got.shape[1])}"


@needs_gpu
@pytest.mark.parametrize("kind", ["sliding", "csa", "hca"])
@pytest.mark.parametrize("packed", [True, False])
@TYPICAL
@given(data=st.data(), sequences=SEQUENCES, heads=HEADS, seed=SEEDS)
def test_any_layout(
    kind: str,
    packed: bool,
    data: st.DataObject,
    sequences: tuple[tuple[int, ...], ...],
    heads: tuple[int, int],
    seed: int,
) -> None:
    ratio = {"sliding": 0, "csa": 4, "hca": data.draw(st.sampled_from([16, 128]))}[kind]
    layout = Layout(sequences=sequences, ratio=ratio, gap=data.draw(st.sampled_from([0, 1, 5])))
    rows = picked_rows(layout, data, most=40)
    count = sum(len(positions) for _, positions in rows)
    case = attention_case(
        layout, rows, full_rows=data.draw(st.integers(0, count)), heads=heads,
        top_k=data.draw(st.sampled_from([1, 8, 64, 512])) if kind == "csa" else None, packed=packed, device="cuda",
        seed=seed, magnitude=data.draw(st.sampled_from([0.02, 1.0, 4.0])),
        shortfall=data.draw(st.sampled_from([0.0, 0.4])),
        rope_factor=data.draw(st.sampled_from([1.0, 1.1])),
    )  # fmt: skip
    assert_matches(case, window=data.draw(st.sampled_from([1, 16, 128])))


@needs_gpu
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("top_k", [None, 1024])
def test_many_segments_and_many_rows(packed: bool, top_k: int | None) -> None:
    seed = int(torch.randint(2**31, ()))
    generator = torch.Generator().manual_seed(seed)
    lengths = tuple(torch.randint(1, 200, (100,), generator=generator).tolist())
    layout = Layout(sequences=(lengths,), ratio=4, gap=3)
    positions = torch.randperm(sum(lengths), generator=generator)[:700].sort().values
    case = attention_case(
        layout, [(0, positions)], full_rows=300, heads=(1, 7), top_k=top_k, packed=packed, device="cuda", seed=seed
    )
    assert_matches(case)


@needs_gpu
@pytest.mark.parametrize("heads", [(1, 7), (8, 56)])
@settings(deadline=None, max_examples=6)
@given(seed=SEEDS, exponent=st.sampled_from([-40, -20, 0, 2]))
def test_scales_far_from_one(heads: tuple[int, int], seed: int, exponent: int) -> None:
    layout = Layout(sequences=((700, 300),), ratio=4)
    case = attention_case(
        layout, [(0, torch.arange(900, 950))], full_rows=50, heads=heads, top_k=128, packed=True, device="cuda",
        seed=seed, magnitude=2.0**exponent,
    )  # fmt: skip
    assert_matches(case)


@needs_gpu
@pytest.mark.parametrize("top_k", [None, 8, 256])
@pytest.mark.parametrize("ascending", [True, False])
def test_many_heads_see_the_numbers_of_packed_pools(top_k: int | None, ascending: bool) -> None:
    seed = int(torch.randint(2**31, ()))
    layout = Layout(sequences=((700, 300, 1, 90), (400,)), ratio=4, gap=3)
    positions = torch.randperm(1091, generator=torch.Generator().manual_seed(seed))[:90]
    rows = [(0, positions.sort().values if ascending else positions), (1, torch.arange(250, 330))]
    packed = attention_case(
        layout, rows, full_rows=100, heads=(8, 56), top_k=top_k, packed=True, device="cuda", seed=seed, shortfall=0.1
    )
    assert packed.entries_plain is not None
    plain = {"latents": packed.latents_plain.bfloat16(), "entries": packed.entries_plain.bfloat16()}
    results = [found(case, 128) for case in (packed, AttentionCase(**{**packed.__dict__, **plain}))]
    # Full rows have many heads; the others, with 8, are served by a kernel that decodes packed keys itself.
    for one, other in zip(*results, strict=True):
        assert torch.equal(one[:100].view(torch.int16), other[:100].view(torch.int16))
        assert relative_error(one, other) < TOLERANCE


@needs_gpu
@pytest.mark.parametrize("exponent", [24, 60])
def test_large_scales_with_many_heads(exponent: int) -> None:
    case = attention_case(
        Layout(sequences=((700, 300),), ratio=4), [(0, torch.arange(900, 950))], full_rows=50, heads=(8, 56),
        top_k=128, packed=True, device="cuda", seed=int(torch.randint(2**31, ())), magnitude=2.0**exponent,
    )  # fmt: skip
    small = {name: getattr(case, name) * 2.0**-exponent for name in ("q_global", "q_local")}
    assert_matches(AttentionCase(**{**case.__dict__, **small}))


@needs_gpu
def test_a_code_that_is_nan_spoils_the_rows_that_see_it() -> None:
    case = attention_case(
        Layout(sequences=((500,),), ratio=0), [(0, torch.arange(100, 400))], full_rows=300, heads=(8, 56), top_k=None,
        packed=True, device="cuda", seed=3,
    )  # fmt: skip
    case.latents[200, 5] = 0x7F  # of position 200, which rows 100 to 227 see
    for output in found(case, 128):
        spoilt = output.isnan().flatten(1).any(1)
        assert spoilt[100:228].all()
        assert not spoilt[:100].any()
        assert not spoilt[228:].any()


@needs_gpu
@pytest.mark.parametrize("heads", [(2, 14), (16, 112)])
def test_the_same_inputs_give_the_same_bits(heads: tuple[int, int]) -> None:
    case = attention_case(
        Layout(sequences=((3000, 1500),), ratio=4), [(0, torch.arange(4000, 4400))], full_rows=400, heads=heads,
        top_k=512, packed=True, device="cuda", seed=int(torch.randint(2**31, ())),
    )  # fmt: skip
    first = found(case, 128)
    for _ in range(5):
        for one, other in zip(first, found(case, 128), strict=True):
            assert torch.equal(one.view(torch.int16), other.view(torch.int16))


@needs_gpu
def test_indices_outside_the_pools_are_not_followed() -> None:
    case = attention_case(
        Layout(sequences=((400, 100),), ratio=4), [(0, torch.arange(450, 482))], full_rows=32, heads=(1, 7), top_k=32,
        packed=True, device="cuda", seed=1,
    )  # fmt: skip
    assert case.selected is not None
    wild = case.selected.clone()
    wild[:, ::3] = torch.tensor([2**40, -(2**40), 10**6], device="cuda").repeat(11)[:11]
    wild_case = AttentionCase(**{**case.__dict__, "selected": wild})
    dropped = AttentionCase(**{**case.__dict__, "selected": torch.where(wild == case.selected, wild, -1)})
    for one, other in zip(found(wild_case, 128), found(dropped, 128), strict=True):
        assert torch.equal(one, other)


@needs_gpu
@pytest.mark.parametrize("wrong", ["dtype", "shape", "device", "pools differ", "too many selected"])
def test_bad_inputs_are_refused(wrong: str) -> None:
    case = attention_case(
        Layout(sequences=((300,),), ratio=4), [(0, torch.arange(200, 220))], full_rows=20, heads=(1, 7), top_k=16,
        packed=True, device="cuda", seed=2,
    )  # fmt: skip
    q, latents, entries, selected = case.q_global, case.latents, case.entries, case.selected
    assert selected is not None
    if wrong == "dtype":
        q = q.float()
    elif wrong == "shape":
        latents = latents[:, :-8].contiguous()
    elif wrong == "device":
        latents = latents.cpu()
    elif wrong == "pools differ":
        entries = torch.zeros((75, 512), dtype=torch.bfloat16, device="cuda")
    else:
        selected = torch.full((20, 1032), -1, dtype=torch.int64, device="cuda")
    with pytest.raises(EngineError, match="refused"):
        seg_latent_attention(
            q, case.q_local, case.table, latents, entries, selected, case.sinks_global, case.sinks_local, case.rope,
            window=128,
        )  # fmt: skip


@needs_kernels
def test_the_library_loads_and_lists_its_ops_without_a_gpu() -> None:
    load_kernels()
    schema = str(torch.ops.redknot.seg_latent_attention.default._schema)
    assert "Tensor(a!) out_global" in schema
