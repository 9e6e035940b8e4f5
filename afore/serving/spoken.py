"""Tokens on their way from the engine to its clients: those of one step go together where they can."""

from __future__ import annotations

from typing import Final

from afore.core import control
from afore.serving.requests import NOWHERE, Request

CLIENT: Final = "client"
Destination = tuple[str, int]
"""(role, or ``CLIENT``; rank)"""


class Spoken:
    """Tokens of one step on their way out: those that follow one another to the same client go together."""

    __slots__ = ("_client", "_out", "_requests", "_texts", "_tokens")

    def __init__(self, out: list[tuple[Destination, control.Message]]) -> None:
        self._out = out
        self._client = NOWHERE
        self._requests: list[Request] = []
        self._tokens: list[int] = []
        self._texts: list[str] = []

    def add(self, request: Request, token: int, text: str) -> None:
        """The newest token of the request, which is not its last."""
        if request.client != self._client:
            self.send()
            self._client = request.client
        self._requests.append(request)
        self._tokens.append(token)
        self._texts.append(text)

    def send(self) -> None:
        """What has come together goes out."""
        if self._requests:
            together = control.TokensOut(
                tuple([request.name for request in self._requests]),
                tuple([len(request.produced) - 1 for request in self._requests]),
                tuple(self._tokens),
                tuple(self._texts) if any(self._texts) else (),
            )
            self._out.append(((CLIENT, self._client), together))
            self._requests.clear()
            self._tokens.clear()
            self._texts.clear()
