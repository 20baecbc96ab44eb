"""Engines for the tests of this folder: of a small nano network with random weights."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.support.networks import build_engine, fp64
from trt_redknot import ArtifactStore, Engine
from trt_redknot.engine.build import BuildOptions
from trt_redknot.engine.tokenizer import EngineTokenizer
from trt_redknot.evaluation.nano.network import SMALL, make_model, write_checkpoint

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "nano"
RECORDS = EXAMPLES / "records"


@dataclass(frozen=True, kw_only=True)
class Nano:
    """An engine directory, opened, with its tokenizer and a store."""

    checkpoint: Path
    directory: Path
    engine: Engine
    tokenizer: EngineTokenizer
    store: ArtifactStore


def random_checkpoint(directory: Path) -> Path:
    """A small nano network whose weights are large enough that every branch matters."""
    seed = random.randrange(2**31)
    model = make_model(SMALL, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.dim() > 1:
                value.normal_(0.0, 0.5 if "lm_head" in name else 0.12, generator=generator)
    write_checkpoint(model, directory, "random weights\n", {})
    return directory


@pytest.fixture(scope="session")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Nano:
    folder = tmp_path_factory.mktemp("nano")
    return opened(folder, random_checkpoint(folder / "checkpoint"), fp64(chunk_rows=512))


def opened(folder: Path, checkpoint: Path, options: BuildOptions) -> Nano:
    directory = build_engine(checkpoint, folder / "engine", options=options)
    return Nano(
        checkpoint=checkpoint, directory=directory, engine=Engine.open(directory), tokenizer=EngineTokenizer(directory),
        store=ArtifactStore(folder / "store"),
    )  # fmt: skip
