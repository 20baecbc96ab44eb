"""The long runs behind the table of docs/reliability.md: `python -m tests.artifacts.campaign --help`."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import click
import torch

from tests.artifacts import fuzz, stress
from tests.artifacts.process_ranks import kill_ranks
from tests.artifacts.test_certificate import MALFORMED as MALFORMED_CERTIFICATES
from tests.artifacts.test_certificate import certificate
from tests.artifacts.test_killed import kill_at_random_instants
from tests.artifacts.test_tensorfile import MALFORMED as MALFORMED_TILES
from tests.artifacts.test_tensorfile import header, one
from trt_redknot.artifacts.formats import ArtifactFormat


@click.group()
def campaign() -> None:
    """Each command prints one line of JSON and fails where anything was lost, torn or wrongly served."""
    torch.set_num_threads(1)


@campaign.command()
@click.option("--trials", default=300, show_default=True)
@click.option("--seed", default=0, show_default=True)
def ranks(trials: int, seed: int) -> None:
    """SIGKILL one of four ranks at a random change of the disk during a build."""
    with _folder() as folder:
        started = time.monotonic()
        tally = kill_ranks(folder / "store", trials=trials, seed=seed)
    _tell("ranks", started, **vars(tally))


@campaign.command()
@click.option("--trials", default=300, show_default=True)
@click.option("--seed", default=0, show_default=True)
def instants(trials: int, seed: int) -> None:
    """SIGKILL a building process at a random instant."""
    with _folder() as folder:
        started = time.monotonic()
        survived = kill_at_random_instants(folder / "store", trials=trials, seed=seed)
    _tell("instants", started, trials=trials, killed=trials - survived)


@campaign.command(name="stress")
@click.option("--readers", default=32, show_default=True)
@click.option("--builders", default=4, show_default=True)
@click.option("--evictors", default=1, show_default=True)
@click.option("--seconds", default=150.0, show_default=True)
@click.option("--seed", default=0, show_default=True)
def stress_command(readers: int, builders: int, evictors: int, seconds: float, seed: int) -> None:
    """Readers, builders and an evictor on one store."""
    crowd = stress.Crowd(readers=readers, builders=builders, evictors=evictors, seconds=seconds, seed=seed)
    with _folder() as folder:
        started = time.monotonic()
        outcome = stress.run(folder / "store", crowd)
    _tell("stress", started, counts=dict(outcome.counts), problems=outcome.problems)
    if outcome.problems:
        raise SystemExit(1)


@campaign.command(name="fuzz")
@click.option("--seconds", default=300.0, show_default=True, help="For each of the two parsers.")
@click.option("--seed", default=0, show_default=True)
@click.option("--keep", is_flag=True, help="Make the corpus in tests/data/fuzz anew from what was found.")
def fuzz_command(seconds: float, seed: int, keep: bool) -> None:
    """Fuzz the parsers of certificates and tensor files."""
    failed = False
    for target, start in ((fuzz.CERTIFICATE, _certificates()), (fuzz.TILE, _tiles())):
        place = fuzz.CORPUS / target.name
        kept = fuzz.corpus_of(target) if place.is_dir() else []
        with _folder() as folder:
            started = time.monotonic()
            tally = fuzz.fuzz(target, seconds=seconds, seed=seed, corpus=[*kept, *start], keep=folder / "found")
            if keep and not tally.problems:
                found = [path.read_bytes() for path in (folder / "found").iterdir()]
                _replace(place, fuzz.smallest(target, found))
        _tell(f"fuzz {target.name}", started, **vars(tally))
        failed |= bool(tally.problems)
    if failed:
        raise SystemExit(1)


def _certificates() -> list[bytes]:
    small = certificate(5, 1, ArtifactFormat.FLOAT32).encode()
    return [small, *(make() for make, _ in MALFORMED_CERTIFICATES.values() if len(make()) < 1 << 16)]


def _tiles() -> list[bytes]:
    two = {
        "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "b": {"dtype": "U8", "shape": [3], "data_offsets": [16, 19]},
    }
    return [one(), header(two) + bytes(19), *(raw for raw in MALFORMED_TILES.values() if len(raw) < 1 << 16)]


def _replace(place: Path, inputs: list[bytes]) -> None:
    place.mkdir(parents=True, exist_ok=True)
    for path in place.iterdir():
        path.unlink()
    for raw in inputs:
        (place / fuzz.name_of(raw)).write_bytes(raw)


def _folder() -> _Folder:
    return _Folder()


class _Folder:
    """A folder that is gone afterwards, and stays for a look where the run failed."""

    def __enter__(self) -> Path:
        self._path = tempfile.TemporaryDirectory(prefix="redknot-campaign-", ignore_cleanup_errors=True)
        return Path(self._path.name)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._path.cleanup()
        else:
            self._path._finalizer.detach()  # type: ignore[attr-defined]
            click.echo(f"left for a look: {self._path.name}", err=True)


def _tell(name: str, started: float, **figures: object) -> None:
    click.echo(json.dumps({"run": name, **figures, "seconds": round(time.monotonic() - started, 1)}))


if __name__ == "__main__":
    campaign()
