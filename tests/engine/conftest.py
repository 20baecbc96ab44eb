"""Engines the tests of this folder share; each session draws its own weights."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import DeepseekV4ForCausalLM

from tests.support.networks import NetworkOptions, fp64, open_network
from trt_redknot import ArtifactStore, Engine
from trt_redknot.artifacts.files import Files


class UnsyncedFiles(Files):
    """Of stores that need not outlive a crash: waiting for the disk is half of the time a small artifact takes."""

    def sync(self, fd: int) -> None:
        return None


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A network, our engine of it, and an empty store."""

    model: DeepseekV4ForCausalLM
    engine: Engine
    store: ArtifactStore
    directory: Path

    def tokens(self, count: int) -> list[int]:
        return [random.randrange(self.engine.geometry.vocab) for _ in range(count)]


@pytest.fixture(scope="session")
def network_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("network")


@pytest.fixture(scope="session")
def opened(network_dir: Path) -> tuple[DeepseekV4ForCausalLM, Engine]:
    return open_network(network_dir, NetworkOptions(kinds="schchchc", seed=random.randrange(2**31)), build=fp64())


@pytest.fixture
def bench(opened: tuple[DeepseekV4ForCausalLM, Engine], network_dir: Path, tmp_path: Path) -> Bench:
    model, engine = opened
    store = ArtifactStore(tmp_path / "store", files=UnsyncedFiles())
    return Bench(model=model, engine=engine, store=store, directory=network_dir)
