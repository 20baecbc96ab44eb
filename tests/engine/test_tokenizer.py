"""The engine's tokenizer: text to ids and back, and what is no text."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from trt_redknot.engine.tokenizer import EngineTokenizer
from trt_redknot.errors import EngineError, RequestError

SHIPPED = Path(__file__).parents[2] / "examples" / "tokenizer" / EngineTokenizer.FILE


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    shutil.copyfile(SHIPPED, tmp_path / EngineTokenizer.FILE)
    return tmp_path


def test_text_comes_back(engine: Path) -> None:
    tokenizer = EngineTokenizer(engine)
    text = "The limit is 40 boxes. \N{SNOWMAN} \N{GRINNING FACE} \0"
    assert tokenizer.decode(tokenizer.encode(text)).strip() == text


@pytest.mark.parametrize("text", ["caf\udce9", "\ud83d and half a pair"])
def test_half_a_pair_is_refused(engine: Path, text: str) -> None:
    with pytest.raises(RequestError, match=r"is not Unicode.*found '\\ud\w+' at position"):
        EngineTokenizer(engine).encode(text)


def test_a_tokenizer_that_is_none_is_refused(engine: Path) -> None:
    (engine / EngineTokenizer.FILE).write_bytes(b"\xff\xfe")
    with pytest.raises(EngineError, match="cannot be read"):
        EngineTokenizer(engine)
