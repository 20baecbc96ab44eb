"""The table of compute-sanitizer: what is called clean was followed to its end and nothing was said of it."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

from benches import sanitize, small_launches
from benches.small_launches import CASES, CONTROLS, WAITING

SUMMARIES = {
    "memcheck": "========= ERROR SUMMARY: {} error{}",
    "initcheck": "========= ERROR SUMMARY: {} error{}",
    "racecheck": "========= RACECHECK SUMMARY: {} hazard{} displayed ({} errors, 0 warnings)",
}
TOOL = """#!{python}
import json, pathlib, sys, time
folder = pathlib.Path(__file__).parent
arguments = sys.argv[1:]
case = arguments[arguments.index("benches.small_launches") + 1]
tool = arguments[arguments.index("--tool") + 1]
with (folder / "calls").open("a") as calls:
    calls.write(json.dumps(arguments) + "\\n")
says = json.loads((folder / "says").read_text())
found = says.get(tool + " " + case, 1 if case.startswith("control") else 0)
if found == "hang":
    print("going on", flush=True)
    time.sleep(600)
if found == "crash":
    print("Segmentation fault")
    sys.exit(139)
if found == "error":
    print("an output is not finite")
summary = json.loads((folder / "summaries").read_text())[tool]
print(summary.format(0 if found == "error" else found, "" if found == 1 else "s", found))
sys.exit(1 if found == "error" else 99 if found else 0)
"""


class Tool:
    """A compute-sanitizer on PATH that says what it is told to, and notes how it was called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "summaries").write_text(json.dumps(SUMMARIES), encoding="utf-8")
        (folder / "compute-sanitizer").write_text(TOOL.replace("{python}", sys.executable), encoding="utf-8")
        (folder / "compute-sanitizer").chmod(0o755)
        self.says({})

    def says(self, findings: dict[str, object]) -> None:
        (self.folder / "says").write_text(json.dumps(findings), encoding="utf-8")

    @property
    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in (self.folder / "calls").read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return Tool(tmp_path / "bin")


def run(tmp_path: Path, *arguments: str) -> tuple[int, dict[tuple[str, str], sanitize.Run]]:
    output = tmp_path / "runs.json"
    resting = tmp_path / "resting"
    resting.mkdir(exist_ok=True)
    (resting / "libredknot_kernels.so").touch()
    status = sanitize.main([*arguments, "--jobs", "4", "--resting", str(resting), "--json", str(output)])
    runs = [sanitize.Run(**each) for each in json.loads(output.read_text(encoding="utf-8"))]
    return status, {(each.case, each.tool): each for each in runs}


def test_every_case_runs_under_every_tool_and_controls_under_theirs(tool: Tool, tmp_path: Path) -> None:
    status, runs = run(tmp_path)
    assert status == 0
    wanted = {(case, name) for case in CASES for name in sanitize.TOOLS} | set(CONTROLS.items())
    assert set(runs) == wanted
    assert {each.verdict for (case, _), each in runs.items() if case not in CONTROLS} == {"clean"}
    assert len(tool.calls) == len(wanted)
    for call in tool.calls:
        case, name = call[call.index("benches.small_launches") + 1], call[call.index("--tool") + 1]
        assert call[call.index("--kernel-name") + 1] == "kns=redknot"
        assert ("--library" in call) == (name == "racecheck" and case in WAITING)


def test_what_is_reported_crashes_or_errs_is_never_clean(
    tool: Tool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = random.sample(sorted(set(CASES) - WAITING), 3)
    wrong = dict(zip(cases, (random.randrange(1, 900), "crash", "error"), strict=True))
    name = random.choice(sanitize.TOOLS)
    tool.says({f"{name} {case}": what for case, what in wrong.items()})
    status, runs = run(tmp_path, *cases, "unpack")
    assert status == 1
    assert [runs[case, name].verdict for case in cases] == ["REPORTED", "FAILED", "FAILED"]
    assert all(each.right for pair, each in runs.items() if pair not in {(case, name) for case in cases})
    printed = capsys.readouterr()
    assert "Segmentation fault" in printed.err
    assert "REPORTED" in printed.out


def test_what_hangs_is_ended_and_told(tool: Tool, tmp_path: Path) -> None:
    """Under the one tool without a control: nothing else has to be over in time."""
    tool.says({"racecheck unpack": "hang"})
    status, runs = run(tmp_path, "unpack", "--tools", "racecheck", "--timeout", "5")
    assert status == 1
    (found,) = runs.values()
    assert (found.verdict, found.text) == ("TIMED OUT", "going on\n")


def test_a_tool_that_follows_nothing_is_found_out(tool: Tool, tmp_path: Path) -> None:
    control, name = random.choice(sorted(CONTROLS.items()))
    tool.says({f"{name} {control}": 0})
    status, runs = run(tmp_path, "unpack")
    assert status == 1
    assert runs[control, name].verdict == "BLIND"


def test_without_the_libraries_for_tools_blocks_that_wait_are_not_raced(tool: Tool, tmp_path: Path) -> None:
    case = random.choice(sorted(WAITING))
    status = sanitize.main([case, "--tools", "racecheck", "--resting", str(tmp_path / "nowhere")])
    assert status == 1
    assert not (tool.folder / "calls").exists()


@pytest.mark.parametrize("arguments", [["everything"], ["--jobs", "0"], []])
def test_mistakes_are_one_line(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit) as left:
        sanitize.main(arguments)
    assert left.value.code == 2
    assert "error: " in capsys.readouterr().err.splitlines()[-1]


def test_controls_call_what_they_should(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody wrote, and rows behind the end of it: the shapes that the op is told."""
    seen: list[tuple[int, ...]] = []
    monkeypatch.setattr(small_launches.elementwise, "query_norm", lambda q, *, eps: seen.append(tuple(q.shape)))
    real_empty, real_as_tensor = small_launches.torch.empty, small_launches.torch.as_tensor
    monkeypatch.setattr(small_launches.torch, "empty", lambda *shape, device, **more: real_empty(*shape, **more))
    monkeypatch.setattr(small_launches.torch.Tensor, "cuda", lambda self: self)

    def as_tensor(said: object, device: str) -> object:
        interface = said.__cuda_array_interface__  # type: ignore[attr-defined]
        return real_as_tensor(real_empty(interface["shape"], dtype=small_launches.torch.int16))

    monkeypatch.setattr(small_launches.torch, "as_tensor", as_tensor)
    for name in CONTROLS:
        list(small_launches._WRONG[name][1]())
    assert sorted(seen) == [(9, 8, 512), (18, 8, 512)]
