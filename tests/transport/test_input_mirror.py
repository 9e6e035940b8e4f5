"""The input mirror: rows packed on one node are read in place on another, and only once their notification has come."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afore.core.errors import WireError
from afore.core.target import Target
from afore.transport.exchange import ExchangeLayout, Inputs
from afore.transport.input_mirror import InputMirror, InputPacker, MirrorLayout, MirrorReader
from afore.transport.records import CACHE_LINE, MIRROR_HEADER

EPOCH = 2
EXCHANGE = ExchangeLayout(num_microbatches=2, num_ffn=3, max_tokens=5, hidden=7, top_k=3)
LAYOUT = MirrorLayout(3, EXCHANGE)
TARGET = Target(layer=1, microbatch=1, step=4)


def make_inputs(tokens: int, seed: int = 0) -> Inputs:
    generator = np.random.default_rng(seed)
    return (
        generator.standard_normal((tokens, EXCHANGE.hidden), dtype=np.float32),
        generator.integers(0, 99, (tokens, EXCHANGE.top_k), dtype=np.int32),
        generator.random((tokens, EXCHANGE.top_k), dtype=np.float32),
    )


def land(buffer: memoryview, attention: int, packed: memoryview, nbytes: int | None = None) -> None:
    """A one-sided write of the first ``nbytes`` has landed."""
    at = LAYOUT.write_offset(attention, TARGET.microbatch)
    part = packed[: packed.nbytes if nbytes is None else nbytes]
    buffer[at : at + part.nbytes] = part


def test_slots_tile_the_region_and_rows_are_aligned() -> None:
    end = 0
    for a in range(3):
        for m in range(2):
            assert LAYOUT.offset(a, m) == end
            assert end % CACHE_LINE == 0
            end += LAYOUT.slot_nbytes
            assert LAYOUT.write_offset(a, m) + LAYOUT.packed_nbytes(EXCHANGE.max_tokens) <= end
    assert end == LAYOUT.nbytes
    for tokens in range(EXCHANGE.max_tokens + 1):
        ids, weights, _ = LAYOUT.spans(tokens)
        assert ids % CACHE_LINE == weights % CACHE_LINE == 0


@given(st.integers(0, EXCHANGE.max_tokens), st.integers(0, 2), st.integers(0, 100))
def test_rows_are_read_once_the_lead_has_published_them(tokens: int, attention: int, seed: int) -> None:
    buffer = memoryview(bytearray(LAYOUT.nbytes))
    mirror = InputMirror(buffer, LAYOUT, EPOCH)
    readers = [MirrorReader(buffer.toreadonly(), LAYOUT, a, EPOCH) for a in range(3)]
    written = make_inputs(tokens, seed)
    land(buffer, attention, InputPacker(LAYOUT, EPOCH).pack(TARGET, *written))
    assert readers[attention].read(1, TARGET) is None
    assert readers[attention].holds(1) is None
    mirror.publish(attention, 1)
    seen = readers[attention].read(1, TARGET)
    assert seen is not None
    for mine, theirs in zip(seen, written, strict=True):
        np.testing.assert_array_equal(mine, theirs)
        assert not mine.flags.writeable
        assert mine.flags.aligned
        assert mine.flags.c_contiguous
    assert readers[attention].holds(1) == TARGET
    assert all(reader.read(1, TARGET) is None for a, reader in enumerate(readers) if a != attention)
    assert readers[attention].read(1, Target(2, 1, 4)) is None
    assert MirrorReader(buffer, LAYOUT, attention, EPOCH + 1).read(1, TARGET) is None


@given(st.integers(0, LAYOUT.packed_nbytes(3)))
def test_a_write_that_is_landing_does_not_disturb_what_is_published(landed: int) -> None:
    buffer = memoryview(bytearray(LAYOUT.nbytes))
    mirror, reader = InputMirror(buffer, LAYOUT, EPOCH), MirrorReader(buffer, LAYOUT, 0, EPOCH)
    packer = InputPacker(LAYOUT, EPOCH)
    land(buffer, 0, packer.pack(TARGET, *make_inputs(3)))
    mirror.publish(0, 1)
    following = Target(2, 1, 4)
    land(buffer, 0, packer.pack(following, *make_inputs(3, 1)), landed)
    assert reader.read(1, following) is None
    assert reader.holds(1) == TARGET


@given(st.data(), st.booleans(), st.integers(1, 300))
def test_a_late_notification_never_publishes_a_later_write_that_is_landing(
    data: st.DataObject, tail_first: bool, earlier: int
) -> None:
    """An aborted target's notification is looked at while the rows behind it land: from either end, up to any byte."""
    buffer = memoryview(bytearray(LAYOUT.nbytes))
    mirror, reader = InputMirror(buffer, LAYOUT, EPOCH), MirrorReader(buffer, LAYOUT, 0, EPOCH)
    packer = InputPacker(LAYOUT, EPOCH)
    for step in range(earlier):
        land(buffer, 0, packer.pack(Target(0, 1, step), *make_inputs(1)))
        mirror.publish(0, 1)
    aborted, following = Target(0, 1, earlier), Target(0, 1, earlier + 1)
    land(buffer, 0, packer.pack(aborted, *make_inputs(2, 1)))
    old = bytes(buffer)
    written = make_inputs(3, 2)
    packed = packer.pack(following, *written)
    land(buffer, 0, packed)
    cut = data.draw(st.integers(0, packed.nbytes) | st.integers(0, CACHE_LINE))
    at = LAYOUT.write_offset(0, 1)
    stale = slice(at, at + cut) if tail_first else slice(at + cut, at + packed.nbytes)
    buffer[stale] = old[stale]
    mirror.publish(0, 1)
    assert reader.read(1, following) is None
    assert reader.holds(1) in (Target(0, 1, earlier - 1), aborted)
    land(buffer, 0, packed)
    mirror.publish(0, 1)
    seen = reader.read(1, following)
    assert seen is not None
    for mine, theirs in zip(seen, written, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_headers_that_cannot_be_are_refused() -> None:
    buffer = memoryview(bytearray(LAYOUT.nbytes))
    mirror = InputMirror(buffer, LAYOUT, EPOCH)
    at = LAYOUT.write_offset(2, 1)
    MIRROR_HEADER.pack_into(buffer, at, 1, TARGET.word(), EPOCH, EXCHANGE.max_tokens + 1, 1)
    with pytest.raises(WireError, match=r"attention-2.*6 rows"):
        mirror.publish(2, 1)
    MIRROR_HEADER.pack_into(buffer, at, 2, TARGET.word(), EPOCH - 1, 1, 2)
    with pytest.raises(WireError, match="epoch 1"):
        mirror.publish(2, 1)
    assert MirrorReader(buffer, LAYOUT, 2, EPOCH).holds(1) is None
    for attention, microbatch in ((3, 0), (0, 2)):
        with pytest.raises(WireError, match="which nobody has"):
            mirror.publish(attention, microbatch)
    with pytest.raises(WireError, match="do not fit 5 rows"):
        InputPacker(LAYOUT, EPOCH).pack(TARGET, *make_inputs(6))
    for attach in (lambda b: InputMirror(b, LAYOUT, EPOCH), lambda b: MirrorReader(b, LAYOUT, 0, EPOCH)):
        with pytest.raises(WireError, match="the layout needs"):
            attach(buffer[:-8])
