"""The writer's side of a verbs link: one-sided writes and reads of a peer's memory, in order, over one queue pair.

A write's payload travels inside its request where it fits, else from staging, so that the caller's data may be reused at once and a
write suspends only where there is no room, or to ask once for a key that the link has not seen. A request that was posted cannot be
taken back: nothing suspends after posting but ``read`` and ``close``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from afore.core.clock import deadline
from afore.core.errors import DeadlineExceeded, LinkClosed, PeerLost, TransportError, WireError
from afore.transport.api import Buffer, Lane, RegionKey
from afore.transport.buffers import flat, refuse_bounds, require_immediate
from afore.transport.queues import Turnstile
from afore.transport.verbs.binding import READ, RECEIVE, SIGNALED, WRITE, WRITE_WITH_IMMEDIATE, Completion, OpenDevice
from afore.transport.verbs.config import VerbsConfig
from afore.transport.verbs.connection import Connection
from afore.transport.verbs.credits import WriterCredit
from afore.transport.verbs.memory import LocalMemory, address_of
from afore.transport.verbs.reading import Reading, settle
from afore.transport.verbs.requests import Requests
from afore.transport.verbs.status import link_error
from afore.transport.verbs.targets import Target, Targets
from afore.transport.verbs.wire import ANNOUNCEMENT, EndpointRecord, Frame, FrameKind


class VerbsLink:
    """A ``Link`` over a queue pair; made by ``VerbsFabric.connect``."""

    def __init__(
        self,
        device: OpenDevice,
        config: VerbsConfig,
        *,
        peer: str,
        lane: Lane,
        credits: int,
        small: LocalMemory,
        local_key: Callable[[int, int], int | None],
        forget: Callable[[VerbsLink], None],
    ) -> None:
        """``small`` (of ``small_bytes``, its first bytes posted as receives) is the link's from now on; ``attach`` follows.

        ``local_key`` finds the key of registered memory of this endpoint by address and length.
        """
        self._device = device
        self._config = config
        self._peer = peer
        self._lane = lane
        self._credit = WriterCredit(credits)
        self._local_key = local_key
        self._forget = forget
        self._requests = Requests(device, config, small, peer=peer, lose=self._lose)
        self._queue = self._requests.queue
        self._current = 0
        """The region that the owner counts immediates to."""
        self._turnstile = Turnstile()
        self._ending: Callable[[], TransportError] | None = None
        self._closed = False
        self._idle: asyncio.Future[None] | None = None
        self._connection: Connection
        self._targets: Targets
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once the owner's queue pair is connected too."""
        self.mtu_reason = ""
        """The MTU that both sides agreed on, and why, in words."""

    def attach(self, connection: Connection) -> None:
        """Begins to wait for the owner's queue pair."""
        self._connection = connection
        self._targets = Targets(self._peer, connection.send)
        self._requests.attach(connection.pair)
        connection.start()

    @property
    def peer(self) -> str:
        return self._peer

    @property
    def lane(self) -> Lane:
        return self._lane

    # Writes

    async def write(
        self, remote: RegionKey, offset: int, data: Buffer, *, notify: int | None = None, timeout_us: float
    ) -> None:
        if self._ending is not None:
            raise self._ending()
        target = self._targets.known.get(remote.region)
        if target is None or target.key is not remote:
            target = self._targets.find(remote)
        if type(data) is not bytes:
            data = flat(data, self._peer)
        nbytes = len(data)
        if offset < 0 or offset + nbytes > remote.nbytes:
            raise refuse_bounds(remote, offset, nbytes)
        if notify is not None and notify >> 32:
            require_immediate(notify, self._peer)
        if self._turnstile or not target.granted or not self._has_room(nbytes, notify is not None):
            await self._wait_turn(target, nbytes, notify is not None, timeout_us)
        # From here on nothing suspends: bytes and notification go together or not at all.
        requests, region = self._requests, remote.region
        address, lkey, flags = requests.place(data, nbytes)
        opcode = WRITE if notify is None or region != self._current else WRITE_WITH_IMMEDIATE
        if nbytes or opcode == WRITE_WITH_IMMEDIATE:
            requests.post(
                opcode, flags, address, nbytes, lkey, region, target.address + offset, target.rkey, notify or 0
            )
        if notify is not None:
            self._credit.spend()
            if opcode == WRITE:
                # The owner counts immediates to the region of the last notice.
                requests.notice(region, notify)
                self._current = region

    # Room

    def _has_room(self, nbytes: int, needs_credit: bool) -> bool:
        requests, credit = self._requests, self._credit
        if requests.has_room(nbytes) and (credit.free or not needs_credit):
            return True
        # What has completed already need not wait for the event loop.
        self._connection.drain()
        if self._ending is not None:
            raise self._ending()
        return requests.has_room(nbytes) and (credit.free > 0 or not needs_credit)

    async def _wait_turn(self, target: Target, nbytes: int, needs_credit: bool, timeout_us: float) -> None:
        def may_go() -> bool:
            if self._ending is not None:
                raise self._ending()
            if target.error is not None:
                raise target.error()
            if not target.granted:
                return False
            if self._has_room(nbytes, needs_credit):
                return True
            self._ask_for_room(needs_credit)
            return False

        if not target.granted:
            lacking, hint = "its owner has not granted the key", "it does not answer"
        elif needs_credit:
            lacking, hint = "no credit for a notification", "its owner does not take its notifications"
        else:
            lacking, hint = "no room to send", "it does not answer"
        where = f"write to region {target.key.region} on lane {self._lane.name.lower()}"
        await self._turnstile.enter(may_go, timeout_us, peer=self._peer, what=f"{where}: {lacking}", hint=hint)

    def _ask_for_room(self, needs_credit: bool) -> None:
        """Sees to it that something will come that wakes the line."""
        if not self._queue.has_reserve():
            return  # signaled requests are under way: their completions do
        if needs_credit and self._credit.announce():
            self._requests.notice(ANNOUNCEMENT, 0, signaled=True)
        self._requests.flush()

    # What the owner says

    def on_message(self, message: Frame | EndpointRecord) -> None:
        """As ``Side``: the owner's answers, and what it revokes."""
        if not isinstance(message, Frame):
            raise WireError(self._peer, "it sent a second queue pair over a link")
        if message.kind is FrameKind.READY and not self.ready.done():
            self.ready.set_result(None)
        else:
            self._targets.hear(message, self._queue.posted)
            self._let_go()
        self._turnstile.poke()

    def _let_go(self) -> None:
        if self._targets.let_go(self._queue.done):
            self._requests.flush()

    # Completions

    def on_completions(self, batch: list[Completion]) -> None:
        """As ``Side``: the link's own requests, and the owner's credit."""
        queue = self._queue
        for number, _, _, immediate in batch:
            if number >= RECEIVE:
                self._credit.given(immediate, self._peer)
                self._connection.pair.post_receive(number - RECEIVE)
            else:
                settle(queue.completed(number))
        self._let_go()

    def on_drained(self) -> None:
        """As ``Side``."""
        self._turnstile.poke()
        if self._idle is not None and not self._idle.done():
            if self._requests.all_done:
                self._idle.set_result(None)
            else:
                self._requests.flush()

    def on_failure(self, number: int, status: int) -> None:
        """As ``Side``: nothing more goes over this queue pair."""
        if number >= RECEIVE:
            operation, region = "a receive of credit", 0
        else:
            operation, region = self._requests.describe(number)
        gone = region != 0 and region not in self._targets.known
        self._lose(link_error(self._peer, operation, status, revoked=gone, patience=self._config.patience))

    def on_end(self, error: TransportError | None, reason: str) -> None:
        """As ``Side``: the owner is gone, or misbehaves."""
        self._lose(error or PeerLost(self._peer, reason, "wait for the next epoch and connect again"))

    # Reads

    async def read(self, remote: RegionKey, offset: int, into: object, *, timeout_us: float) -> None:
        """Reads ``into`` (a writable buffer, or a tensor of this machine's memory) from the peer's region, one-sided.

        Straight into memory that this endpoint has registered or adopted, else through memory of its own. It takes its turn
        behind the writes. Where it raises, or is cancelled, after it was sent, ``into`` may still change until the link is closed.
        Raises as ``write`` does.
        """
        if self._ending is not None:
            raise self._ending()
        target = self._targets.find(remote)
        address, view = address_of(into)
        nbytes = view.nbytes
        if offset < 0 or offset + nbytes > remote.nbytes:
            raise refuse_bounds(remote, offset, nbytes)
        operation = f"read of region {remote.region}"
        async with deadline(timeout_us, peer=self._peer, operation=operation, hint="it does not answer"):
            await self._wait_turn(target, 0, False, timeout_us)
            if not nbytes:
                return
            lkey, own = self._local_key(address, nbytes), None
            if lkey is None:
                own = LocalMemory(self._device, nbytes, operation)
                address, lkey = own.address, own.lkey
            reading = Reading(view, own)
            self._queue.hold(reading)
            self._requests.post(
                READ, SIGNALED, address, nbytes, lkey, remote.region, target.address + offset, target.rkey
            )
            await reading.done

    # The end

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._ending = self._closed_error
            self._turnstile.poke()
            try:
                await self._arrived(self._config.linger_us)
            finally:
                self.shut()

    async def flush(self, *, timeout_us: float) -> None:
        """Returns once everything that was written has arrived. Raises ``DeadlineExceeded``, and what ended the link."""
        if self._ending is None and not await self._arrived(timeout_us):
            raise DeadlineExceeded(self._peer, "what was written does not arrive", "it does not answer")
        if self._ending is not None:
            raise self._ending()

    async def _arrived(self, timeout_us: float) -> bool:
        """Whether every request has completed within ``timeout_us``; the end of the queue pair counts as that."""
        if self._connection.usable and not self._requests.all_done:
            self._requests.flush()
            self._connection.drain()
        if not self._connection.usable or self._requests.all_done:
            return True
        if self._idle is None or self._idle.done():
            self._idle = asyncio.get_running_loop().create_future()
        await asyncio.wait([self._idle], timeout=timeout_us * 1e-6)
        return self._idle.done()

    def shut(self) -> None:
        """Closes without waiting. Idempotent."""
        self._closed = True
        self._ending = self._closed_error
        self._lose(self._closed_error())
        self._forget(self)

    def _closed_error(self) -> LinkClosed:
        return LinkClosed(self._peer, "the link was closed on this side", "connect again")

    def _lose(self, error: TransportError) -> None:
        """Ends the link: queue pair and memory go, who waits gets the error. The first error stands."""
        if self._ending is None:
            self._ending = lambda: type(error)(error.peer, error.operation, error.hint)
        self._connection.close()
        settle(self._requests.close(), self._ending)
        self._turnstile.poke()
        if not self.ready.done():
            self.ready.set_exception(self._ending())
            self.ready.exception()  # nobody may be there any more to see it
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)
