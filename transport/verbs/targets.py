"""The regions that a writer's link may write into: the keys that its owner granted, refused and revoked, and who let go of what."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from afore.core.errors import TransportError, WireError
from afore.transport.api import RegionKey
from afore.transport.buffers import refuse_foreign, revoked
from afore.transport.verbs.wire import Frame, FrameKind, read_token


class Target:
    """A peer's region, as the link knows it."""

    __slots__ = ("address", "error", "granted", "key", "rkey")

    def __init__(self, key: RegionKey, rkey: int, address: int) -> None:
        self.key = key
        self.rkey = rkey
        self.address = address
        self.granted = False
        self.error: Callable[[], TransportError] | None = None
        """Why it cannot be written any more."""


class Targets:
    """Those of one link, by region's number."""

    def __init__(self, peer: str, send: Callable[[Frame], None]) -> None:
        """``send`` says a frame to the owner."""
        self.known: dict[int, Target] = {}
        self._peer = peer
        self._send = send
        self._letting_go: deque[tuple[int, int]] = deque()
        """(newest request when the owner revoked it, region)."""

    def find(self, remote: RegionKey) -> Target:
        """The target of a key; one that the link has not seen is asked for. Raises ``AccessRefused``."""
        target = self.known.get(remote.region)
        if target is not None and (target.key is remote or target.key == remote):
            return target
        if remote.fabric != "verbs" or remote.address != self._peer:
            raise refuse_foreign(remote, self._peer, "is not this peer's")
        token = read_token(remote)
        if token is None or not 0 < remote.region < 1 << 32 or not 0 <= remote.nbytes < 1 << 48:
            raise refuse_foreign(remote, self._peer, "has a key that is none of this fabric")
        if target is not None:
            raise refuse_foreign(remote, self._peer, "does not match the key that it is known by")
        target = self.known[remote.region] = Target(remote, *token)
        self._send(Frame(FrameKind.ASK, remote.region, target.rkey, target.address, remote.nbytes))
        return target

    def hear(self, said: Frame, newest: int) -> None:
        """What the owner says of a region; ``newest`` is the last request that was posted. Raises ``WireError``."""
        region = said.region
        if said.kind is FrameKind.GRANT:
            if region in self.known:
                self.known[region].granted = True
        elif said.kind is FrameKind.REVOKED:
            self._refuse(region, revoked)
            self._letting_go.append((newest, region))
        elif said.kind is FrameKind.GONE:
            self._refuse(region, revoked)
        elif said.kind is FrameKind.FOREIGN:
            self._refuse(region, lambda key: refuse_foreign(key, self._peer, "is not what its owner registered"))
        else:
            raise WireError(self._peer, f"{said.kind.name} over a link, from its owner")

    def _refuse(self, region: int, error: Callable[[RegionKey], TransportError]) -> None:
        target = self.known.pop(region, None)
        if target is not None:
            target.granted = False
            target.error = lambda: error(target.key)

    def let_go(self, done: int) -> bool:
        """Tells the owner what nothing is under way to any more; ``done``: the newest completed request. True while some is."""
        while self._letting_go and self._letting_go[0][0] <= done:
            self._send(Frame(FrameKind.LET_GO, self._letting_go.popleft()[1]))
        return bool(self._letting_go)
