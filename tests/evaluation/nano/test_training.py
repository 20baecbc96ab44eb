"""Training on a CPU at toy sizes: it learns, resumes exactly, writes a checkpoint that everyone reads."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
import torch
from safetensors.torch import load_file
from transformers import DeepseekV4ForCausalLM

from tests.support.networks import build_engine
from trt_redknot import Engine, Request, Tokens
from trt_redknot.engine.tokenizer import EngineTokenizer
from trt_redknot.errors import CheckpointError, LaunchError
from trt_redknot.evaluation.nano import training
from trt_redknot.evaluation.nano.batches import IGNORE
from trt_redknot.evaluation.nano.card import earlier_runs
from trt_redknot.evaluation.nano.network import SMALL, make_model, round_to_checkpoint, write_checkpoint
from trt_redknot.evaluation.nano.objective import SECOND_WHAT, WHAT, WHOSE, PreviousLoss, previous_token_loss
from trt_redknot.evaluation.nano.training import REPORT, Recipe, Trainer

PROJECT = Path(__file__).resolve().parents[3]
SCRIPT = PROJECT / "run" / "train_nano.py"
TOY = dataclasses.replace(SMALL, layers=4, head_dim=16, sinkhorn=2)
RECIPE = Recipe(
    sizes=TOY, seed=3, steps=3 * REPORT, lengths=(64, 128), first=0.5, tokens=128, rate=3e-3, warmup=20,
    subject_layers=(3,), reading_layers=(2, 3),
)  # fmt: skip
OFTEN = 2
BRIEF = dataclasses.replace(RECIPE, steps=3 * OFTEN)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """A whole run, so short that it learns nothing: its log, its state at the first report, and at the end."""

    log: list[dict[str, float]]
    begun: Path
    ended: Path


@pytest.fixture(autouse=True)
def frequent(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports every few steps, so that a run with several of them is short; but where a run has to learn."""
    if "learnt" not in request.node.name:
        monkeypatch.setattr(training, "REPORT", OFTEN)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("run")
    trainer = Trainer(BRIEF, torch.device("cpu"))
    log: list[dict[str, float]] = []

    def save() -> bool:
        if trainer.progress.step == OFTEN:
            trainer.save(folder / "begun.safetensors")
        return False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "REPORT", OFTEN)
        trainer.run(pause=save, log=log.append)
    assert trainer.done
    trainer.save(folder / "ended.safetensors")
    return Trained(log=log, begun=folder / "begun.safetensors", ended=folder / "ended.safetensors")


def test_answers_and_previous_tokens_are_learnt() -> None:
    log: list[dict[str, float]] = []
    Trainer(RECIPE, torch.device("cpu")).run(log=log.append)
    first, last = log[0], log[-1]
    assert [entry["step"] for entry in log] == [REPORT * i for i in range(1, 4)]
    assert last["answers"] < 0.7 * first["answers"]
    # The heads find the tokens before in the streams after layer 1, which starts without any of them.
    assert last["previous_correct"] > first["previous_correct"] + 0.15
    assert [entry["length"] for entry in log] == [64, 64, 128]


def test_a_resumed_run_equals_one_that_was_not_interrupted(trained: Trained, tmp_path: Path) -> None:
    assert [entry["length"] for entry in trained.log] == [64, 64, 128]
    resumed = Trainer(BRIEF, torch.device("cpu"))
    resumed.load(trained.begun)
    assert resumed.progress.step == OFTEN
    resumed.run()
    path = tmp_path / "state.safetensors"
    resumed.save(path)
    expected, found = load_file(trained.ended), load_file(path)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name


def test_states_of_another_recipe_and_damaged_ones_are_refused(trained: Trained, tmp_path: Path) -> None:
    other = Trainer(dataclasses.replace(BRIEF, rate=1e-3), torch.device("cpu"))
    with pytest.raises(CheckpointError, match=r"another recipe.*'rate': 0.001.*'rate': 0.003"):
        other.load(trained.begun)
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(trained.begun.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match="cannot be read"):
        Trainer(BRIEF, torch.device("cpu")).load(damaged)


def test_a_run_begins_with_the_weights_of_a_checkpoint(tmp_path: Path) -> None:
    drawn = make_model(TOY, seed=random.randrange(2**31))
    write_checkpoint(drawn, tmp_path / "first", "random weights\n", {})
    round_to_checkpoint(drawn)
    trainer = Trainer(dataclasses.replace(BRIEF, start=str(tmp_path / "first")), torch.device("cpu"))
    begun = trainer.model.state_dict()
    assert begun.keys() == drawn.state_dict().keys()
    for name, value in drawn.state_dict().items():
        assert torch.equal(begun[name], value), name
    assert not trainer.model.model.layers[2].self_attn.compressor.kv_norm.weight.requires_grad
    for wrong in (dataclasses.replace(BRIEF, start=str(tmp_path)), dataclasses.replace(
        BRIEF, start=str(tmp_path / "first"), sizes=dataclasses.replace(TOY, hidden=32))):  # fmt: skip
        with pytest.raises(CheckpointError, match="cannot start"):
            Trainer(wrong, torch.device("cpu"))
    with pytest.raises(CheckpointError, match="not known"):
        earlier_runs(tmp_path / "first")


def test_a_layer_begins_with_the_attention_of_another_of_its_kind() -> None:
    trainer = Trainer(dataclasses.replace(BRIEF, sizes=SMALL, copied=(2, 4)), torch.device("cpu"))
    source, target = (dict(trainer.model.model.layers[layer].named_parameters()) for layer in (2, 4))
    for name, value in target.items():
        same = torch.equal(value, source[name])
        assert same or not name.startswith(("self_attn.", "attn_hc.", "input_layernorm.")), name
    assert not torch.equal(target["mlp.experts.down_proj"], source["mlp.experts.down_proj"])
    for wrong in ((2, 3), (2, 40)):
        with pytest.raises(CheckpointError, match="two layers of one kind"):
            Trainer(dataclasses.replace(BRIEF, sizes=SMALL, copied=wrong), torch.device("cpu"))


def test_rows_are_told_the_first_of_two_steps_and_no_others() -> None:
    trainer = Trainer(RECIPE, torch.device("cpu"))
    shape = (4, 128)
    tokens = torch.randint(1, 50, shape)
    targets, bridges = torch.full(shape, IGNORE), torch.full(shape, IGNORE)
    targets[:, 100], bridges[:, 100] = 7, 9
    targets[:, 50], bridges[:, 50] = 8, 8
    hint = trainer.heads.hint(tokens, targets, bridges, slice(1, 3))
    assert hint.layer == trainer.heads.previous_layers[-1] == RECIPE.reading_layers[1] - 1
    asked = hint.added.abs().amax(-1) > 0
    assert asked.nonzero().tolist() == [[1, 100], [2, 100]]
    # By the heads of that layer the row now asks what is left: the second what, of the word that was read.
    last = trainer.heads.previous[-1]
    for back, before, now in ((WHOSE, tokens[1, 100 - WHOSE], 9), (WHAT, tokens[1, 100 - WHAT], tokens[1, 92])):
        told = torch.nn.functional.linear(hint.added[1, 100], last[back - 1].weight)
        assert told[now] > told[before] or now == before
    plain = trainer.network(tokens, dense=4, keep=[hint.layer])
    hinted = trainer.network(tokens, dense=4, keep=[hint.layer], hint=hint)
    assert torch.equal(plain.streams[hint.layer], hinted.streams[hint.layer])
    moved = (plain.logits - hinted.logits).abs().amax(-1) > 0
    assert moved[1:3, 100].all()
    assert not moved[1:3, :100].any()
    assert not moved[[0, 3]].any()


def test_rows_of_two_steps_should_look_as_the_question_that_is_left() -> None:
    heads = Trainer(RECIPE, torch.device("cpu")).heads
    width = heads.previous[-1][0].in_features
    tokens = torch.randint(1, 50, (2, 32))
    bridges = torch.full_like(tokens, IGNORE)
    steps = torch.zeros(tokens.shape, dtype=torch.bool)
    bridges[:, 20], steps[:, 20] = 60, True
    streams = {layer: torch.zeros(2, 32, 4, width // 4) for layer in heads.previous_layers}
    last = heads.previous[-1]
    for head in last:
        torch.nn.init.zeros_(head.weight)
        torch.nn.init.zeros_(head.bias)

    def losses(read: list[bool]) -> PreviousLoss:
        return previous_token_loss(streams, tokens, heads, bridges, steps, torch.tensor(read)[:, None])

    assert losses([False, False]).moved == 0
    before = losses([True, False])
    last[WHOSE - 1].bias.data[60] = last[WHAT - 1].bias.data[tokens[0, 20 - SECOND_WHAT]] = 9.0
    after = losses([True, False])
    assert after.moved < before.moved
    assert after.moved_correct == 1
    # The token that really stands there is not asked for in such a row.
    last[WHOSE - 1].bias.data.zero_()
    last[WHOSE - 1].bias.data[60] = 50.0
    steps[:] = True
    assert losses([False, False]).named < before.named
    steps[:] = False
    assert losses([False, False]).named > before.named + 1


def test_the_clock_ends_a_run_too() -> None:
    trainer = Trainer(dataclasses.replace(RECIPE, steps=10**6, minutes=2.0), torch.device("cpu"))
    trainer.progress.seconds = 60.0
    assert trainer.share == 0.5
    assert not trainer.done
    trainer.progress.seconds = 121.0
    assert trainer.done
    trainer.run()
    assert trainer.progress.step == 0


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_nano", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def arguments(output: Path, *more: str) -> list[str]:
    return ["--output", str(output), "--small", "--steps", str(2 * OFTEN), "--tokens", "128", "--lengths", "64",
            "--workers", "1", "--score-lengths", "256", "--score-prompts", "1", *more]  # fmt: skip


def test_the_command_pauses_resumes_and_leaves_a_checkpoint(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trt_redknot.evaluation.nano.network.SMALL", TOY)
    output = tmp_path / "out"
    script.main(arguments(output, "--pause-after", "0"), standalone_mode=False)
    assert f"paused at step {OFTEN}" in capsys.readouterr().err
    assert "Not scored" in (output / "checkpoint" / "README.md").read_text()
    script.main(arguments(output), standalone_mode=False)
    shown = capsys.readouterr()
    assert f"going on at step {OFTEN}" in shown.err
    said: dict[str, Any] = json.loads(shown.out)
    assert said["step"] == 2 * OFTEN
    assert set(said["exact_match"]) == {"256"}
    assert list(said["exact_match_changed"]) == ["none", "3", "CSA", "HCA", "top-k 4", "top-k 2", "top-k 1"]
    assert said["bytes"] < 32 * 2**20
    assert said["logits_from_transformers"] < 1e-4
    checkpoint = output / "checkpoint"
    card = (checkpoint / "README.md").read_text()
    assert "    python run/train_nano.py" in card
    assert "| tokens | single | override |" in card
    model = DeepseekV4ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    engine_dir = build_engine(checkpoint, tmp_path / "engine")
    tokens = EngineTokenizer(engine_dir).encode("About Mara. The boat is red. Question: What is the boat of Mara?")
    response = Engine.open(engine_dir).generate(Request(segments=[Tokens(tokens)], max_new_tokens=1, reuse=None))
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
    torch.testing.assert_close(response.first_logits, expected, rtol=1e-3, atol=1e-3)
    with pytest.raises(CheckpointError, match="of another recipe"):
        script.main(arguments(output, "--seed", "8"), standalone_mode=False)


@pytest.mark.parametrize(
    ("more", "error", "words"),
    [
        (["--lengths", "64,x"], click.UsageError, "whole numbers"),
        (["--lengths", "8"], click.UsageError, "64 or more"),
        (["--device", "cuda:99"], LaunchError, "the device cannot be used"),
        (["--device", "abacus"], LaunchError, "the device cannot be used"),
    ],
)
def test_wrong_options_are_refused(
    script: ModuleType, tmp_path: Path, more: list[str], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        script.main(arguments(tmp_path / "out", *more), standalone_mode=False)
    assert not (tmp_path / "out").exists()


def test_training_needs_nothing_that_a_torch_image_lacks(tmp_path: Path) -> None:
    """The device is the first thing that is refused after everything has been imported."""
    absent = ("pydantic", "pydantic_core", "blake3", "portalocker", "jinja2", "prometheus_client", "mpi4py")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({absent!r})); import trt_redknot.evaluation.nano.card; "
        f"sys.argv = ['train_nano.py', '--output', {str(tmp_path / 'out')!r}, '--device', 'nowhere']; "
        f"import runpy; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, "the device cannot be used" in done.stderr) == (2, True), done.stderr
