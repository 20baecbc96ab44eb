"""The plugin contract, held by a host program that treats the library as TensorRT does."""

from __future__ import annotations

import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.plugins.cases import Case, all_cases, raw_bytes
from tests.plugins.conftest import Built

SEEDS = st.integers(0, 2**31)
FIXTURES = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
# Building the libraries is part of the first test that needs them.
pytestmark = pytest.mark.timeout(1800)


def write_all(cases: list[Case], folder: Path, *, contents: bool) -> list[Path]:
    return [case.write(folder / f"{index:02}_{case.plugin}", contents=contents) for index, case in enumerate(cases)]


def checked(done: subprocess.CompletedProcess[str], cases: list[Case]) -> None:
    """Every case ran at least 20 checks and failed none."""
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[0] for line in lines] == [case.plugin for case in cases]
    assert all(int(line[1]) >= 20 and int(line[3]) == 0 for line in lines), done.stdout


def test_every_creator_is_listed_and_covered(built: Built) -> None:
    done = built.run("list")
    assert done.returncode == 0, done.stderr
    listed = [line.split() for line in done.stdout.splitlines()]
    assert {name for _, name, _ in listed} == {case.plugin for case in all_cases(1, "cpu", 8)}
    assert all((namespace, version) == ("redknot", "1") for namespace, _, version in listed)


@settings(deadline=None, max_examples=3, suppress_health_check=FIXTURES)
@given(rows=st.integers(6, 40), seed=SEEDS)
def test_contract_without_a_gpu(built: Built, tmp_path: Path, rows: int, seed: int) -> None:
    cases = all_cases(seed, "cpu", rows)
    checked(built.run("contract", *write_all(cases, tmp_path, contents=False)), cases)


def test_contract_on_zero_rows(built: Built, tmp_path: Path) -> None:
    cases = all_cases(3, "cpu", 0)
    checked(built.run("contract", *write_all(cases, tmp_path, contents=False)), cases)


def size_lines(manifest: Path) -> list[list[str]]:
    return [line.split() for line in manifest.read_text().splitlines()]


@settings(deadline=None, max_examples=20, suppress_health_check=FIXTURES)
@given(counts=st.lists(st.integers(1, 250_000), min_size=2, max_size=12))
@example(counts=[10_922, 10_923])
def test_smaller_shapes_never_need_more_workspace(built: Built, tmp_path: Path, counts: list[int]) -> None:
    """A build sets workspace aside for the largest shapes, and smaller ones must do with it."""
    small, large = (
        [size_lines(path) for path in write_all(all_cases(1, "cpu", rows), tmp_path / str(rows), contents=False)]
        for rows in (8, 16)
    )
    needed: dict[int, list[int]] = {}
    for count in sorted(counts):
        manifests = []
        for index, (low, high) in enumerate(zip(small, large, strict=True)):
            lines = [
                [*a[:4], *(str(int(x) + (int(y) - int(x)) * (count - 1)) for x, y in zip(a[4:], b[4:], strict=True))]
                if a[0] in ("input", "output")
                else a
                for a, b in zip(low, high, strict=True)
            ]
            manifests.append(tmp_path / f"resized_{index}")
            manifests[-1].write_text("".join(" ".join(line) + "\n" for line in lines))
        done = built.run("workspace", *manifests)
        assert done.returncode == 0, done.stderr
        needed[count] = [int(line.split()[1]) for line in done.stdout.splitlines()]
    for before, after in pairwise(needed.values()):
        assert all(less <= more for less, more in zip(before, after, strict=True)), needed


@pytest.mark.parametrize(
    ("plugin", "spoil", "problem"),
    [
        ("RestoreReplace", {"width": 12}, "multiple of 8"),
        ("RestoreReplace", {"packed": 2}, "expected a value in"),
        ("RestoreReplace", {"height": 3}, "unknown field 'height'"),
        ("MoePermute", {"hidden": 12}, "multiple of 8"),
        ("MoeActivation", {"width": 12}, "multiple of 8"),
        ("MoeCombine", {"hidden": 12}, "multiple of 8"),
        ("Compress", {"rope_dim": 12}, "multiples of 8"),
    ],
)
def test_a_wrong_manifest_fails_with_the_plugin_s_message(
    built: Built, tmp_path: Path, plugin: str, spoil: dict[str, int], problem: str
) -> None:
    case = next(case for case in all_cases(1, "cpu", 8) if case.plugin == plugin)
    lines = case.write(tmp_path, contents=False).read_text().splitlines()
    lines = [line for line in lines if line.split()[2:3] not in [[name] for name in spoil]]
    lines += [f"field int32 {name} {value}" for name, value in spoil.items()]
    (tmp_path / "manifest").write_text("\n".join(lines))
    done = built.run("contract", tmp_path / "manifest")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED a plugin is created from its fields" in done.stdout
    assert problem in done.stdout


def test_more_selected_entries_than_the_kernels_take_are_refused_with_their_shapes(
    built: Built, tmp_path: Path
) -> None:
    case = next(case for case in all_cases(1, "cpu", 8) if "selected" in case.inputs)
    manifest = case.write(tmp_path, contents=False)
    lines = [[*line[:-1], "1025"] if line[2:3] == ["selected"] and line[0] == "input" else line
             for line in size_lines(manifest)]  # fmt: skip
    manifest.write_text("".join(" ".join(line) + "\n" for line in lines))
    done = built.run("contract", manifest)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "at most 1024 entries of a row in 'selected', found 1025" in done.stdout


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("rows", [0, 1, 7, 150, 1000])
def test_enqueue_on_the_gpu_gives_the_bytes_of_the_torch_op(built: Built, tmp_path: Path, rows: int) -> None:
    seed = int(torch.randint(2**31, (1,)))
    cases = all_cases(seed, "cuda", rows)
    manifests = write_all(cases, tmp_path, contents=True)
    checked(built.run("device", *manifests), cases)
    for case, manifest in zip(cases, manifests, strict=True):
        wanted, valid = case.expected(), case.valid()
        assert wanted.keys() == case.outputs.keys()
        for name, tensor in wanted.items():
            found = case.output_path(manifest.parent, name).read_bytes()
            size = tensor.numel() * tensor.element_size()
            assert len(found) == size
            kept = size if name not in valid else valid[name] * size // max(1, tensor.shape[0])
            assert found[:kept] == raw_bytes(tensor)[:kept], f"seed {seed}: {case.plugin}.{name} with {case.fields}"
