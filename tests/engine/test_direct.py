"""The reuse arm answers as its rules say, written down a second time: any documents, edits, places and policies."""

from __future__ import annotations

import random

import pytest

from tests.engine.conftest import UnsyncedFiles
from tests.support.direct import ACTIVE, OMITTED, PROTECTED, Direct
from tests.support.networks import NetworkOptions, fp64, open_network
from trt_redknot import Artifact, ArtifactStore, Request, ReusePolicy, Tokens

LENGTHS = (1, 2, 3, 5, 8, 9, 15, 17, 33, 48, 70, 101)
REQUESTS = 12
# fp32 logits of an engine that computes in fp64.
TOLERANCE = 1e-5


def any_policy() -> ReusePolicy:
    return ReusePolicy(
        budget=random.choice([0.0, 0.3, 0.7, 1.0]),
        tau=random.choice([None, 0.5, 1.0]),
        epilogue=random.choice(["full", "active"]),
        boundary=random.choice([0, 1, 4, 8]),
        tail=random.choice([0, 20]),
        tail_share=0.5,
        top_entries=random.choice([0, 1, 3]),
        protect=random.choice(["default"] * 6 + ["all"]),
    )


@pytest.mark.parametrize("kinds", ["csshcchsc", "hhhcccch"])
def test_any_request_answers_as_the_rules_say(kinds: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Few different documents a request, so that they come again: as an exact prefix, elsewhere, edited. Salience is of
    this request where a CSA layer leads, else of the artifacts."""
    directory = tmp_path_factory.mktemp("direct")
    options = NetworkOptions(kinds=kinds, seed=random.randrange(2**31), hash_layers=1, hca=8, window=5)
    _, engine = open_network(directory, options, build=fp64(chunk_rows=random.choice([7, 50, 1000])))
    store = ArtifactStore(directory / "store", files=UnsyncedFiles())

    def ids(count: int) -> list[int]:
        return [random.randrange(options.vocab) for _ in range(count)]

    texts = [ids(length) for length in LENGTHS]
    documents = {engine.build_artifact(store, text): text for text in texts}
    longest = max(documents, key=lambda artifact_id: len(documents[artifact_id]))
    # Whatever is drawn, this one has rows of every class.
    sure = ReusePolicy(budget=0.5, boundary=4, tail=0, top_entries=1)
    requests: list[tuple[list[Artifact | Tokens], ReusePolicy]] = [
        ([Artifact(longest), Artifact(longest), Tokens(ids(3))], sure)
    ]
    for _ in range(REQUESTS):
        some = random.sample(sorted(documents), random.randrange(1, 4))
        segments: list[Artifact | Tokens] = [Artifact(some[0])]
        for _ in range(random.randrange(1, 6)):
            chosen = random.choice(some)
            edited = random.sample(range(len(documents[chosen])), 1) if random.random() < 0.3 else []
            document = Artifact(chosen, edits={position: random.randrange(options.vocab) for position in edited})
            segments.append(document if random.random() < 0.7 else Tokens(ids(random.randrange(1, 12))))
        random.shuffle(segments)
        requests.append((segments, any_policy()))
    classes: set[int] = set()
    for segments, policy in requests:
        request = Request(segments=segments, max_new_tokens=1, stop_tokens=[], reuse=policy)
        response = engine.generate(request, store=store)
        assert response.report.admitted
        logits, expected = Direct(engine, store, request, documents).answer()
        assert response.plan.classes.tolist() == expected, request
        difference = (response.first_logits - logits).abs().max()
        assert difference <= TOLERANCE, request
        classes |= set(expected)
    assert classes == {PROTECTED, ACTIVE, OMITTED}
