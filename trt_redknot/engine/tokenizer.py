"""The tokenizer that lies in an engine directory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from trt_redknot.errors import EngineError, RequestError


class EngineTokenizer:
    """Text to ids and back, without special tokens: a document is a part of a prompt, not a prompt.

    Raises:
        EngineError: the engine was built from a checkpoint without a tokenizer, or the file is damaged.
    """

    FILE = "tokenizer.json"

    def __init__(self, engine_dir: Path) -> None:
        path = engine_dir / self.FILE
        if not path.is_file():
            raise EngineError(
                "the engine has no tokenizer", expected=self.FILE, path=engine_dir,
                remedy="Give token ids instead of text, or build from a checkpoint that has a tokenizer.json.",
            )  # fmt: skip
        try:
            self._tokenizer: Tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:
            raise EngineError(
                "the tokenizer cannot be read", found=error, path=path, remedy="Fetch the file again."
            ) from error

    def encode(self, text: str) -> list[int]:
        """Ids of `text`. Raises RequestError for half a surrogate pair: bytes of an argument that are not UTF-8."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                "the text is not Unicode", expected="text that UTF-8 can hold",
                found=f"{text[error.start]!a} at position {error.start}",
            ) from error  # fmt: skip
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    @cached_property
    def longest_token_bytes(self) -> int:
        """UTF-8 bytes of text that one token stands for at most: its spelling is at least as long as its text."""
        return max((len(token.encode()) for token in self._tokenizer.get_vocab()), default=1)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))
