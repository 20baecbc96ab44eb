"""The GPU backend as a whole: what it makes of a layer's tensors once, and what it notes for later."""

from __future__ import annotations

import pytest
import torch

from tests.support.gpu import needs_gpu
from trt_redknot.collectives import LocalCollectives
from trt_redknot.collectives.replicated import ReplicatedRows
from trt_redknot.config.released import released_geometry
from trt_redknot.errors import EngineError
from trt_redknot.ops.cuda.backend import FEW_ROWS, CudaOps
from trt_redknot.ops.reference import moe

FLASH = released_geometry("flash")


def layer(device: str = "cpu") -> dict[str, torch.Tensor]:
    def matrix(*shape: int) -> torch.Tensor:
        return (torch.randn(shape) * shape[-1] ** -0.5).to(device=device, dtype=torch.bfloat16)

    return {
        "shared.gate": matrix(256, 128), "shared.up": matrix(256, 128), "shared.down": matrix(128, 256),
        "router.weight": matrix(16, 128),
        "router.tid2eid": torch.randint(0, 16, (50, 6), dtype=torch.int32, device=device),
    }  # fmt: skip


def test_prepared_tensors_are_the_same_numbers_and_made_once() -> None:
    ops = CudaOps(LocalCollectives(), FLASH)
    given = layer()
    prepared = ops.prepared(given)
    assert prepared.keys() == given.keys()
    for name, tensor in given.items():
        assert torch.equal(prepared[name], tensor.to(prepared[name].dtype)), name
    assert prepared["router.tid2eid"].dtype == torch.int64
    assert prepared["shared.up"].data_ptr() == prepared["shared.gate"].data_ptr() + prepared["shared.gate"].nbytes
    again = ops.prepared(prepared)
    assert all(again[name].data_ptr() == prepared[name].data_ptr() for name in given)


TOGETHER = ("attn.q_a", "attn.kv", "compressor.kv", "indexer.weights")


def side_by_side(device: str, *, without: str = "") -> tuple[CudaOps, dict[str, torch.Tensor], list[torch.Tensor]]:
    """Ops, weights of the same rows as they were given, and as the ops prepared them."""
    widths = {"attn.q_a": 64, "attn.kv": 32, "compressor.kv": 48, "indexer.weights": 8}
    given = {
        name: torch.randn(width, 128, device=device).to(torch.bfloat16)
        for name, width in widths.items()
        if name != without
    }
    ops = CudaOps(LocalCollectives(), FLASH)
    prepared = ops.prepared({**given, "attn.o_b": torch.ones(2, 2)}, together=TOGETHER)
    assert prepared["attn.o_b"].shape == (2, 2)
    for name, tensor in given.items():
        assert torch.equal(prepared[name], tensor), name
    return ops, given, [prepared[name] for name in given]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("without", ["", "compressor.kv", "attn.q_a"])
@pytest.mark.parametrize("rows", [0, 1, 3, FEW_ROWS, FEW_ROWS + 1])
def test_rows_through_several_weights_are_what_each_gives(device: str, without: str, rows: int) -> None:
    ops, given, weights = side_by_side(device, without=without)
    x = torch.randn(rows, 128, device=device).to(torch.bfloat16)
    found = ops.linears(x, weights)
    assert len(found) == len(given)
    for part, weight in zip(found, given.values(), strict=True):
        assert part.is_contiguous()
        torch.testing.assert_close(part, x @ weight.T, atol=0.05, rtol=0.02)


def test_few_rows_take_one_product_and_many_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where other ranks hold the rows; some of the weights alone are not all of them."""
    ops, _, weights = side_by_side("cpu")
    calls = []
    linear = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *args: calls.append(1) or linear(*args))
    for turn, (given, rows, count) in enumerate(
        [(weights, 1, 1), (weights, FEW_ROWS, 1), (weights, FEW_ROWS + 1, 4), (weights[:2], 1, 2), (weights[1:], 1, 3)]
    ):
        calls.clear()
        used = ops.over(ReplicatedRows(LocalCollectives())) if turn % 2 else ops
        used.linears(torch.ones(rows, 128, dtype=torch.bfloat16), given)
        assert len(calls) == count


def test_a_layer_without_these_tensors_stays_as_it_is() -> None:
    weights = {"attn.kv": torch.ones(2, 2)}
    assert CudaOps(LocalCollectives(), FLASH).prepared(weights) == weights


@needs_gpu
@pytest.mark.parametrize("prepared", [True, False])
@pytest.mark.parametrize("rows", [1, 129])
def test_the_shared_expert_is_the_reference_s(prepared: bool, rows: int) -> None:
    ops = CudaOps(LocalCollectives(), FLASH)
    weights = layer("cuda")
    x = torch.randn(rows, 128, device="cuda", dtype=torch.bfloat16)
    exact = moe.shared_expert(
        x.double(), *(weights[f"shared.{name}"].double() for name in ("gate", "up", "down")), limit=10.0
    )
    used = ops.prepared(weights) if prepared else weights
    found = ops.shared_expert(x, used["shared.gate"], used["shared.up"], used["shared.down"], limit=10.0)
    assert float((found.double() - exact).norm() / exact.norm()) < 0.01


@needs_gpu
def test_a_token_outside_the_table_is_noted_and_raised_once() -> None:
    ops = CudaOps(LocalCollectives(), FLASH)
    weights = ops.prepared(layer("cuda"))
    x = torch.randn(3, 128, device="cuda", dtype=torch.bfloat16)
    ops.check()
    for tokens, bad in (([0, 49, 7], False), ([0, 50, 7], True), ([0, -1, 7], True)):
        ids, shares = ops.route_hash(
            x, weights["router.weight"], weights["router.tid2eid"], torch.tensor(tokens, device="cuda"), scale=1.5,
            scoring="sqrtsoftplus",
        )  # fmt: skip
        assert (ids < 0).any().item() == bad
        assert shares.isfinite().all()
        if bad:
            with pytest.raises(EngineError, match="hash router"):
                ops.check()
        ops.check()
