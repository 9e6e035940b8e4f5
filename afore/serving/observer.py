"""Who wants to know what becomes of requests, whatever door they came through."""

from __future__ import annotations

from afore.core.control import TokensOut
from afore.serving.requests import Request


class Observer:
    """Hears of each request's life; this one does not care. Called in the event loop: it must be quick and must not fail."""

    def submitted(self, request: Request) -> None:
        """It was taken in, and waits."""

    def scheduled(self, request: Request) -> None:
        """It has its KV blocks, and goes to a prefill worker; again after each preemption."""

    def token(self, client: int, name: str, index: int) -> None:
        """Its ``index``-th token has come."""

    def tokens(self, client: int, tokens: TokensOut) -> None:
        """As ``token``, of many requests of one client."""
        for name, index in zip(tokens.requests, tokens.indices, strict=True):
            self.token(client, name, index)

    def ended(self, client: int, name: str, reason: str) -> None:
        """It has ended: ``stop``, ``length``, ``abort`` (its client lost interest) or ``error``. Every request ends once."""
