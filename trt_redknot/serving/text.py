"""From generated ids to text, piece by piece: whole characters only, and nothing of a text that ends the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_REPLACEMENT = "\ufffd"
# A character has at most four bytes and a token at least one: what is cut off in the middle of one began in the last
# three tokens.
_UNFINISHED = 3


class Detokenizer:
    """Text of one answer. The pieces joined are the text of all ids.

    Args:
        decode: ids to text; bytes that are no character become U+FFFD.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        # Text of ids[:read] was given out. Ids are decoded from `start` on: some tokens look different at a beginning.
        self._start = 0
        self._read = 0

    def push(self, token: int) -> str:
        """The text that became certain with this token; empty while a character lacks bytes."""
        self._ids.append(token)
        pending = len(self._ids) - self._read
        for held in range(min(pending, _UNFINISHED + 1)):
            stop = len(self._ids) - held
            if not self._decode(self._ids[self._start : stop]).endswith(_REPLACEMENT):
                return self._take(stop)
        if pending > _UNFINISHED:
            # Bytes that no token will complete are shown as what they are: no character. So is a U+FFFD that the text
            # has itself, which looks the same; a cut through its bytes would make several of it.
            for held in range(_UNFINISHED, 0, -1):
                if self._is_boundary(stop := len(self._ids) - held):
                    return self._take(stop)
        return ""

    def finish(self) -> str:
        """What is left, be it whole characters or not."""
        return self._take(len(self._ids))

    def _is_boundary(self, stop: int) -> bool:
        """Whether no character has bytes on both sides of `stop`."""
        ids = self._ids
        whole = self._decode(ids[self._start :])
        return self._decode(ids[self._start : stop]) + self._decode(ids[stop:]) == whole

    def _take(self, stop: int) -> str:
        if stop <= self._read:
            return ""
        known = self._decode(self._ids[self._start : self._read])
        text = self._decode(self._ids[self._start : stop])[len(known) :]
        self._start, self._read = self._read, stop
        return text


class StopTexts:
    """Lets text through up to the first of some texts, and holds back what may be the beginning of one.

    Args:
        stops: none of them empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.met = False

    def push(self, text: str) -> str:
        """What may be shown now. Nothing more once a stop text was met."""
        if self.met:
            return ""
        self._held += text
        found = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            self.met = True
            shown, self._held = self._held[: min(found)], ""
            return shown
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def finish(self) -> str:
        """What was held back for nothing."""
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class AnswerText:
    """The text of one answer, token by token.

    Args:
        decode: None for an engine without a tokenizer: there is no text then, and no stop texts.
    """

    def __init__(self, decode: Decode | None, stops: Sequence[str]) -> None:
        assert decode is not None or not stops
        self._detokenizer = None if decode is None else Detokenizer(decode)
        self._stops = StopTexts(stops)
        self._shown: list[str] = []

    @property
    def stopped(self) -> bool:
        """A stop text was met."""
        return self._stops.met

    @property
    def text(self) -> str | None:
        """Everything given out so far."""
        return None if self._detokenizer is None else "".join(self._shown)

    def push(self, token: int) -> str:
        if self._detokenizer is None:
            return ""
        return self._show(self._stops.push(self._detokenizer.push(token)))

    def finish(self) -> str:
        """The end of the answer: what was held back, if no stop text was met."""
        if self._detokenizer is None or self.stopped:
            return ""
        return self._show(self._stops.push(self._detokenizer.finish()) + self._stops.finish())

    def _show(self, text: str) -> str:
        if text:
            self._shown.append(text)
        return text
