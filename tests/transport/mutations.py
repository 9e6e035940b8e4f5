"""Bytes changed a little, by a seeded generator."""

from __future__ import annotations

import random

INTERESTING = (
    0,
    1,
    0x7F,
    0x80,
    0xFF,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
)


def mutate(chance: random.Random, raw: bytes) -> bytes:
    """``raw`` changed a little: bits, bytes, words, pieces cut out, doubled or put in; or all of it random."""
    data = bytearray(raw)
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        kind = chance.randrange(7)
        at = chance.randrange(len(data)) if data else 0
        if not data or kind == 0:
            data[at:at] = chance.randbytes(chance.randrange(1, 20))
        elif kind == 1:
            data[at] ^= 1 << chance.randrange(8)
        elif kind == 2:
            data[at] = chance.randrange(256)
        elif kind == 3:
            size = chance.choice((1, 2, 4, 8))
            value = chance.choice(INTERESTING) & ((1 << 8 * size) - 1)
            data[at : at + size] = value.to_bytes(size, chance.choice(("little", "big")))
        elif kind == 4:
            del data[at : at + chance.randrange(1, 20)]
        elif kind == 5:
            data[at:at] = data[at : at + chance.randrange(1, 40)]
        else:
            end = min(len(data), at + chance.randrange(1, 40))
            data[at:end] = chance.randbytes(end - at)
    return bytes(data)


def mutate_in_place(chance: random.Random, memory: memoryview) -> None:
    """As ``mutate``, in memory of a fixed size: where a region lies, nothing moves."""
    for _ in range(chance.choice((1, 1, 2, 5))):
        at = chance.randrange(len(memory))
        kind = chance.randrange(4)
        if kind == 0:
            memory[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            raw = (chance.choice(INTERESTING)).to_bytes(8, "little")[: len(memory) - at]
            memory[at : at + len(raw)] = raw
        elif kind == 2:
            size = min(chance.randrange(1, 64), len(memory) - at)
            memory[at : at + size] = chance.randbytes(size)
        else:
            size = min(chance.randrange(1, 64), len(memory) - at)
            memory[at : at + size] = bytes(size)
