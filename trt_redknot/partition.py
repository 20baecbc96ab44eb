"""Who owns what: contiguous, as even as possible. Used for rows, experts, vocabulary and files alike."""

from __future__ import annotations


def even_split(count: int, parts: int) -> list[range]:
    """`parts` contiguous ranges that cover `count` items; the first ones are longer by one where it does not divide."""
    base, extra = divmod(count, parts)
    ranges, start = [], 0
    for part in range(parts):
        stop = start + base + (part < extra)
        ranges.append(range(start, stop))
        start = stop
    return ranges
