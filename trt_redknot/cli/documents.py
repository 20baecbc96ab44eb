"""Documents from the command line: text files, token files, folders of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trt_redknot.errors import RequestError

TEXT_SUFFIXES = (".txt", ".md")
TOKEN_SUFFIX = ".json"
_LIMIT = 256 * 2**20


@dataclass(frozen=True, kw_only=True)
class DocumentFile:
    """A document and its token ids."""

    path: Path
    tokens: list[int]


def find_documents(paths: Sequence[Path]) -> list[Path]:
    """The files named, and in folders those ending in .txt, .md or .json, in order of name.

    Raises:
        RequestError: nothing there, or a file of another kind.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(p for p in path.iterdir() if p.suffix in (*TEXT_SUFFIXES, TOKEN_SUFFIX) and p.is_file())
            if not inside:
                raise RequestError("the folder holds no documents", expected=".txt, .md or .json files", path=path)
            found += inside
        elif not path.is_file():
            raise RequestError("there is no such document", path=path)
        elif path.suffix not in (*TEXT_SUFFIXES, TOKEN_SUFFIX):
            raise RequestError(
                "the document is of an unknown kind", expected="text (.txt, .md) or token ids (.json)",
                found=path.suffix or "no suffix", path=path,
            )  # fmt: skip
        else:
            found.append(path)
    return found


def read_document(path: Path, encode: Callable[[str], list[int]]) -> DocumentFile:
    """Token ids of one file. A .json file is a list of token ids.

    Raises:
        RequestError: unreadable, too large, not UTF-8, not a list of integers, or empty.
    """
    try:
        size = path.stat().st_size
        if size > _LIMIT:
            raise RequestError("the document is too large", expected=f"at most {_LIMIT} bytes", found=size, path=path)
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(f"the document cannot be read: {error.strerror or error}", path=path) from error
    except UnicodeDecodeError as error:
        raise RequestError("the document is not UTF-8 text", found=error.reason, path=path) from error
    if path.suffix != TOKEN_SUFFIX:
        tokens = encode(content)
    else:
        try:
            tokens = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise RequestError("the token file is not JSON", found=error, path=path) from error
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise RequestError("the token file is ill-formed", expected="a JSON list of integers", path=path)
    if not tokens:
        raise RequestError("the document is empty", expected="at least one token", path=path)
    return DocumentFile(path=path, tokens=tokens)
