"""The examples that ship: documents, questions, tokenizer, and the checkpoint writer."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoTokenizer, DeepseekV4ForCausalLM

from trt_redknot.config.geometry import AttentionKind, RouterKind
from trt_redknot.config.parse import load_geometry
from trt_redknot.errors import CheckpointError, LaunchError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DOCUMENTS = sorted((EXAMPLES / "documents").glob("*.txt"))
TOKENIZER = AutoTokenizer.from_pretrained(EXAMPLES / "tokenizer")


def script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def writer() -> ModuleType:
    return script(EXAMPLES / "make_checkpoint.py")


@pytest.fixture(scope="module")
def checkpoint(writer: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("examples") / "checkpoint"
    writer.write_checkpoint(output, 7, torch.float32)
    return output


def test_documents_are_readable_and_of_the_promised_length() -> None:
    assert 6 <= len(DOCUMENTS) <= 8
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        assert 300 <= len(text.split()) <= 900, path.name
        assert text.isascii()


def test_questions_name_documents_that_exist_and_need_several() -> None:
    questions = json.loads((EXAMPLES / "questions.json").read_text(encoding="utf-8"))["questions"]
    assert len({question["id"] for question in questions}) == len(questions) >= 1
    for question in questions:
        assert set(question["documents"]) <= {path.name for path in DOCUMENTS}
        assert len(question["documents"]) >= 3
        assert question["question"].endswith("?")
        assert question["answer"]


def test_tokenizer_has_its_special_tokens_and_adds_none() -> None:
    assert (len(TOKENIZER), TOKENIZER.bos_token_id, TOKENIZER.eos_token_id) == (4096, 0, 1)
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        ids = TOKENIZER.encode(text)
        assert TOKENIZER.decode(ids) == text
        # Words of the documents are tokens of their own, or the documents would be far longer.
        assert len(ids) < 1.4 * len(text.split())


@given(text=st.text(max_size=80))
@settings(max_examples=100, deadline=None)
def test_tokenizer_keeps_any_text(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert all(0 <= token < 4096 for token in ids)
    if "<bos>" not in text and "<eos>" not in text:
        assert TOKENIZER.decode(ids) == text


def test_checkpoint_has_every_kind_of_layer(checkpoint: Path) -> None:
    geometry = load_geometry(checkpoint)
    assert (geometry.layers, geometry.heads, geometry.head_dim, geometry.rope_dim) == (10, 16, 64, 16)
    assert (geometry.csa_ratio, geometry.hca_ratio, geometry.window) == (4, 32, 64)
    assert (geometry.experts, geometry.experts_per_token, geometry.vocab) == (8, 6, len(TOKENIZER))
    assert set(geometry.attention_kinds) == set(AttentionKind)
    assert [kind is RouterKind.HASH for kind in geometry.router_kinds] == [True] * 3 + [False] * 7
    assert geometry.rope_compressed.factor == 16.0


def test_checkpoint_leaves_nothing_at_its_initial_value(checkpoint: Path) -> None:
    state = DeepseekV4ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).state_dict()
    for name, tensor in state.items():
        if tensor.numel() > 1:
            assert tensor.double().std() > 0, name
        assert torch.isfinite(tensor.float()).all(), name
    tables = [tensor for name, tensor in state.items() if name.endswith("tid2eid")]
    assert len(tables) == 3
    for table in tables:
        assert table.shape == (4096, 6)
        assert (table.sort(dim=1).values.diff(dim=1) > 0).all()
        assert (int(table.min()), int(table.max())) == (0, 7)


def test_logits_are_not_flat_and_depend_on_the_prompt(checkpoint: Path) -> None:
    model = DeepseekV4ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    ids = torch.tensor([TOKENIZER.encode(DOCUMENTS[0].read_text(encoding="utf-8"))[:96]])
    with torch.inference_mode():
        logits = model(ids).logits[0]
    assert 1.0 < float(logits.std(-1).mean()) < 10.0
    assert len(set(logits.argmax(-1).tolist())) > 20


def test_same_seed_same_bytes_another_seed_other_weights(writer: ModuleType, checkpoint: Path, tmp_path: Path) -> None:
    writer.write_checkpoint(tmp_path / "again", 7, torch.float32)
    writer.write_checkpoint(tmp_path / "other", 8, torch.float32)
    shards = sorted(path.name for path in checkpoint.glob("*.safetensors"))
    assert len(shards) > 1
    for name in shards:
        assert (tmp_path / "again" / name).read_bytes() == (checkpoint / name).read_bytes()
    here, there = load_file(checkpoint / shards[0]), load_file(tmp_path / "other" / shards[0])
    assert all(not torch.equal(here[name], there[name]) for name in here if here[name].is_floating_point())


def test_an_output_in_use_is_refused(writer: ModuleType, checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match="the output is in use"):
        writer.write_checkpoint(checkpoint, 7, torch.float32)


@pytest.mark.parametrize("content", [None, "notes", "{}", '{"geometry_digest": "' + "0" * 64 + '"}'])
def test_the_demo_removes_no_engine_but_its_own(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo = script(EXAMPLES.parent / "run" / "demo.py")
    steps: list[list[str]] = []
    monkeypatch.setattr(demo, "run", lambda title, command, out: steps.append(command))
    monkeypatch.chdir(tmp_path)
    engine = tmp_path / "work" / "engine"
    engine.mkdir(parents=True)
    manifest = engine / "engine.json"
    if content is not None:
        manifest.write_text(content, encoding="utf-8")
    with pytest.raises(LaunchError, match=r"something else than an engine of the demo.*Name another --output"):
        demo.main(["--output", "work"], standalone_mode=False)
    assert (engine.is_dir(), steps) == (True, [])
    digest = load_geometry(EXAMPLES / "nano" / "checkpoint").digest
    manifest.write_text(json.dumps({"geometry_digest": digest}), encoding="utf-8")
    demo.main(["--output", "work"], standalone_mode=False)
    assert not engine.exists()
    # The steps run elsewhere, so they are told where this folder is.
    assert str(engine) in steps[0]
