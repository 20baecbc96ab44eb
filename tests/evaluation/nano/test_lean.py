"""The lean training forward against transformers' own, and its gradients."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch

from tests.support.networks import NetworkOptions, network
from trt_redknot.evaluation.nano.batches import curriculum, make_batch
from trt_redknot.evaluation.nano.lean import LeanNetwork
from trt_redknot.evaluation.nano.mixing import sinkhorn
from trt_redknot.evaluation.nano.network import SMALL, make_model
from trt_redknot.evaluation.nano.objective import AuxiliaryHeads, Weights, indexer_loss, losses_of

# Rounding decides a selection whose last candidates are closer than this.
NEAR = 3e-6


def watch_gaps(model: torch.nn.Module) -> list[float]:
    """Gets the smallest gap at which each router and each Indexer of a forward cuts off its selection."""
    gaps: list[float] = []

    def note(scores: torch.Tensor, k: int) -> None:
        ordered = scores.flatten(0, -2).sort(dim=-1, descending=True).values
        if ordered.shape[-1] > k:
            gap = (ordered[:, k - 1] - ordered[:, k]).nan_to_num(float("inf"))
            gaps.append(float(gap.min()))

    def router(module: Any, _: object, output: tuple[torch.Tensor, ...]) -> None:
        note(module.score_fn(output[0]) + module.e_score_correction_bias, module.top_k)

    def indexer(module: Any, _: object, scores: torch.Tensor) -> None:
        visible = (torch.arange(scores.shape[1]) + 1)[:, None] // 4
        note(scores.masked_fill(torch.arange(scores.shape[2]) >= visible, float("-inf")), 6)

    for module in model.modules():
        if type(module).__name__ == "DeepseekV4TopKRouter":
            module.register_forward_hook(router)
        elif type(module).__name__ == "DeepseekV4IndexerScorer":
            module.register_forward_hook(indexer)
    return gaps


@pytest.mark.parametrize("length", [1, 3, 16, 47, 131])
def test_logits_are_transformers(length: int) -> None:
    for _ in range(20):
        model = network(NetworkOptions(kinds="sschchc", seed=random.randrange(2**31), topk=6))
        gaps = watch_gaps(model)
        tokens = torch.randint(0, 97, (2, length))
        with torch.no_grad():
            expected = model(input_ids=tokens, use_cache=False).logits
        if min(gaps) > NEAR:
            break
    assert min(gaps) > NEAR, "every network drawn had a near tie"
    with torch.no_grad():
        found = LeanNetwork(model)(tokens).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_dense_sequences_see_every_entry_and_muted_ones_none() -> None:
    # Hash routers only, so that no near tie of a router tells the two forwards apart.
    model = network(NetworkOptions(kinds="sscc", hash_layers=4, seed=random.randrange(2**31), topk=3))
    lean = LeanNetwork(model)
    tokens = torch.randint(0, 97, (3, 64))
    with torch.no_grad():
        sparse, dense = lean(tokens).logits, lean(tokens, dense=3).logits
        mixed = lean(tokens, dense=1, muted=1).logits
        muted = lean(tokens, muted=3).logits
        model.config.index_topk = 1000
        for layer in model.model.layers[2:]:
            layer.self_attn.compressor.indexer.index_topk = 1000
        everything = model(input_ids=tokens, use_cache=False).logits
    torch.testing.assert_close(dense, everything, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(sparse, dense, atol=1e-3)
    assert not torch.allclose(muted, dense, atol=1e-3)
    torch.testing.assert_close(mixed[0], dense[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mixed[1], sparse[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mixed[2], muted[2], rtol=1e-4, atol=1e-4)


def test_fine_sequences_see_no_entries_of_hca_layers() -> None:
    model = network(NetworkOptions(kinds="shch", hash_layers=4, seed=random.randrange(2**31), topk=3))
    lean = LeanNetwork(model)
    tokens = torch.randint(0, 97, (3, 64))
    with torch.no_grad():
        whole = lean(tokens, keep=(1, 3)).streams
        fine = lean(tokens, fine=slice(1, 2), keep=(1, 3)).streams
        for layer in model.model.layers[1:4:2]:
            layer.self_attn.compressor.kv_proj.weight.zero_()
        nothing = lean(tokens, fine=slice(0, 3), keep=(1, 3)).streams
    for layer in (1, 3):
        torch.testing.assert_close(fine[layer][1], nothing[layer][1], rtol=1e-4, atol=1e-4)
        assert not torch.allclose(fine[layer][1], whole[layer][1], atol=1e-3)
        for other in (0, 2):
            torch.testing.assert_close(fine[layer][other], whole[layer][other], rtol=1e-4, atol=1e-4)


def test_late_sequences_see_no_entries_in_the_first_layer_that_has_some() -> None:
    model = network(NetworkOptions(kinds="sscc", hash_layers=4, seed=random.randrange(2**31), topk=3))
    lean = LeanNetwork(model)
    tokens = torch.randint(0, 97, (3, 64))
    with torch.no_grad():
        dense = lean(tokens, dense=2, keep=(2, 3)).streams
        late = lean(tokens, dense=2, late=1, keep=(2, 3)).streams
        blind = lean(tokens, muted=3, keep=(2, 3)).streams
    torch.testing.assert_close(late[2][0], blind[2][0], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(late[3][0], blind[3][0], atol=1e-3), "the next layer sees entries"
    for layer in (2, 3):
        torch.testing.assert_close(late[layer][1:], dense[layer][1:], rtol=1e-4, atol=1e-4)


def test_watched_tokens_are_compared_with_what_was_attended_to() -> None:
    model = network(NetworkOptions(kinds="ssc", hash_layers=3, seed=random.randrange(2**31), topk=3))
    lean = LeanNetwork(model)
    tokens = torch.randint(0, 97, (3, 64))
    places = torch.tensor([1, 2, lean.sizes.block - 1])
    with torch.no_grad():
        everywhere = lean(tokens, dense=2).selections[2]
        some = lean(tokens, dense=2, watched=places).selections[2]
        assert lean(tokens).selections == {}
    count = 64 // lean.sizes.block
    rows = (torch.arange(count)[:, None] * lean.sizes.block + places).flatten()
    torch.testing.assert_close(some.mass, everywhere.mass[:, rows])
    torch.testing.assert_close(some.scores, everywhere.scores[:, rows])
    assert torch.equal(some.visible, everywhere.visible[rows])
    # Mass lies on visible entries only, and is a share.
    assert (everywhere.mass[:, ~everywhere.visible] == 0).all()
    total = everywhere.mass.sum(-1)
    assert (total[:, everywhere.visible.any(-1)] > 0).all()
    assert (total <= 1).all()


def test_gradients_reach_every_parameter() -> None:
    sizes = dataclasses.replace(SMALL, silent=())
    model = make_model(sizes, random.randrange(2**31))
    lean = LeanNetwork(model)
    heads = AuxiliaryHeads(
        sizes.hidden, 4, model.config.vocab_size, previous_layers=(1, 5), subject_layers=(3, 5), reading_layers=(4, 6)
    )
    stage = curriculum(1024, (128, 256))[1]
    batch = make_batch(stage, random.randrange(2**31), 0)
    arrays = (batch.tokens, batch.targets, batch.subjects, batch.kinds, batch.bridges)
    inputs = [torch.from_numpy(array).long() for array in arrays]
    tokens = inputs[0]
    forward = lean(tokens, dense=2, muted=1, keep=heads.layers)
    found = losses_of(forward, heads, *inputs, weights=Weights(), silent=())
    found.total.backward()
    for name, value in [*model.named_parameters(), *heads.named_parameters()]:
        assert value.grad is not None, name
        assert torch.isfinite(value.grad).all(), name
        assert value.grad.abs().max() > 0, name


def test_silent_layers_give_nothing_and_their_indexer_learns_from_the_next() -> None:
    model = make_model(SMALL, random.randrange(2**31))
    lean = LeanNetwork(model, silent=SMALL.silent)
    tokens = torch.randint(2, model.config.vocab_size, (2, 64))
    assert not model.model.layers[2].self_attn.compressor.kv_norm.weight.requires_grad
    forward = lean(tokens, dense=2)
    indexer = model.model.layers[2].self_attn.compressor.indexer
    indexer_loss(forward.selections, SMALL.silent).backward()
    assert all(value.grad is not None and value.grad.abs().max() > 0 for value in indexer.parameters())
    # Nothing but Indexers learns from this loss.
    others = [n for n, v in model.named_parameters() if ".indexer." not in n and v.grad is not None and v.grad.any()]
    assert others == []
    with torch.no_grad():
        # What a silent layer compresses changes no logit of transformers, and leaving it out changes none either.
        before = LeanNetwork(model)(tokens).logits
        model.model.layers[2].self_attn.compressor.kv_proj.weight.normal_()
        torch.testing.assert_close(LeanNetwork(model)(tokens).logits, before)
        torch.testing.assert_close(lean(tokens).logits, before, rtol=1e-4, atol=1e-4)


def test_mixing_matrices_are_transformers_to_rounding() -> None:
    logits = torch.randn(4, 4, 50) * 3
    eps = 1e-6
    expected = logits.permute(2, 0, 1).softmax(-1) + eps
    expected = expected / (expected.sum(-2, keepdim=True) + eps)
    for _ in range(19):
        expected = expected / (expected.sum(-1, keepdim=True) + eps)
        expected = expected / (expected.sum(-2, keepdim=True) + eps)
    torch.testing.assert_close(sinkhorn(logits, 20, eps).permute(2, 0, 1), expected, rtol=1e-5, atol=1e-6)
