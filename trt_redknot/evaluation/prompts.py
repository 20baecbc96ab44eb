"""A record becomes a prompt: fresh tokens, documents, the question. The same tokens for every arm."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from trt_redknot.errors import RequestError
from trt_redknot.evaluation.records import Record

Encode = Callable[[str], list[int]]
Order = Literal["given", "reversed", "shuffled"]

_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words."
)
_TEXT = (
    "Now, answer the following question based on the above text, only give me the answer and do not output any other "
    "words."
)

# What LongBench puts before and after the context of each data set; the nano network knows no instructions.
_TEMPLATES = {
    "2wikimqa": (f"{_PASSAGES}\n\nThe following are given passages.\n", f"\n\n{_PASSAGES}\n\nQuestion: {{}}\nAnswer:"),
    "hotpotqa": (f"{_PASSAGES}\n\nThe following are given passages.\n", f"\n\n{_PASSAGES}\n\nQuestion: {{}}\nAnswer:"),
    "multifieldqa_en": (
        "Read the following text and answer briefly.\n\n",
        f"\n\n{_TEXT}\n\nQuestion: {{}}\nAnswer:",
    ),
    "nano": ("", "\n\nQuestion: {}\nAnswer:"),
}


class CuttingError(RequestError):
    """A record's context has no document as a cutting asks for."""


@dataclass(frozen=True, kw_only=True)
class Cutting:
    """How the context is cut into documents.

    Attributes:
        order: of the documents; anything but `given` is another prompt.
        documents: join neighbours until so many are left; None: as the data set has them.
        multiple: move the cuts so that every document's length is a multiple of so many tokens; what is left over at
            the end becomes fresh tokens. None: leave the cuts where they are.
    """

    order: Order = "given"
    documents: int | None = None
    multiple: int | None = None


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Token ids: fresh tokens before, documents, fresh tokens after."""

    before: tuple[int, ...]
    documents: tuple[tuple[int, ...], ...]
    after: tuple[int, ...]

    @property
    def tokens(self) -> list[int]:
        return [*self.before, *(token for document in self.documents for token in document), *self.after]


def make_prompt(record: Record, encode: Encode, cutting: Cutting) -> Prompt:
    """The prompt of a record.

    Raises:
        RequestError: the context has no tokens.
        CuttingError: the context is shorter than the multiple that documents are cut at.
    """
    before, after = _TEMPLATES[record.dataset.removesuffix("_e")]
    documents = [encode(text) for text in record.documents]
    documents = [document for document in documents if document]
    if not documents:
        raise RequestError("the record's context has no tokens", found=record.id)
    if cutting.order == "reversed":
        documents.reverse()
    elif cutting.order == "shuffled":
        random.Random(record.id).shuffle(documents)
    if cutting.documents is not None:
        documents = _joined(documents, cutting.documents)
    rest: list[int] = []
    if cutting.multiple is not None:
        documents, rest = _aligned(documents, cutting.multiple)
        if not documents:
            raise CuttingError(
                "the record's context has no document of the length asked for",
                expected=f"at least {cutting.multiple} tokens", found=f"{len(rest)} of {record.id}",
            )  # fmt: skip
    question = encode(after.format(record.input))
    return Prompt(
        before=tuple(encode(before)) if before else (),
        documents=tuple(tuple(document) for document in documents),
        after=(*rest, *question),
    )


def _joined(documents: Sequence[list[int]], count: int) -> list[list[int]]:
    """Neighbours joined into `count` documents, or as many as there are, of about the same number of parts."""
    count = min(count, len(documents))
    borders = [len(documents) * index // count for index in range(count + 1)]
    return [[token for document in documents[a:b] for token in document] for a, b in pairwise(borders)]


def _aligned(documents: Sequence[list[int]], multiple: int) -> tuple[list[list[int]], list[int]]:
    """Cuts moved to the nearest multiple; documents that vanish join a neighbour. Returns the tokens left over too."""
    tokens = [token for document in documents for token in document]
    end, cuts = 0, {0, len(tokens) // multiple * multiple}
    for document in documents:
        end += len(document)
        cuts.add(min(round(end / multiple) * multiple, len(tokens) // multiple * multiple))
    borders = sorted(cuts)
    return [tokens[a:b] for a, b in pairwise(borders)], tokens[borders[-1] :]
