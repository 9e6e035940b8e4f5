"""Which KV blocks of an attention worker belong to which request, as a pure state machine: no I/O, no clock.

A request's blocks are *filling* from their reservation until prefill's notification has come, then *ready*, and grow with the rows
of its steps. Which request gets how many is the engine's business: it counts the free blocks, and this pool picks their numbers, so
a block that is not free is a mistake of the engine's. Two things keep the blocks of a released request out of use, because somebody
may still write into them; the engine marks such a release as late, and hears of its end:

- quarantine: prefill has the work and its notification has not come (it always comes, also from a prefill that was cancelled);
- pins: a step that has a row of the request is still running, and writes the row's keys and values layer by layer.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from afore.core.control import Sampling
from afore.core.errors import WireError
from afore.models.kv import BlockAllocator
from afore.workers.choosing import Chooser

I32 = npt.NDArray[np.int32]


class KvState(enum.Enum):
    """Where a request's cache is."""

    FILLING = "filling"
    READY = "ready"


@dataclass(slots=True)
class _Holding:
    request: int
    blocks: list[int]
    chooser: Chooser
    lane: int
    """Row of the block table."""
    state: KvState = KvState.FILLING
    pins: int = 0
    released: bool = False
    late: bool = False
    """Released so that the engine must be told when the blocks are free."""
    awaits_prefill: bool = False
    """Released while prefill may still write."""

    @property
    def in_use(self) -> bool:
        return self.pins > 0 or (self.awaits_prefill and self.state is KvState.FILLING)


class KvPool:
    """Requests, their blocks, and a table [lanes, blocks of a request] from which a step's block rows are gathered at once."""

    def __init__(self, allocator: BlockAllocator, *, block_tokens: int) -> None:
        self._allocator = allocator
        self.block_tokens = block_tokens
        self._holdings: dict[int, _Holding] = {}
        self._by_bell: dict[int, _Holding] = {}
        """Holdings whose notification is still to come, by ``bell``."""
        self._table_XB = np.zeros((8, 8), dtype=np.int32)
        self._free_lanes = list(range(7, -1, -1))
        self._freed: list[int] = []

    @property
    def num_free(self) -> int:
        """Blocks that nobody has."""
        return self._allocator.num_free

    @property
    def requests(self) -> tuple[int, ...]:
        """Requests whose blocks are out of use for others, released ones included."""
        return tuple(self._holdings)

    def state(self, request: int) -> KvState:
        """Raises ``KeyError`` for a request that holds nothing."""
        return self._holdings[request].state

    def blocks(self, request: int) -> tuple[int, ...]:
        """Its blocks, in order. Raises ``KeyError`` for a request that holds nothing."""
        return tuple(self._holdings[request].blocks)

    def choosers(self, requests: Sequence[int]) -> list[Chooser]:
        """How the requests' tokens are chosen."""
        return [self._holdings[request].chooser for request in requests]

    def reserve(self, request: int, tokens: int, sampling: Sampling, seen: Sequence[int] = ()) -> tuple[int, ...]:
        """Blocks for ``tokens`` tokens. Raises ``WireError`` for one that has some, and when so many are not free."""
        if request in self._holdings:
            raise WireError("hub", f"reserved blocks twice for request {request}")
        if tokens < 1:
            raise WireError("hub", f"reserved blocks for {tokens} tokens of request {request}")
        count = -(-tokens // self.block_tokens)
        blocks = self._take_blocks(request, count)
        self._widen(count)
        holding = _Holding(request, list(blocks), Chooser(sampling, seen), self._take_lane())
        self._table_XB[holding.lane, :count] = blocks
        self._holdings[request] = holding
        self._by_bell[bell(blocks)] = holding
        return blocks

    def arrived(self, bell_number: int) -> int | None:
        """Prefill's last write for these blocks is visible: the request that is ready now, if anyone still wants it."""
        holding = self._by_bell.pop(bell_number, None)
        if holding is None:
            return None
        holding.state = KvState.READY
        if not holding.released:
            return holding.request
        self._free_if_unused(holding)
        return None

    def release(self, request: int, *, quarantine: bool, late: bool = False) -> None:
        """The request has gone. Raises ``WireError`` when it holds nothing, or blocks in use without being ``late``."""
        holding = self._holdings.get(request)
        if holding is None:
            raise WireError("hub", f"released request {request}, which has no cache here")
        if holding.released:
            raise WireError("hub", f"released request {request} twice")
        holding.released = True
        holding.late = late
        holding.awaits_prefill = quarantine
        if holding.in_use and not late:
            raise WireError("hub", f"released request {request} as if nobody could write into its blocks")
        self._allocator.quarantine(holding.blocks)
        self._free_if_unused(holding)

    def take_freed(self) -> list[int]:
        """Late releases whose blocks have come free since the last call."""
        freed, self._freed = self._freed, []
        return freed

    def pin(self, requests: Sequence[int], positions: Sequence[int]) -> None:
        """A step begins that writes these positions of these requests; a position behind a request's last block takes another one.

        Raises ``WireError`` unless all of them are ready, no position is further away than that, and blocks are free.
        """
        pinned: list[_Holding] = []
        growing: list[_Holding] = []
        for request, position in zip(requests, positions, strict=True):
            holding = self._holdings.get(request)
            if holding is None or holding.released or holding.state is not KvState.READY:
                raise WireError("hub", f"sent a step with request {request}, which has no cache here")
            block, held = position // self.block_tokens, len(holding.blocks)
            if not 0 <= block < held:
                if block != held:
                    raise WireError(
                        "hub", f"sent a step with position {position} of request {request}, far from its others"
                    )
                growing.append(holding)
            pinned.append(holding)
        for holding in growing:
            self._grow(holding)
        for holding in pinned:
            holding.pins += 1

    def unpin(self, requests: Iterable[int]) -> None:
        """The step that pinned them has ended."""
        for request in requests:
            holding = self._holdings[request]
            holding.pins -= 1
            if holding.released:
                self._free_if_unused(holding)

    def block_rows(self, requests: Sequence[int], num_blocks: int) -> I32:
        """Block numbers int32 [T, num_blocks], in the order of ``requests``; 0 behind a request's last block."""
        lanes_T = [self._holdings[request].lane for request in requests]
        return self._table_XB[lanes_T, :num_blocks]

    def _free_if_unused(self, holding: _Holding) -> None:
        assert holding.released
        if holding.in_use:
            return
        del self._holdings[holding.request]
        self._by_bell.pop(bell(holding.blocks), None)
        self._table_XB[holding.lane] = 0
        self._free_lanes.append(holding.lane)
        self._allocator.release(holding.blocks)
        if holding.late:
            self._freed.append(holding.request)

    def _take_blocks(self, request: int, count: int) -> tuple[int, ...]:
        if count > self._allocator.num_free:
            raise WireError("hub", f"gave request {request} {count} blocks where {self._allocator.num_free} are free")
        return self._allocator.allocate(count)

    def _grow(self, holding: _Holding) -> None:
        (block,) = self._take_blocks(holding.request, 1)
        self._widen(len(holding.blocks) + 1)
        self._table_XB[holding.lane, len(holding.blocks)] = block
        holding.blocks.append(block)

    def _take_lane(self) -> int:
        lanes, width = self._table_XB.shape
        if not self._free_lanes:
            self._resize(2 * lanes, width)
            self._free_lanes.extend(range(2 * lanes - 1, lanes - 1, -1))
        return self._free_lanes.pop()

    def _widen(self, num_blocks: int) -> None:
        lanes, width = self._table_XB.shape
        if num_blocks > width:
            self._resize(lanes, 2 * num_blocks)

    def _resize(self, lanes: int, width: int) -> None:
        table_XB = np.zeros((lanes, width), dtype=np.int32)
        table_XB[: self._table_XB.shape[0], : self._table_XB.shape[1]] = self._table_XB
        self._table_XB = table_XB


def bell(blocks: Sequence[int]) -> int:
    """The number that prefill's notification carries: the first block, which is nobody else's until the notification has come."""
    return blocks[0]
