"""Copies of what a socket has not taken: never two in one place, and memory that comes back."""

from __future__ import annotations

import mmap

from hypothesis import given
from hypothesis import strategies as st

from afore.transport.tcp_spill import SMALL_BYTES, Spill

sizes = st.sampled_from([0, 1, SMALL_BYTES, SMALL_BYTES + 1, 2 * SMALL_BYTES, 3 * SMALL_BYTES])


@given(steps=st.lists(st.one_of(sizes, st.none()), max_size=30))
def test_what_is_kept_stays_as_it_was_until_it_is_done(steps: list[int | None]) -> None:
    spill = Spill()
    kept: list[tuple[memoryview, int]] = []
    for number, nbytes in enumerate(steps):
        if nbytes is None:
            if kept:
                copied, _ = kept.pop(0)
                # A stream is done with the end of a piece, of which the kernel took the start before.
                spill.done(copied[len(copied) // 2 :])
        else:
            byte = number % 255 + 1
            kept.append((spill.copy(bytearray([byte]) * nbytes), byte))
            assert len(kept[-1][0]) == nbytes
        for copied, byte in kept:
            assert not len(copied) or copied[0] == copied[-1] == byte
            assert bytes(copied).count(byte) == len(copied)


def test_a_large_area_serves_again() -> None:
    spill = Spill()
    first = spill.copy(bytes(4 * SMALL_BYTES))
    area = first.obj
    assert isinstance(area, mmap.mmap)
    spill.done(first)
    assert spill.copy(bytes(3 * SMALL_BYTES)).obj is area
    assert spill.copy(bytes(3 * SMALL_BYTES)).obj is not area
