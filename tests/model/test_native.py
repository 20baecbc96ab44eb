"""One fresh segment is the native model: our engine against transformers' DeepseekV4ForCausalLM in fp32."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from transformers import DeepseekV4ForCausalLM

from tests.support.networks import NetworkOptions, build_engine, fp64, native_logits, open_network
from tests.support.ties import NEAR, smallest_gap
from trt_redknot import Engine, Request, Sampling, Tokens

TOLERANCE = 1e-4
DRAWS = 4


def first_logits(engine: Engine, tokens: list[int]) -> torch.Tensor:
    return engine.generate(Request(segments=[Tokens(tokens)], max_new_tokens=1)).first_logits


def random_tokens(count: int, vocab: int = 97) -> list[int]:
    return [random.randrange(vocab) for _ in range(count)]


def matches(engine: Engine, model: DeepseekV4ForCausalLM, tokens: list[int], lengths: Iterable[int]) -> bool:
    """First logits at every length are transformers'. False where a near tie was decided the other way: draw again."""
    native = native_logits(model, tokens)
    for length in lengths:
        error = (first_logits(engine, tokens[:length]) - native[length - 1]).abs().max().item()
        if not error <= TOLERANCE:
            gap = smallest_gap(engine, tokens[:length])
            assert gap < NEAR, f"length {length} is off by {error}, and no selection was closer than {gap}"
            return False
    return True


def test_first_logits_at_every_length(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Lengths 1 to 300: every residue mod 4 and mod the HCA ratio, both sides of multiples of 128, window borders."""
    for _ in range(DRAWS):
        options = NetworkOptions(kinds="shc", hca=32, topk=6, seed=random.randrange(2**31))
        model, engine = open_network(tmp_path_factory.mktemp("network"), options)
        if matches(engine, model, random_tokens(300), range(1, 301)):
            return
    pytest.fail(f"{DRAWS} draws with near ties in a row")


@pytest.mark.parametrize("kinds", ["s", "ss", "c", "h", "hhchc", "sschcs", "cccc", "hhhh"])
def test_every_mix_of_layer_types(tmp_path_factory: pytest.TempPathFactory, kinds: str) -> None:
    for _ in range(DRAWS):
        options = NetworkOptions(kinds=kinds, hash_layers=len(kinds) // 2, seed=random.randrange(2**31))
        model, engine = open_network(tmp_path_factory.mktemp("network"), options)
        tokens = random_tokens(random.randrange(60, 140))
        if matches(engine, model, tokens, [len(tokens)]):
            return
    pytest.fail(f"{DRAWS} draws with near ties in a row")


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kinds=st.text("sch", min_size=1, max_size=5),
    hash_share=st.floats(0, 1),
    groups=st.sampled_from([1, 2, 8, 16]),
    heads=st.sampled_from([1, 2, 8]),
    window=st.sampled_from([1, 7, 16, 128]),
    hca=st.sampled_from([8, 32, 128]),
    topk=st.sampled_from([1, 5, 64]),
    routing=st.sampled_from([(8, 6), (4, 1), (5, 2)]),
    seed=st.integers(0, 2**31 - 1),
)
def test_random_configs(
    tmp_path_factory: pytest.TempPathFactory, kinds: str, hash_share: float, groups: int, heads: int, window: int,
    hca: int, topk: int, routing: tuple[int, int], seed: int,
) -> None:  # fmt: skip
    options = NetworkOptions(
        seed=seed, kinds=kinds, hash_layers=int(hash_share * len(kinds)), groups=groups, heads_per_group=heads,
        window=window, hca=hca, topk=topk, experts=routing[0], experts_per_token=routing[1],
    )  # fmt: skip
    model, engine = open_network(tmp_path_factory.mktemp("network"), options)
    tokens = random.Random(seed).choices(range(97), k=1 + seed % 150)
    assume(matches(engine, model, tokens, [len(tokens)]))


@pytest.mark.parametrize("prompt", [1, 13, 127])
def test_64_decode_steps(tmp_path_factory: pytest.TempPathFactory, prompt: int) -> None:
    for _ in range(DRAWS):
        model, engine = open_network(
            tmp_path_factory.mktemp("network"), NetworkOptions(seed=random.randrange(2**31), kinds="schc")
        )
        tokens = random_tokens(prompt)
        response = engine.generate(Request(segments=[Tokens(tokens)], max_new_tokens=64, stop_tokens=[]))
        native = native_logits(model, tokens + response.tokens)[prompt - 1 : -1]
        # Greedy over the same logits: what we chose is transformers' best token, up to the tolerance.
        chosen = native[torch.arange(64), torch.tensor(response.tokens)]
        error = (native.max(dim=1).values - chosen).max().item()
        if error <= TOLERANCE:
            return
        assert smallest_gap(engine, tokens + response.tokens) < NEAR, f"off by {error}"
    pytest.fail(f"{DRAWS} draws with near ties in a row")


def test_batch_equals_single_requests(tmp_path: Path) -> None:
    _, engine = open_network(tmp_path, NetworkOptions(seed=random.randrange(2**31)), build=fp64())
    requests = [
        Request(segments=[Tokens(random_tokens(n))], max_new_tokens=steps, stop_tokens=[])
        for n, steps in ((5, 20), (64, 1), (33, 40), (130, 7))
    ]
    together = engine.generate(requests)
    for request, response in zip(requests, together, strict=True):
        alone = engine.generate(request)
        assert response.tokens == alone.tokens
        torch.testing.assert_close(response.first_logits, alone.first_logits, atol=TOLERANCE, rtol=0)


def test_chunking_changes_nothing(tmp_path: Path) -> None:
    _, engine = open_network(tmp_path, build=fp64())
    tokens = random_tokens(90)
    for rows in (1, 7, 64, 1000):
        other = Engine.open(
            build_engine(tmp_path / "checkpoint", tmp_path / f"rows{rows}", options=fp64(chunk_rows=rows))
        )
        torch.testing.assert_close(first_logits(other, tokens), first_logits(engine, tokens), atol=TOLERANCE, rtol=0)


def test_stop_tokens_end_the_answer(tmp_path: Path) -> None:
    _, engine = open_network(tmp_path)
    prompt = [Tokens(random_tokens(20))]
    free = engine.generate(Request(segments=prompt, max_new_tokens=30, stop_tokens=[]))
    assert len(free.tokens) == 30
    assert free.finish_reason == "length"
    stop = free.tokens[11]
    stopped = engine.generate(Request(segments=prompt, max_new_tokens=30, stop_tokens=[stop]))
    assert stopped.tokens == free.tokens[: free.tokens.index(stop) + 1]
    assert stopped.finish_reason == "stop"


def test_seeded_sampling_repeats_and_varies(tmp_path: Path) -> None:
    _, engine = open_network(tmp_path)
    prompt = [Tokens(random_tokens(20))]

    def draw(seed: int, **how: object) -> list[int]:
        sampling = Sampling(temperature=1.5, seed=seed, **how)  # type: ignore[arg-type]
        return engine.generate(Request(segments=prompt, max_new_tokens=12, stop_tokens=[], sampling=sampling)).tokens

    assert draw(3) == draw(3)
    assert len({tuple(draw(seed)) for seed in range(4)}) == 4
    greedy = engine.generate(Request(segments=prompt, max_new_tokens=12, stop_tokens=[])).tokens
    assert draw(9, top_k=1) == greedy
    assert draw(9, top_p=1e-9) == greedy
