"""Memory that another fabric owns, which peers write into over tcp too: a routed region is one piece of memory for all."""

from __future__ import annotations

from afore.transport.api import RegionKey
from afore.transport.queues import Inbox


class ExposedMemory:
    """What a link sees of it, as of a ``TcpRegion``."""

    def __init__(self, memory: memoryview, key: RegionKey, number: int, inbox: Inbox) -> None:
        """``number``: the token's. The memory and the inbox stay their owner's."""
        self.memory = memory
        self.key = key
        self.number = number
        self.inbox = inbox
