"""The command behind `run/bench_serving.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Literal, cast

import click

from trt_redknot.cli.documents import find_documents, read_document
from trt_redknot.cli.numbers import FiniteRange
from trt_redknot.cli.output import Output
from trt_redknot.config.policy import ReusePolicy
from trt_redknot.errors import RequestError
from trt_redknot.serving.bench.load import Load, Plan
from trt_redknot.serving.bench.records import Level, Loop, write_log
from trt_redknot.serving.bench.report import page, table, write_page
from trt_redknot.serving.bench.statistics import Objective, summarise
from trt_redknot.serving.bench.target import ServiceTarget, Target, TritonTarget
from trt_redknot.serving.bench.workload import Workload, random_documents
from trt_redknot.serving.config import ServingConfig
from trt_redknot.serving.frontend import Serving
from trt_redknot.serving.orchestrator import Orchestrator
from trt_redknot.serving.triton_client import TritonClient

_VERSION = 1


@click.command(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True},
    epilog="""\b
Examples:
  python run/bench_serving.py --engine engine --store store documents/
  python run/bench_serving.py --engine engine --url http://127.0.0.1:8000 --random 4x512 --rate 2 --rate 4
Both arms answer the same prompts with the same number of tokens. A ratio is printed only where they did.
""",
)
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
@click.option("--engine", type=click.Path(path_type=Path), required=True, help="Engine folder.")
@click.option("--store", type=click.Path(path_type=Path), help="Artifact store, for a service of this process.")
@click.option("--url", help="A Triton server instead of a service of this process.")
@click.option("--random", "random_", metavar="COUNTxTOKENS", help="Random documents instead of files.")
@click.option("--documents-a-prompt", type=click.IntRange(1), default=2)
@click.option("--question-tokens", type=click.IntRange(1), default=32)
@click.option("--output-tokens", type=click.IntRange(1), default=16, help="Of every answer, exactly.")
@click.option("--budget", type=FiniteRange(0, 1), default=0.10)
@click.option("--epilogue", type=click.Choice(["full", "active"]), default="full")
@click.option("--concurrency", type=click.IntRange(1), multiple=True, default=(1, 2, 4, 8, 16), help="Closed loop.")
@click.option("--rate", type=FiniteRange(0, min_open=True), multiple=True, help="Open loop, requests a second.")
@click.option("--closed/--no-closed", default=True, help="Whether to run the closed loop.")
@click.option("--rounds", type=click.IntRange(1), default=4, help="Of both arms at each level.")
@click.option("--requests", type=click.IntRange(1), default=32, help="Of an arm in a round.")
@click.option("--warm-up", type=click.IntRange(0), default=4, help="Of an arm at each level, not counted.")
@click.option("--slo-ttft-ms", type=FiniteRange(0, min_open=True), help="A longer time to first token is bad.")
@click.option("--slo-tpot-ms", type=FiniteRange(0, min_open=True), help="A longer time a token is bad.")
@click.option("--seed", type=click.IntRange(0), default=0)
@click.option("--max-batch", type=click.IntRange(1), default=16, help="Of a service of this process.")
@click.option("--log", type=click.Path(path_type=Path), default=Path("bench-serving.jsonl"), help="Raw log.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON instead of a table.")
@click.option("--page", "page_path", type=click.Path(path_type=Path), help="Write the charts to this HTML file.")
def bench(
    paths: tuple[Path, ...], engine: Path, store: Path | None, url: str | None, random_: str | None,
    documents_a_prompt: int, question_tokens: int, output_tokens: int, budget: float, epilogue: str,
    concurrency: tuple[int, ...], rate: tuple[float, ...], closed: bool, rounds: int, requests: int, warm_up: int,
    slo_ttft_ms: float | None, slo_tpot_ms: float | None, seed: int, max_batch: int, log: Path, as_json: bool,
    page_path: Path | None,
) -> None:  # fmt: skip
    """Measure a service under load, with reuse and without: TTFT, time a token, latency, throughput, goodput."""
    from trt_redknot.engine.manifest import read_manifest

    manifest, geometry = read_manifest(engine)
    workload = Workload(
        documents=_documents(paths, random_, engine, geometry.vocab, seed),
        documents_a_prompt=documents_a_prompt,
        question_tokens=question_tokens,
        vocab=geometry.vocab,
        output_tokens=output_tokens,
        policy=ReusePolicy(budget=budget, epilogue=cast('Literal["full", "active"]', epilogue)),
        seed=seed,
    )
    levels = [Level(loop=Loop.CLOSED, value=float(clients)) for clients in concurrency if closed]
    levels += [Level(loop=Loop.OPEN, value=value) for value in rate]
    if not levels:
        raise RequestError("there is nothing to run", remedy="Name a --rate, or leave --no-closed out.")
    # Once each: the rounds of two runs of a level would pass for one round.
    plan = Plan(levels=tuple(dict.fromkeys(levels)), rounds=rounds, requests=requests, warm_up=warm_up)
    objective = Objective(
        ttft_s=None if slo_ttft_ms is None else slo_ttft_ms / 1e3,
        tpot_s=None if slo_tpot_ms is None else slo_tpot_ms / 1e3,
    )
    out = Output()
    with _target(engine, store, url, manifest.tp_size, max_batch) as target:
        out.note(f"building {len(workload.documents)} documents")
        artifact_ids = target.build(workload.builds())
        records = Load(target, workload, artifact_ids, tell=out.note).run(plan)
    header: dict[str, object] = {
        "version": _VERSION, "engine": manifest.digest, "target": url or "service", "ranks": manifest.tp_size,
        "dtype": manifest.dtype, "documents": len(workload.documents), "documents_a_prompt": documents_a_prompt,
        "output_tokens": output_tokens, "budget": budget, "epilogue": epilogue, "rounds": rounds,
        "requests": requests, "seed": seed,
    }  # fmt: skip
    write_log(log, header, records)
    figures = summarise(records, objective, seed=seed)
    wanted = _wanted(slo_ttft_ms, slo_tpot_ms)
    if as_json:
        out.json({"bench": header, "objective": asdict(objective), "levels": [level.to_json() for level in figures]})
    else:
        out.show(table(figures, wanted))
        for level in figures:
            if level.refusal is not None:
                out.show(f"{level.level.loop} {level.level.name}: no ratio, because {level.refusal}")
    if page_path is not None:
        write_page(page_path, page(figures, header, wanted))
    out.note(f"raw log: {log}")


def _wanted(ttft_ms: float | None, tpot_ms: float | None) -> str:
    parts = [f"{name} within {limit:g} ms" for name, limit in (("TTFT", ttft_ms), ("TPOT", tpot_ms)) if limit]
    return " and ".join(parts) or "any time"


def _documents(
    paths: tuple[Path, ...], random_: str | None, engine: Path, vocab: int, seed: int
) -> tuple[tuple[int, ...], ...]:
    from trt_redknot.engine.tokenizer import EngineTokenizer

    if bool(paths) == (random_ is not None):
        raise RequestError("a bench needs documents", expected="paths of documents, or --random COUNTxTOKENS")
    if random_ is None:
        files = find_documents(paths)
        encode = EngineTokenizer(engine).encode if any(path.suffix != ".json" for path in files) else _no_text
        return tuple(tuple(read_document(path, encode).tokens) for path in files)
    count, cross, length = random_.partition("x")
    if not (cross and count.isdecimal() and length.isdecimal() and int(count) and int(length)):
        raise RequestError("--random is ill-formed", expected="COUNTxTOKENS, as in 4x512", found=random_)
    return random_documents(int(count), int(length), vocab, seed)


def _no_text(text: str) -> list[int]:
    raise RequestError("a document is text, and no tokenizer was opened")


@contextlib.contextmanager
def _target(engine: Path, store: Path | None, url: str | None, ranks: int, max_batch: int) -> Iterator[Target]:
    if (store is None) == (url is None):
        raise RequestError("a bench needs one target", expected="--store, or --url")
    if store is None:
        yield TritonTarget(TritonClient(url or ""))
        return
    config = ServingConfig(
        engine=engine, store=store, world_size=ranks, max_batch=max_batch, max_queue=max(64, 4 * max_batch)
    )
    service = _open(config)
    try:
        yield ServiceTarget(service)
    finally:
        service.close()


def _open(config: ServingConfig) -> Serving:
    """One rank runs in this process, several under an mpirun of their own."""
    if config.world_size > 1:
        return Orchestrator.open(config)
    from trt_redknot.serving.service import Service

    return Service.open(config, None)
