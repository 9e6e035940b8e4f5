"""Reads of a tcp link: requests go out as frames, answers come back in their order among the owner's news.

An owner keeps what its peer does not take, so a read goes out in pieces of ``READ_LIMIT``, one under way at a time. A reader that
is cancelled leaves its request behind: the answer is received and dropped, and the link stays usable.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from afore.core.errors import TransportError, WireError
from afore.transport.records import READ_LIMIT


class _Request:
    """One piece under way."""

    __slots__ = ("done", "into", "nbytes", "number")

    def __init__(self, number: int, into: memoryview) -> None:
        self.number = number
        self.nbytes = len(into)
        self.into: memoryview | None = into
        self.done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()


class Reads:
    """The requests of one link. ``ask(offset, nbytes, number)`` sends one; ``check`` raises what the link has ended with."""

    def __init__(self, peer: str, check: Callable[[], None]) -> None:
        self._peer = peer
        self._check = check
        self._asked: deque[_Request] = deque()
        self._next = 0
        self._turn = asyncio.Lock()

    async def read(
        self, offset: int, into: memoryview, ask: Callable[[int, int, int], None], revoked: Callable[[], TransportError]
    ) -> None:
        """Fills ``into``. The caller bounds it by a deadline."""
        async with self._turn:
            for begin in range(0, len(into), READ_LIMIT):
                self._check()
                piece = into[begin : begin + READ_LIMIT]
                request = _Request(self._next, piece)
                self._next = (self._next + 1) & 0xFFFFFFFF
                ask(offset + begin, len(piece), request.number)
                self._asked.append(request)
                try:
                    there = await request.done
                finally:
                    request.into = None
                self._check()
                if not there:
                    raise revoked()

    # What the owner tells

    def answered(self, number: int) -> memoryview | None:
        """As ``Told.answered``."""
        return self._oldest(number).into

    def wanted(self) -> int:
        """As ``Told.wanted``."""
        return self._asked[0].nbytes

    def filled(self) -> None:
        """As ``Told.filled``."""
        self._settle(self._asked.popleft(), there=True)

    def unread(self, number: int) -> None:
        """As ``Told.unread``."""
        self._oldest(number)
        self._settle(self._asked.popleft(), there=False)

    def ended(self) -> None:
        """The link has ended: whoever waits looks at how."""
        while self._asked:
            self._settle(self._asked.popleft(), there=False)

    def _oldest(self, number: int) -> _Request:
        if not self._asked or self._asked[0].number != number:
            raise WireError(self._peer, f"it answers request {number}, which is not the oldest")
        return self._asked[0]

    @staticmethod
    def _settle(request: _Request, *, there: bool) -> None:
        if not request.done.done():
            request.done.set_result(there)
