"""The writer's side of a verbs link: one-sided writes and reads of a peer's memory, in order, over one queue pair.

A write's payload travels inside its request where it fits, else from staging, so that the caller's data may be reused at once and a
write suspends only where there is no room, or to ask once for a key that the link has not seen. A request that was posted cannot be
taken back: nothing suspends after posting but ``read`` and ``close``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from afore.core.clock import deadline
from afore.core.errors import DeadlineExceeded, LinkClosed, PeerLost, TransportError, WireError
from afore.transport.api import Buffer, Lane, RegionKey
from afore.transport.buffers import flat, refuse_bounds, refuse_foreign, require_immediate, revoked
from afore.transport.queues import Turnstile
from afore.transport.verbs.binding import (
    INLINE,
    READ,
    RECEIVE,
    SEND,
    SIGNALED,
    WRITE,
    WRITE_WITH_IMMEDIATE,
    Completion,
    OpenDevice,
)
from afore.transport.verbs.config import VerbsConfig
from afore.transport.verbs.connection import Connection
from afore.transport.verbs.credits import MESSAGES_IN_FLIGHT, WriterCredit
from afore.transport.verbs.memory import LocalMemory, address_of
from afore.transport.verbs.sending import RESERVE, SendQueue
from afore.transport.verbs.status import link_error
from afore.transport.verbs.wire import ANNOUNCEMENT, NOTICE, EndpointRecord, Frame, FrameKind, read_token

NOTICE_BYTES = NOTICE.size
OPERATIONS = {WRITE: "RDMA WRITE", WRITE_WITH_IMMEDIATE: "RDMA WRITE WITH IMMEDIATE", SEND: "SEND", READ: "RDMA READ"}


def small_bytes(config: VerbsConfig) -> int:
    """Registered memory that a writer needs before anything is staged: receives, notices, and the scratch of inline payloads."""
    return (MESSAGES_IN_FLIGHT + config.send_depth + RESERVE) * NOTICE_BYTES + max(config.inline_bytes, 1)


class _Target:
    """A peer's region, as this link knows it."""

    __slots__ = ("address", "error", "granted", "key", "rkey")

    def __init__(self, key: RegionKey, rkey: int, address: int) -> None:
        self.key = key
        self.rkey = rkey
        self.address = address
        self.granted = False
        self.error: Callable[[], TransportError] | None = None
        """Why it cannot be written any more."""


class _Read:
    """A read under way; it may still land after its reader has gone."""

    def __init__(self, into: memoryview, own: LocalMemory | None) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._into = into
        self._own = own

    def settle(self, ending: Callable[[], TransportError] | None) -> None:
        """It has completed, or never will."""
        if not self.done.done():
            if ending is not None:
                self.done.set_exception(ending())
            else:
                if self._own is not None:
                    self._into[:] = self._own.view
                self.done.set_result(None)
        if self._own is not None:
            self._own.close()


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
        self._small = small
        self._local_key = local_key
        self._forget = forget
        self._queue = SendQueue(config.send_depth, config.staging_bytes)
        self._slots = config.send_depth + RESERVE
        self._asked: list[tuple[int, int]] = [(SEND, 0)] * self._slots
        """Opcode and region of the requests under way, by number modulo ``_slots``: for the error that names them."""
        self._notices_at = MESSAGES_IN_FLIGHT * NOTICE_BYTES
        self._scratch_at = self._notices_at + self._slots * NOTICE_BYTES
        self._staging: LocalMemory | None = None
        self._targets: dict[int, _Target] = {}
        self._current = 0
        self._letting_go: deque[tuple[int, int]] = deque()
        self._turnstile = Turnstile()
        self._ending: Callable[[], TransportError] | None = None
        self._closed = False
        self._idle: asyncio.Future[None] | None = None
        self._connection: Connection
        self._inline = 0
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once the owner's queue pair is connected too."""
        self.mtu_reason = ""
        """The MTU that both sides agreed on, and why, in words."""

    def attach(self, connection: Connection) -> None:
        """Begins to wait for the owner's queue pair."""
        self._connection = connection
        self._post = connection.pair.post
        self._inline = min(connection.pair.inline_bytes, self._config.inline_bytes)
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
        target = self._targets.get(remote.region)
        if target is None or (target.key is not remote and target.key != remote):
            target = self._reach(remote)
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
        address, lkey, flags = self._place(data, nbytes)
        region = remote.region
        opcode = WRITE if notify is None or region != self._current else WRITE_WITH_IMMEDIATE
        if nbytes or opcode == WRITE_WITH_IMMEDIATE:
            if nbytes > self._config.staging_bytes or self._queue.wants_signal():
                flags |= SIGNALED
            self._request(
                opcode, flags, address, nbytes, lkey, region, target.address + offset, target.rkey, notify or 0
            )
        if notify is not None:
            self._credit.spend()
            if opcode == WRITE:
                # The owner counts immediates to the region of the last notice.
                self._notice(region, notify, signaled=self._queue.wants_signal())
                self._current = region

    def _place(self, data: Buffer, nbytes: int) -> tuple[int, int, int]:
        """Copies the payload to where its request finds it: (address, local key, flags)."""
        small = self._small
        if nbytes <= self._inline:
            # A request takes inline bytes with it when it is posted, so one place does for all.
            at = self._scratch_at
            small.view[at : at + nbytes] = data
            return small.address + at, small.lkey, INLINE if nbytes else 0
        if nbytes > self._config.staging_bytes:
            own = LocalMemory(self._device, nbytes, f"a write of {nbytes:,} bytes")
            own.view[:] = data
            self._queue.hold(own)
            return own.address, own.lkey, 0
        if self._staging is None:
            self._staging = LocalMemory(self._device, self._config.staging_bytes, f"staging of a link to {self._peer}")
        at = self._queue.stage(nbytes)
        self._staging.view[at : at + nbytes] = data
        return self._staging.address + at, self._staging.lkey, 0

    def _notice(self, region: int, immediate: int, *, signaled: bool) -> None:
        small = self._small
        at = self._notices_at + (self._queue.posted + 1) % self._slots * NOTICE_BYTES
        NOTICE.pack_into(small.view, at, region, immediate)
        flags = (INLINE if self._inline >= NOTICE_BYTES else 0) | (SIGNALED if signaled else 0)
        self._request(SEND, flags, small.address + at, NOTICE_BYTES, small.lkey, region)

    def _request(
        self,
        opcode: int,
        flags: int,
        address: int,
        nbytes: int,
        lkey: int,
        region: int,
        remote_address: int = 0,
        rkey: int = 0,
        immediate: int = 0,
    ) -> None:
        number = self._queue.post(signaled=bool(flags & SIGNALED))
        self._asked[number % self._slots] = (opcode, region)
        try:
            self._post(opcode, number, flags, address, nbytes, lkey, remote_address, rkey, immediate)
        except OSError as error:
            # The accounts forbid it, so the device or its driver has a trouble of its own.
            self._lose(
                PeerLost(self._peer, f"the device took no request ({error})", "see the kernel's log; connect again")
            )
            raise self._ending_error() from error

    # Room

    def _fits(self, nbytes: int, needs_credit: bool) -> bool:
        queue = self._queue
        return (
            queue.has_slots(2)
            and (nbytes <= self._inline or queue.fits(nbytes))
            and (not needs_credit or self._credit.free > 0)
        )

    def _has_room(self, nbytes: int, needs_credit: bool) -> bool:
        if self._fits(nbytes, needs_credit):
            return True
        # What has completed already need not wait for the event loop.
        self._connection.drain()
        if self._ending is not None:
            raise self._ending()
        return self._fits(nbytes, needs_credit)

    async def _wait_turn(self, target: _Target, nbytes: int, needs_credit: bool, timeout_us: float) -> None:
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

        await self._turnstile.enter(
            may_go,
            timeout_us,
            peer=self._peer,
            what=f"write to region {target.key.region} on lane {self._lane.name.lower()}: no credit for a notification"
            if needs_credit
            else f"write to region {target.key.region} on lane {self._lane.name.lower()}: no room to send",
            hint="its owner does not take its notifications" if needs_credit else "it does not answer",
        )

    def _ask_for_room(self, needs_credit: bool) -> None:
        """Sees to it that something will come that wakes the line."""
        if not self._queue.has_reserve():
            return  # signaled requests are under way: their completions do
        if needs_credit and self._credit.announce():
            self._notice(ANNOUNCEMENT, 0, signaled=True)
        self._flush()

    def _flush(self) -> None:
        """An empty signaled request behind a tail of unsignaled ones: its completion is theirs."""
        if self._queue.needs_flush() and self._queue.has_reserve():
            self._request(WRITE, SIGNALED, self._small.address, 0, self._small.lkey, 0)

    # Keys

    def _reach(self, remote: RegionKey) -> _Target:
        """The target of a key that the link has not seen, which is asked for. Raises ``AccessRefused``."""
        if remote.fabric != "verbs" or remote.address != self._peer:
            raise refuse_foreign(remote, self._peer, "is not this peer's")
        token = read_token(remote)
        if token is None or not 0 < remote.region < 1 << 32 or not 0 <= remote.nbytes < 1 << 48:
            raise refuse_foreign(remote, self._peer, "has a key that is none of this fabric")
        if remote.region in self._targets:
            raise refuse_foreign(remote, self._peer, "does not match the key that it is known by")
        target = _Target(remote, *token)
        self._targets[remote.region] = target
        self._connection.send(Frame(FrameKind.ASK, remote.region, target.rkey, target.address, remote.nbytes))
        return target

    def on_message(self, message: Frame | EndpointRecord) -> None:
        """As ``Side``: the owner's answers, and what it revokes."""
        if not isinstance(message, Frame):
            raise WireError(self._peer, "it sent a second queue pair over a link")
        region = message.region
        if message.kind is FrameKind.READY and not self.ready.done():
            self.ready.set_result(None)
        elif message.kind is FrameKind.REVOKED:
            self._refuse(region, revoked)
            self._letting_go.append((self._queue.posted, region))
            self._let_go()
        elif message.kind is FrameKind.GRANT:
            if region in self._targets:
                self._targets[region].granted = True
        elif message.kind is FrameKind.GONE:
            self._refuse(region, revoked)
        elif message.kind is FrameKind.FOREIGN:
            self._refuse(region, lambda key: refuse_foreign(key, self._peer, "is not what its owner registered"))
        else:
            raise WireError(self._peer, f"{message.kind.name} over a link, from its owner")
        self._turnstile.poke()

    def _refuse(self, region: int, error: Callable[[RegionKey], TransportError]) -> None:
        target = self._targets.pop(region, None)
        if target is not None:
            target.granted = False
            target.error = lambda: error(target.key)

    def _let_go(self) -> None:
        while self._letting_go and self._letting_go[0][0] <= self._queue.done:
            self._connection.send(Frame(FrameKind.LET_GO, self._letting_go.popleft()[1]))
        if self._letting_go:
            self._flush()

    # Completions

    def on_completions(self, batch: list[Completion]) -> None:
        """As ``Side``: the link's own requests, and the owner's credit."""
        queue = self._queue
        for number, _, _, immediate in batch:
            if number >= RECEIVE:
                self._credit.given(immediate, self._peer)
                self._connection.pair.post_receive(number - RECEIVE)
            else:
                self._settle(queue.completed(number))
        if self._letting_go:
            self._let_go()

    def _settle(self, held: list[object], ending: Callable[[], TransportError] | None = None) -> None:
        for thing in held:
            if isinstance(thing, _Read):
                thing.settle(ending)
            elif isinstance(thing, LocalMemory):
                thing.close()

    def on_drained(self) -> None:
        """As ``Side``."""
        self._turnstile.poke()
        if self._idle is not None and not self._idle.done():
            if self._queue.posted == self._queue.done:
                self._idle.set_result(None)
            else:
                self._flush()

    def on_failure(self, number: int, status: int) -> None:
        """As ``Side``: nothing more goes over this queue pair."""
        if number >= RECEIVE:
            operation, region = "a receive of credit", 0
        else:
            opcode, region = self._asked[number % self._slots]
            operation = OPERATIONS[opcode] + (f" to region {region}" if region else "")
        config = self._config
        patience = f"{config.retry_count} retries, {4.096 * 2**config.ack_timeout_code / 1e6:.2g} s each or longer"
        gone = region != 0 and region not in self._targets
        self._lose(link_error(self._peer, operation, status, revoked=gone, patience=patience))

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
        target = self._targets.get(remote.region)
        if target is None or (target.key is not remote and target.key != remote):
            target = self._reach(remote)
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
            reading = _Read(view, own)
            self._queue.hold(reading)
            self._request(READ, SIGNALED, address, nbytes, lkey, remote.region, target.address + offset, target.rkey)
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
        if self._connection.usable and self._queue.posted != self._queue.done:
            self._flush()
            self._connection.drain()
        if not self._connection.usable or self._queue.posted == self._queue.done:
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

    def _ending_error(self) -> TransportError:
        assert self._ending is not None
        return self._ending()

    def _lose(self, error: TransportError) -> None:
        """Ends the link: queue pair and memory go, who waits gets the error. The first error stands."""
        if self._ending is None:
            self._ending = lambda: type(error)(error.peer, error.operation, error.hint)
        self._connection.close()
        self._settle(self._queue.abandon(), self._ending)
        self._small.close()
        if self._staging is not None:
            self._staging.close()
        self._turnstile.poke()
        if not self.ready.done():
            self.ready.set_exception(self._ending())
            self.ready.exception()  # nobody may be there any more to see it
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)
