"""The KV pool: no block is ever in two hands, and what somebody may still write is never given out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from afore.core.control import Sampling
from afore.core.errors import WireError
from afore.models.kv import BlockAllocator
from afore.workers.kv_pool import KvPool, KvState, bell

GREEDY = Sampling()
NUM_BLOCKS, BLOCK_TOKENS = 12, 4


def make_pool(num_blocks: int = NUM_BLOCKS) -> KvPool:
    return KvPool(BlockAllocator(num_blocks), block_tokens=BLOCK_TOKENS)


def test_a_request_lives_from_reservation_to_release() -> None:
    pool = make_pool()
    blocks = pool.reserve(7, 9, GREEDY)
    assert len(blocks) == 3
    assert pool.state(7) is KvState.FILLING
    assert pool.arrived(bell(blocks)) == 7
    assert pool.state(7) is KvState.READY
    pool.release(7, quarantine=False)
    assert pool.num_free == NUM_BLOCKS


def test_more_than_is_free_is_refused_and_takes_nothing() -> None:
    pool = make_pool()
    with pytest.raises(WireError, match=f"13 blocks where {NUM_BLOCKS} are free"):
        pool.reserve(1, NUM_BLOCKS * BLOCK_TOKENS + 1, GREEDY)
    assert pool.num_free == NUM_BLOCKS
    assert pool.requests == ()


def test_a_row_behind_the_last_block_takes_another_one() -> None:
    pool = make_pool()
    blocks = pool.reserve(1, 2 * BLOCK_TOKENS, GREEDY)
    pool.arrived(bell(blocks))
    for position in range(2 * BLOCK_TOKENS - 1, 3 * BLOCK_TOKENS + 1):
        pool.pin([1], [position])
        pool.unpin([1])
    assert pool.num_free == NUM_BLOCKS - 4
    rows_TB = pool.block_rows([1], 4)
    assert tuple(rows_TB[0, :2]) == blocks
    assert len(set(rows_TB[0])) == 4
    with pytest.raises(WireError, match="position 20 of request 1"):
        pool.pin([1], [5 * BLOCK_TOKENS])
    pool.reserve(2, 8 * BLOCK_TOKENS, GREEDY)
    with pytest.raises(WireError, match="request 1 1 blocks where 0 are free"):
        pool.pin([1], [4 * BLOCK_TOKENS])


def test_only_late_releases_are_told_and_only_once_the_blocks_are_free() -> None:
    pool = make_pool()
    at_once, quarantined, pinned = (pool.reserve(request, 8, GREEDY) for request in range(3))
    pool.arrived(bell(at_once))
    pool.arrived(bell(pinned))
    pool.release(0, quarantine=False)
    pool.pin([2], [7])
    pool.release(1, quarantine=True, late=True)
    pool.release(2, quarantine=False, late=True)
    assert pool.take_freed() == []
    pool.arrived(bell(quarantined))
    assert pool.take_freed() == [1]
    pool.unpin([2])
    assert pool.take_freed() == [2]
    assert pool.take_freed() == []


@pytest.mark.parametrize("why", ["prefill", "step"])
def test_a_release_that_ignores_a_writer_is_refused(why: str) -> None:
    pool = make_pool()
    blocks = pool.reserve(1, 8, GREEDY)
    if why == "step":
        pool.arrived(bell(blocks))
        pool.pin([1], [7])
    with pytest.raises(WireError, match="as if nobody could write"):
        pool.release(1, quarantine=why == "prefill")


def test_quarantined_blocks_come_back_with_the_notification_and_nobody_joins() -> None:
    pool = make_pool()
    blocks = pool.reserve(1, 8, GREEDY)
    pool.release(1, quarantine=True, late=True)
    assert pool.num_free == NUM_BLOCKS - 2
    assert not set(pool.reserve(2, 8, GREEDY)) & set(blocks)
    assert pool.arrived(bell(blocks)) is None
    assert pool.num_free == NUM_BLOCKS - 2


def test_blocks_of_a_released_request_outlast_the_step_that_writes_them() -> None:
    pool = make_pool()
    pool.arrived(bell(pool.reserve(1, 8, GREEDY)))
    pool.pin([1], [7])
    pool.release(1, quarantine=False, late=True)
    assert pool.num_free == NUM_BLOCKS - 2
    pool.unpin([1])
    assert pool.num_free == NUM_BLOCKS


@pytest.mark.parametrize("prepare", ["unknown", "filling", "released"])
def test_a_step_of_a_request_without_cache_is_refused(prepare: str) -> None:
    pool = make_pool()
    pool.arrived(bell(pool.reserve(1, 4, GREEDY)))
    if prepare == "filling":
        pool.reserve(2, 4, GREEDY)
    if prepare == "released":
        pool.arrived(bell(pool.reserve(2, 4, GREEDY)))
        pool.release(2, quarantine=False)
    with pytest.raises(WireError, match="request 2"):
        pool.pin([1, 2], [3, 3])
    pool.release(1, quarantine=False)
    assert 1 not in pool.requests, "the refused step left a pin"


def test_reserving_or_releasing_twice_is_refused() -> None:
    pool = make_pool()
    blocks = pool.reserve(1, 4, GREEDY)
    with pytest.raises(WireError, match="twice for request 1"):
        pool.reserve(1, 4, GREEDY)
    pool.release(1, quarantine=True, late=True)
    with pytest.raises(WireError, match="released request 1 twice"):
        pool.release(1, quarantine=False)
    with pytest.raises(WireError, match="request 2, which has no cache"):
        pool.release(2, quarantine=False)
    pool.arrived(bell(blocks))
    assert pool.num_free == NUM_BLOCKS


def test_block_rows_follow_the_order_asked_for_while_the_table_grows() -> None:
    pool = make_pool(400)
    blocks = {request: pool.reserve(request, BLOCK_TOKENS * (1 + request), GREEDY) for request in range(20)}
    rows_TB = pool.block_rows([19, 0, 9, 19], 10)
    assert rows_TB.dtype == np.int32
    for row_B, request in zip(rows_TB, [19, 0, 9, 19], strict=True):
        kept = blocks[request][:10]
        assert tuple(row_B[: len(kept)]) == kept


class Pool(RuleBasedStateMachine):
    """Against a model that knows who may still write where."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool()
        self.next_request = 0
        self.tokens: dict[int, int] = {}
        """Positions that a request has used, for good; its blocks hold them."""
        self.bells: dict[int, int] = {}
        self.live: set[int] = set()
        self.prefill_owes: set[int] = set()
        self.steps: list[list[int]] = []
        self.late: set[int] = set()

    def holders(self) -> set[int]:
        return self.live | self.prefill_owes | {r for step in self.steps for r in step}

    def blocks(self, request: int) -> list[int]:
        count = -(-self.tokens[request] // BLOCK_TOKENS)
        return list(self.pool.block_rows([request], count)[0].tolist())

    def free(self) -> int:
        return NUM_BLOCKS - sum(-(-self.tokens[r] // BLOCK_TOKENS) for r in self.holders())

    def check_freed(self) -> None:
        """What is told is what came free."""
        told = {r for r in self.late if r not in self.holders()}
        assert set(self.pool.take_freed()) == told
        self.late -= told

    @rule(tokens=st.integers(1, 20))
    def reserve(self, tokens: int) -> None:
        if -(-tokens // BLOCK_TOKENS) > self.free():
            return
        request, self.next_request = self.next_request, self.next_request + 1
        self.bells[request] = bell(self.pool.reserve(request, tokens, GREEDY))
        self.tokens[request] = tokens
        self.live.add(request)
        self.prefill_owes.add(request)

    @precondition(lambda self: self.prefill_owes)
    @rule(data=st.data())
    def prefill_is_done(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.prefill_owes)))
        self.prefill_owes.discard(request)
        ready = self.pool.arrived(self.bells[request])
        assert ready == (request if request in self.live else None)
        self.check_freed()

    @precondition(lambda self: self.live)
    @rule(data=st.data(), in_doubt=st.booleans())
    def release(self, data: st.DataObject, in_doubt: bool) -> None:
        request = data.draw(st.sampled_from(sorted(self.live)))
        self.live.discard(request)
        late = in_doubt or request in self.holders()
        if late:
            self.late.add(request)
        self.pool.release(request, quarantine=request in self.prefill_owes, late=late)
        self.check_freed()

    @precondition(lambda self: self.live - self.prefill_owes)
    @rule(data=st.data())
    def step_begins(self, data: st.DataObject) -> None:
        requests = data.draw(st.lists(st.sampled_from(sorted(self.live - self.prefill_owes)), min_size=1, unique=True))
        growing = [r for r in requests if self.tokens[r] % BLOCK_TOKENS == 0]
        if len(growing) > self.free():
            return
        before = {r: self.blocks(r) for r in requests}
        self.pool.pin(requests, [self.tokens[r] for r in requests])
        self.steps.append(requests)
        for request in requests:
            self.tokens[request] += 1
            blocks = self.blocks(request)
            assert blocks[: len(before[request])] == before[request]

    @precondition(lambda self: self.steps)
    @rule(data=st.data())
    def step_ends(self, data: st.DataObject) -> None:
        self.pool.unpin(self.steps.pop(data.draw(st.integers(0, len(self.steps) - 1))))
        self.check_freed()

    @invariant()
    def every_block_is_in_one_hand(self) -> None:
        holders = self.holders()
        held = [block for request in holders for block in self.blocks(request)]
        assert len(held) == len(set(held))
        assert set(self.pool.requests) == holders
        assert self.pool.num_free == NUM_BLOCKS - len(held)


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPool.pytestmark = [pytest.mark.slow]  # type: ignore[attr-defined]  # pytest reads it off the class
