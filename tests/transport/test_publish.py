"""Publication words: the same behaviour by plain stores and by compiled atomics."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afore.transport import publish
from afore.transport.publish import Words, full_fence, load_acquire, publishing_words, store_release


def compiled(buffer: memoryview) -> Words:
    from afore.transport.publish_atomic import AtomicWords

    return AtomicWords(buffer)


MAKERS = [publishing_words, pytest.param(compiled, marks=pytest.mark.slow)]


def page() -> memoryview:
    return memoryview(mmap.mmap(-1, mmap.PAGESIZE))


@pytest.mark.parametrize("make", MAKERS)
def test_words_alias_the_bytes(make: Callable[[memoryview], Words]) -> None:
    buffer = page()
    words = make(buffer)
    assert len(words) == mmap.PAGESIZE // 8
    for value in (0, 1, 2**63, 2**64 - 1):
        words[3] = value
        assert words[3] == value
        assert int.from_bytes(buffer[24:32], "little") == value
    assert bytes(buffer[:24]) == bytes(24)
    assert bytes(buffer[32:]) == bytes(mmap.PAGESIZE - 32)


@pytest.mark.parametrize("make", MAKERS)
def test_words_refuse_what_is_not_theirs(make: Callable[[memoryview], Words]) -> None:
    words = make(page())
    with pytest.raises(ValueError, match=r".+"):
        words[0] = 2**64
    with pytest.raises(IndexError):
        words[mmap.PAGESIZE // 8] = 1
    with pytest.raises(TypeError):
        make(page().toreadonly())[0] = 1
    words.release()
    with pytest.raises(ValueError, match="released"):
        words[0]


def test_a_mapping_can_be_closed_once_its_words_are_released() -> None:
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    view = memoryview(memory)
    words = publishing_words(view)
    words[0] = 7
    words.release()
    view.release()
    memory.close()


def test_words_want_whole_words() -> None:
    with pytest.raises(ValueError, match="multiple of 8"):
        publishing_words(page()[:12])


@given(offset=st.integers(-16, 80), value=st.integers(0, 2**64 - 1))
def test_store_and_load_by_offset(offset: int, value: int) -> None:
    buffer = page()[:64]
    if offset % 8 == 0 and 0 <= offset <= 56:
        store_release(buffer, offset, value)
        full_fence()
        assert load_acquire(buffer, offset) == value
        expected = bytearray(64)
        expected[offset : offset + 8] = value.to_bytes(8, "little")
        assert bytes(buffer) == expected
    else:
        with pytest.raises(ValueError, match="offset"):
            store_release(buffer, offset, value)
        with pytest.raises(ValueError, match="offset"):
            load_acquire(buffer, offset)


@pytest.mark.slow
def test_machines_that_reorder_take_the_compiled_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "TOTAL_STORE_ORDER", False)
    buffer = page()
    words = publishing_words(buffer)
    assert type(words).__name__ == "AtomicWords"
    words[1] = 5
    full_fence()
    store_release(buffer, 16, 9)
    assert (load_acquire(buffer, 8), words[2]) == (5, 9)
