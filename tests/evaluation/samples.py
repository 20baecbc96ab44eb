"""Records and results that the tests of this folder make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trt_redknot.config.policy import ReusePolicy
from trt_redknot.evaluation.arms import ArmResult, PairResult
from trt_redknot.evaluation.variants import Variant, single


def record(**changes: Any) -> dict[str, Any]:
    values = {
        "input": "Where does Olin work?",
        "context": "Passage 1:\nOlin works at the mill.\n\nPassage 2:\nThe mill stands in Norrby.",
        "answers": ["Norrby"],
        "length": 12,
        "dataset": "2wikimqa",
        "language": "en",
        "all_classes": None,
        "_id": "abc",
    }
    return {key: value for key, value in (values | changes).items() if value is not ...}


def write(path: Path, *records: dict[str, Any] | str) -> Path:
    lines = [line if isinstance(line, str) else json.dumps(line) for line in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def arm(**changes: Any) -> ArmResult:
    values = {
        "tokens": (5, 6, 1),
        "text": "Norrby",
        "f1": 1.0,
        "exact": 1.0,
        "finish": "stop",
        "loop": None,
        "ttft_s": 0.5,
        "decode_s": 0.25,
        "rows": {"total": 100, "protected": 60, "active": 10, "omitted": 30},
        "saved": {"logical_head_rows": 0.2, "token_rows": 0.25, "arithmetic": 0.3},
        "fanout": (0, 0, 0, 5, 3, 0, 2),
    }
    return ArmResult.model_validate(values | changes)


def pair(**changes: Any) -> PairResult:
    values = {
        "variant": "policy",
        "id": "abc",
        "file": "one.jsonl",
        "kind": "single",
        "longer": False,
        "question": "Where does Olin work?",
        "references": ("Norrby",),
        "prompt_tokens": 100,
        "documents": 3,
        "kl": 0.01,
        "top1": True,
        "same": 3,
        "compared": 3,
        "prefix": 3,
        "reuse": arm(),
        "recompute": arm(),
    }
    return PairResult.model_validate(values | changes)


def run_of(variants: list[Variant] | None = None) -> dict[str, Any]:
    """What a journal's first line says."""
    engine = {"checkpoint": "c" * 64, "profile": "p" * 64, "artifacts": "float32", "dtype": "float32"}
    return {
        "records": "mine",
        "digest": "d" * 64,
        "questions": 2,
        "variants": [variant.to_json() for variant in variants or single(ReusePolicy())],
        "engines": {"base": engine},
        "answer_tokens": [32, 128],
    }
