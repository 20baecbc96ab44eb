"""A small engine with a tokenizer of bytes, in fp64 so that equal means equal, and services over it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.serving.support import Bench, make_bench
from trt_redknot.serving.config import ServingConfig
from trt_redknot.serving.service import Service


@pytest.fixture(scope="session")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bench(tmp_path_factory.mktemp("serving"), seed=random.randrange(2**31))


@pytest.fixture(scope="session")
def bench(engine_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench.open(engine_dir, tmp_path_factory.mktemp("bench-store"))


@pytest.fixture
def config(engine_dir: Path, bench: Bench) -> ServingConfig:
    return ServingConfig(engine=engine_dir, store=bench.store.root, cache_tokens=512, max_batch=4)


@pytest.fixture
def serve(config: ServingConfig) -> Iterator[Callable[..., Service]]:
    """Opens services, and closes them after the test."""
    opened: list[Service] = []

    def start(**settings: object) -> Service:
        service = Service.open(ServingConfig(**{**config.model_dump(), **settings}))  # type: ignore[arg-type]
        opened.append(service)
        return service

    yield start
    for service in opened:
        service.close()
