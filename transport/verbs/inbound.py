"""The owner's side of a verbs link: it takes notifications, gives credit, and grants and revokes regions."""

from __future__ import annotations

import asyncio
from typing import Protocol

from afore.core.errors import AforeError, TransportError, WireError
from afore.transport.api import Notification
from afore.transport.verbs.binding import (
    INLINE,
    RECEIVE,
    RECEIVED_IMMEDIATE,
    SIGNALED,
    WRITE_WITH_IMMEDIATE,
    Completion,
)
from afore.transport.verbs.config import VerbsConfig
from afore.transport.verbs.connection import Connection
from afore.transport.verbs.credits import ANNOUNCEMENTS_IN_FLIGHT, OwnerCredit
from afore.transport.verbs.memory import LocalMemory
from afore.transport.verbs.region import VerbsRegion
from afore.transport.verbs.status import link_error
from afore.transport.verbs.wire import ANNOUNCEMENT, NOTICE, EndpointRecord, Frame, FrameKind

NOTICE_BYTES = NOTICE.size
CREDIT_SENDS = 8
"""Messages of credit that may be under way; ``credits`` proves that fewer are."""


def receives(credits: int) -> int:
    """Receives that an owner keeps posted."""
    return credits + ANNOUNCEMENTS_IN_FLIGHT


class Owner(Protocol):
    """The endpoint that an inbound link belongs to."""

    @property
    def regions(self) -> dict[int, VerbsRegion]:
        """Its live regions, by number."""
        ...

    def region_was(self, number: int) -> bool:
        """Whether it has ever given ``number``."""
        ...

    def connect_pair(self, connection: Connection, ours: EndpointRecord, theirs: EndpointRecord) -> None:
        """Connects the queue pair. Raises ``TransportError``, ``HostError``."""
        ...

    def forget_inbound(self, link: InboundLink) -> None: ...

    def count_refusal(self, error: AforeError) -> None: ...


class InboundLink:
    """What an endpoint keeps for a peer's link into it."""

    def __init__(
        self, owner: Owner, config: VerbsConfig, small: LocalMemory, ours: EndpointRecord, *, peer: str
    ) -> None:
        """``small`` holds ``receives`` notices, posted already, and is the link's from now on; ``attach`` follows."""
        self._owner = owner
        self._small = small
        self._ours = ours
        self._peer = peer
        self._config = config
        self._credit = OwnerCredit(config.credits)
        self._current = 0
        self._granted: dict[int, VerbsRegion] = {}
        self._connection: Connection
        self._ready = False
        self._sent = 0
        self._revoking: dict[int, asyncio.TimerHandle] = {}
        self._loop = asyncio.get_running_loop()
        self._patience = self._loop.call_later(config.handshake_timeout_us * 1e-6, self._never_came)

    def attach(self, connection: Connection) -> None:
        """Begins to wait for the writer's queue pair."""
        self._connection = connection
        connection.start()

    @property
    def peer(self) -> str:
        """Address of the endpoint that writes."""
        return self._peer

    def _never_came(self) -> None:
        self._refuse(WireError(self._peer, "it did not say its queue pair in time"))

    # Notifications

    def on_completions(self, batch: list[Completion]) -> None:
        """As ``Side``: notifications, announcements, and this side's own messages of credit."""
        post_receive, view, peer = self._connection.pair.post_receive, self._small.view, self._peer
        regions, current = self._owner.regions, self._current
        orphans = 0
        for number, _, opcode, immediate in batch:
            place = number - RECEIVE
            if place < 0:
                continue  # a message of credit has arrived
            if opcode != RECEIVED_IMMEDIATE:
                current, immediate = NOTICE.unpack_from(view, place * NOTICE_BYTES)
            post_receive(place)
            if current == ANNOUNCEMENT:
                current = self._current
                if self._credit.announced():
                    self._give()
                continue
            self._current = current
            region = regions.get(current)
            if region is None:
                # Written before the writer saw that the region was closed.
                orphans += 1
                continue
            region.inbox.put(Notification(peer, immediate), self)
        if orphans:
            self.give_back(orphans)

    def on_drained(self) -> None:
        """As ``Side``: readers were woken by what was delivered."""

    def give_back(self, count: int) -> None:
        """As ``Creditor``: readers took ``count`` notifications."""
        if self._credit.took(count):
            self._give()

    def _give(self) -> None:
        if not self._connection.usable:
            return
        self._sent += 1
        immediate = self._credit.say()
        small = self._small
        try:
            self._connection.pair.post(
                WRITE_WITH_IMMEDIATE, self._sent, SIGNALED | INLINE, small.address, 0, small.lkey, 0, 0, immediate
            )
        except OSError as error:
            self._refuse(WireError(self._peer, f"the device took no message of credit ({error})"))

    # Regions

    def on_message(self, message: Frame | EndpointRecord) -> None:
        """As ``Side``: the writer's queue pair, then what it asks."""
        if isinstance(message, EndpointRecord):
            if self._ready:
                raise WireError(self._peer, "it sent a second queue pair over a link")
            self._patience.cancel()
            self._owner.connect_pair(self._connection, self._ours, message)
            self._ready = True
            self._connection.send(Frame(FrameKind.READY))
        elif message.kind is FrameKind.ASK and self._ready:
            self._answer(message)
        elif message.kind is FrameKind.LET_GO and message.region in self._revoking:
            self._revoking.pop(message.region).cancel()
            self._granted.pop(message.region).let_go(self)
        else:
            raise WireError(self._peer, f"{message.kind.name} for region {message.region} over a link, from its writer")

    def _answer(self, asked: Frame) -> None:
        region = self._owner.regions.get(asked.region)
        if region is None:
            kind = FrameKind.GONE if self._owner.region_was(asked.region) else FrameKind.FOREIGN
        elif (asked.rkey, asked.address, asked.nbytes) != (region.rkey, region.address, region.nbytes):
            kind = FrameKind.FOREIGN
        else:
            kind = FrameKind.GRANT
            self._granted[asked.region] = region
            region.grant(self)
        self._connection.send(Frame(kind, asked.region))

    def tell_revoked(self, region: int) -> None:
        """As ``RegionUser``."""
        self._revoking[region] = self._loop.call_later(
            self._config.revoke_timeout_us * 1e-6, self._never_let_go, region
        )
        self._connection.send(Frame(FrameKind.REVOKED, region))

    def _never_let_go(self, region: int) -> None:
        waited_s = self._config.revoke_timeout_us * 1e-6
        self._refuse(WireError(self._peer, f"it did not let go of region {region} within {waited_s:g} s"))

    # The end

    def on_failure(self, number: int, status: int) -> None:
        """As ``Side``."""
        operation = "a receive" if number >= RECEIVE else "a message of credit"
        # The stream tells of an ordinary end; a writer whose process died leaves unanswered credit behind, which is none of ours.
        self._refuse(link_error(self._peer, operation, status))

    def on_end(self, error: TransportError | None, reason: str) -> None:
        """As ``Side``: what was delivered before the writer's end counts."""
        if error is not None:
            self._owner.count_refusal(error)
        if self._connection.usable:
            self._connection.drain()
        self.close()

    def _refuse(self, error: AforeError) -> None:
        self._owner.count_refusal(error)
        self.close()

    def close(self) -> None:
        """Ends the link; its writer gets ``PeerLost``. Idempotent."""
        self._patience.cancel()
        self._connection.close()
        self._small.close()
        for timer in self._revoking.values():
            timer.cancel()
        self._revoking.clear()
        granted, self._granted = self._granted, {}
        for region in granted.values():
            region.let_go(self)
        self._owner.forget_inbound(self)
