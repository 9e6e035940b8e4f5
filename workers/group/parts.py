"""Which rows of a target are whose, where workers split them evenly: pure arithmetic.

Rows stand in gathered order: attention worker by attention worker. Part w of N has rows [w·P, (w+1)·P) with P = ⌈T/N⌉; the last
parts may have fewer, or none.
"""

from __future__ import annotations

from collections.abc import Sequence

from afore.transport.exchange import Part


def part_rows(tokens: int, size: int) -> int:
    """P: rows that each part has room for."""
    return -(-tokens // size)


def own_rows(tokens: int, rank: int, size: int) -> Part:
    """(first, count) of the rows of part ``rank``."""
    rows = part_rows(tokens, size)
    first = min(rank * rows, tokens)
    return first, min(rows, tokens - first)


def parts_within(tokens_A: Sequence[int], rows: Part) -> list[Part]:
    """(first, count) of each attention worker's own rows that lie within ``rows`` of the target."""
    first, count = rows
    found: list[Part] = []
    begin = 0
    for tokens in tokens_A:
        low, high = max(first, begin), min(first + count, begin + tokens)
        found.append((low - begin, high - low) if high > low else (0, 0))
        begin += tokens
    return found
