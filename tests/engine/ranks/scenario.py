"""Documents and questions as JSON, and an engine's answers to them as JSON: the same on one rank and on many."""

from __future__ import annotations

import random
from typing import Any

from trt_redknot import Artifact, ArtifactStore, Engine, Request, Response, ReusePolicy, Sampling, Tokens

Scenario = dict[str, Any]


def make_scenario(seed: int, vocab: int) -> Scenario:
    """Documents of odd lengths and batches of requests in both arms, some with fewer rows than ranks."""
    draw = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [draw.randrange(vocab) for _ in range(count)]

    documents = [ids(draw.randrange(25, 45)), ids(draw.randrange(33, 45)), ids(draw.randrange(1, 7))]
    edited = draw.randrange(len(documents[1]))
    segments = [
        {"document": 0},
        {"document": 1},
        {"tokens": ids(draw.randrange(1, 9))},
        {"document": 2},
        {"document": 1, "edits": {edited: (documents[1][edited] + 1) % vocab}},
        {"tokens": ids(draw.randrange(1, 12))},
    ]
    # Document 1 leaves at least ten windows that nothing protects, so that some of them are active and some omitted.
    policy = {"boundary": 4, "tail": 6, "top_entries": 3, "budget": 0.5}
    reuse = {"segments": segments, "steps": 5, "reuse": policy}
    batches = [
        [{"segments": [{"tokens": ids(1)}], "steps": 3, "reuse": None}],
        [{"segments": [{"tokens": ids(draw.randrange(30, 61))}], "steps": 1, "reuse": None}],
        [{**reuse, "reuse": None, "steps": 2}],
        [{**reuse, "reuse": {**policy, "epilogue": "active", "budget": 0.0}, "steps": 2}],
        [{**reuse, "reuse": {"protect": "all"}, "steps": 1}],
        [
            reuse,
            {"segments": [{"tokens": ids(3)}], "steps": 6, "reuse": None},
            {"segments": segments[:1], "steps": 3, "reuse": policy, "temperature": 1.3, "seed": seed},
        ],
    ]
    return {"documents": documents, "batches": batches}


def build_documents(engine: Engine, store: ArtifactStore, documents: list[list[int]]) -> list[str]:
    return [engine.build_artifact(store, document) for document in documents]


def make_request(question: dict[str, Any], artifact_ids: list[str]) -> Request:
    segments: list[Artifact | Tokens] = []
    for segment in question["segments"]:
        if "document" in segment:
            edits = {int(position): token for position, token in segment.get("edits", {}).items()}
            segments.append(Artifact(artifact_ids[segment["document"]], edits=edits))
        else:
            segments.append(Tokens(segment["tokens"]))
    return Request(
        segments=segments,
        max_new_tokens=question["steps"],
        stop_tokens=[],
        reuse=None if question["reuse"] is None else ReusePolicy(**question["reuse"]),
        sampling=Sampling(temperature=question.get("temperature", 0.0), seed=question.get("seed", 0)),
    )


def answer_all(engine: Engine, store: ArtifactStore, scenario: Scenario) -> list[dict[str, Any]]:
    """Build the documents' artifacts, then answer batch by batch. Collective."""
    artifact_ids = build_documents(engine, store, scenario["documents"])
    answers = []
    for batch in scenario["batches"]:
        responses = engine.generate([make_request(question, artifact_ids) for question in batch], store=store)
        answers.extend(as_json(response) for response in responses)
    return answers


def as_json(response: Response) -> dict[str, Any]:
    """What must not depend on the number of ranks."""
    return {
        "tokens": response.tokens,
        "logits": response.first_logits.tolist(),
        "arm": response.report.arm,
        "classes": response.plan.classes.tolist(),
        "histogram": response.report.k_histogram,
    }
