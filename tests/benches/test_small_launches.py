"""Small launches for the sanitizers: inputs fit the ops, and no op is left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benches import small_launches
from trt_redknot.ops.cuda import attention, elementwise, moe, packing, rows

# Collectives have no kernel.
OPS = {
    "compress", "hyper_connection_post", "hyper_connection_pre", "hyper_head", "index_salience", "lightning_indexer",
    "moe_activation", "moe_combine", "moe_few_rows", "moe_grouped_gemm", "moe_permute", "moe_route_hash",
    "moe_route_learned", "norm_rope_pack", "restore_replace", "seg_latent_attention", "turn_rows", "unpack",
}  # fmt: skip


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the ops that are called, in place of kernels; tensors stay on the host, outputs hold zeros."""
    names: set[str] = set()

    def call_op(name: str, *tensors: Any) -> None:
        names.add(name)
        assert all(tensor.is_contiguous() for tensor in tensors if isinstance(tensor, torch.Tensor))
        for tensor in tensors[:3]:
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.isnan().any():
                tensor.nan_to_num_(0.0)

    def indexer(q: torch.Tensor, weights: torch.Tensor, *_: object, top_k: int, fp8: bool = True) -> torch.Tensor:
        names.add("lightning_indexer")
        assert q.shape[:2] == weights.shape
        return torch.zeros((q.shape[0], top_k), dtype=torch.int32)

    def salience(q: torch.Tensor, *_: object, entries: int) -> tuple[torch.Tensor, torch.Tensor]:
        names.add("index_salience")
        return torch.zeros(entries), torch.zeros(entries)

    for module in (attention, elementwise, moe, packing, rows, small_launches):
        monkeypatch.setattr(module, "call_op", call_op)
    monkeypatch.setattr(rows, "load_kernels", lambda: None)
    monkeypatch.setattr(small_launches, "index_salience", salience)
    monkeypatch.setattr(small_launches, "lightning_indexer", indexer)
    monkeypatch.setattr(small_launches, "table_to", lambda table, device: table)
    monkeypatch.setattr(small_launches, "load_kernels", lambda: None)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    return names


def test_every_op_is_launched(called: set[str]) -> None:
    for make in small_launches.CASES.values():
        assert list(make())
    assert called == OPS


def test_an_unknown_case_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["small_launches", "everything"])
    with pytest.raises(SystemExit):
        small_launches.main()
    assert "--list names them" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has a GPU")
def test_without_a_gpu_nothing_is_launched(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["small_launches", "turn_rows"])
    with pytest.raises(SystemExit) as caught:
        small_launches.main()
    assert caught.value.code == 2
    assert "no CUDA GPU was found" in capsys.readouterr().err
