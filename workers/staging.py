"""Buffers of one microbatch on an FFN worker: the gathered inputs of its current target, its pairs, its partial rows.

A microbatch has one target at a time: the next layer's inputs are computed from this one's replies. So one set of buffers for each
microbatch is enough, and nothing is allocated while serving.
"""

from __future__ import annotations

import asyncio

import numpy as np

from afore.workers.device.base import F32, I32, Pairs


class Staging:
    """Room for ``max_tokens`` gathered tokens (A·T_max).

    The group's gather sets the four arrays: views of this room, or of the one peer's memory that has the whole input.
    """

    __slots__ = ("_free", "_room", "hidden_TD", "ids_TK", "out_TD", "pairs", "weights_TK")

    def __init__(self, *, max_tokens: int, hidden_size: int, top_k: int, num_rows: int) -> None:
        self._room: tuple[F32, I32, F32, F32] = (
            np.zeros((max_tokens, hidden_size), dtype=np.float32),
            np.zeros((max_tokens, top_k), dtype=np.int32),
            np.zeros((max_tokens, top_k), dtype=np.float32),
            np.zeros((max_tokens, hidden_size), dtype=np.float32),
        )
        self.pairs = Pairs.empty(max_tokens * top_k, num_rows)
        self.hidden_TD, self.ids_TK, self.weights_TK, self.out_TD = self._room
        self._free = asyncio.Event()
        self._free.set()

    def resize(self, tokens: int) -> None:
        """All four arrays are ``tokens`` rows of this room."""
        hidden_TD, ids_TK, weights_TK, out_TD = self._room
        self.hidden_TD, self.ids_TK = hidden_TD[:tokens], ids_TK[:tokens]
        self.weights_TK, self.out_TD = weights_TK[:tokens], out_TD[:tokens]

    async def take(self) -> None:
        """Awaits the end of the microbatch's previous target here: it has ended, unless an abort came too late to skip it."""
        await self._free.wait()
        self._free.clear()

    def give_back(self) -> None:
        """The target's replies are written."""
        self._free.set()
