"""Bells: 4 bits of kind, 28 of value, nothing lost but the high bits of a sequence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afore.core.errors import WireError
from afore.transport import bells
from afore.transport.bells import BellKind, decode, encode

microbatches = st.integers(0, 4095)
ranks = st.integers(0, 65535)


@given(st.sampled_from(BellKind), st.integers(0, (1 << 28) - 1))
def test_every_value_of_every_kind_comes_back_in_32_bits(kind: BellKind, value: int) -> None:
    immediate = encode(kind, value)
    assert 0 < immediate < 1 << 32
    assert (decode(immediate).kind, decode(immediate).value) == (kind, value)


@given(microbatches, ranks)
def test_pairs_come_back(microbatch: int, rank: int) -> None:
    for kind, immediate in (
        (BellKind.INPUTS, bells.INPUTS(rank, microbatch)),
        (BellKind.DEMAND, bells.DEMAND(rank, microbatch)),
        (BellKind.PREDICTION, bells.PREDICTION(rank, microbatch)),
        (BellKind.REPLY, bells.REPLY(microbatch, rank)),
    ):
        bell = decode(immediate)
        assert (bell.kind, bell.microbatch, bell.rank) == (kind, microbatch, rank)
    assert decode(bells.FEEDBACK(rank)).rank == rank
    assert decode(bells.KV(rank)).value == rank


@given(st.integers(0, 1 << 60), st.integers(-(1 << 20), 1 << 20))
def test_a_sequence_is_found_from_its_low_bits_and_one_near_it(sequence: int, distance: int) -> None:
    near = max(0, sequence + distance)
    for immediate in (bells.PLAN(sequence), bells.VERDICTS(sequence), bells.PASSED(sequence)):
        assert decode(immediate).sequence(near) == sequence


@pytest.mark.parametrize("immediate", [0, 0x0FFFFFFF, 0xF0000000, 1 << 32, (1 << 32) + (1 << 28)])
def test_an_unknown_kind_is_refused(immediate: int) -> None:
    with pytest.raises(WireError, match="no bell"):
        decode(immediate)


def test_values_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="bell KV: value 268435456"):
        bells.KV(1 << 28)
    with pytest.raises(ValueError, match="bell KV: value -1"):
        bells.KV(-1)
    with pytest.raises(ValueError, match="bell INPUTS: microbatch 4096"):
        bells.INPUTS(0, 4096)
    with pytest.raises(ValueError, match="bell REPLY: microbatch 0 or rank 65536"):
        bells.REPLY(0, 65536)
    with pytest.raises(ValueError, match="bell FEEDBACK"):
        bells.FEEDBACK(-1)
