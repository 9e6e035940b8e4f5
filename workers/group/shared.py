"""The group of FFN workers on one host (``shm``) or in one process (``local``): regions read in place, partial rows, no barrier.

An attention worker writes its inputs once, into its own region; every FFN worker reads them there and writes its partial rows back,
one-sided. Nothing is exchanged between FFN workers: the attention worker sums N partial rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from afore.core.plan import PlanEntry
from afore.core.target import Target
from afore.transport import bells
from afore.transport.api import Link, RegionKey
from afore.transport.exchange import ExchangeLayout, Inputs, ReplyBuffer
from afore.transport.ringing import write_now_of
from afore.workers.device.base import Stream, Work
from afore.workers.staging import Staging


class InputSource(Protocol):
    """One attention worker's input slots: ``exchange.InputReader`` on its node, ``input_mirror.MirrorReader`` on others."""

    @property
    def memory(self) -> memoryview | None:
        """The whole region that the slots lie in."""
        ...

    def holds(self, microbatch: int) -> Target | None:
        """The target whose inputs the slot holds."""
        ...

    def has(self, target: Target, tokens: int) -> bool:
        """Whether the slot of the target's microbatch holds it, with so many rows."""
        ...

    def read(self, microbatch: int, target: Target) -> Inputs | None:
        """Views hidden [T, D], ids [T, K], weights [T, K] once the slot holds ``target``; valid until this worker replies."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPeer:
    """One attention worker, as an FFN worker reaches it."""

    link: Link
    """DATA lane."""
    key: RegionKey
    """Its exchange region."""
    inputs: InputSource
    """Its input slots, as this worker reads them."""
    rows: memoryview | None = None
    """The handle of its GPU memory, where its rows lie there (``workers/gpu_rows.py``)."""


class SharedGroup:
    """One worker's side. ``peers_A``: every attention worker, by rank."""

    _replies_rows = True
    """Whether replies carry rows."""

    def __init__(
        self, *, rank: int, epoch: int, layout: ExchangeLayout, peers_A: Sequence[AttentionPeer], timeout_us: float
    ) -> None:
        self._rank = rank
        self._layout = layout
        self._peers_A = tuple(peers_A)
        self._timeout_us = timeout_us
        self._readers_A = [peer.inputs for peer in peers_A]
        self._write_now_A = [write_now_of(peer.link) for peer in peers_A]
        self._reply_offsets_M = [layout.reply_offset(m, rank) for m in range(layout.num_microbatches)]
        self._replies_MA = [[ReplyBuffer(layout, rank, epoch) for _ in peers_A] for _ in range(layout.num_microbatches)]

    def missing(self, entry: PlanEntry) -> tuple[int, ...]:
        """See ``Group.missing``. The header says whether the rows are there; a bell is only the reason to look."""
        target, readers_A = entry.target, self._readers_A
        return tuple([a for a, tokens in enumerate(entry.tokens_A) if tokens and not readers_A[a].has(target, tokens)])

    def arrived(self, attention: int, microbatch: int) -> Target | None:
        """See ``Group.arrived``."""
        return self._readers_A[attention].holds(microbatch)

    def gather(self, stream: Stream, entry: PlanEntry, staging: Staging) -> None:
        """See ``Group.gather``: nothing is copied where one attention worker has all rows."""
        tokens = sum(entry.tokens_A)
        stream.run(
            Work("gather", entry.target, tokens=tokens, nbytes=self._input_nbytes(tokens)),
            partial(self._gather, entry, staging),
        )

    def reduce(self, stream: Stream, entry: PlanEntry, staging: Staging) -> None:
        """See ``Group.reduce``: partial rows go into the reply of their attention worker."""
        tokens = sum(entry.tokens_A)
        stream.run(
            Work("reduce", entry.target, tokens=tokens, nbytes=tokens * self._layout.hidden * 4),
            partial(self._split, entry, staging),
        )

    def skip(self, entry: PlanEntry) -> None:
        """See ``Group.skip``: nobody waits for anybody here."""

    async def reply(self, entry: PlanEntry) -> None:
        """See ``Group.reply``. One write and one bell for each attention worker of the step."""
        microbatch = entry.target.microbatch
        bell = bells.REPLY(microbatch, self._rank)
        offset = self._reply_offsets_M[microbatch]
        for a, tokens in enumerate(entry.tokens_A):
            if tokens:
                peer = self._peers_A[a]
                packed = self._replies_MA[microbatch][a].pack(entry.target, tokens, here=self._replies_rows)
                if not self._write_now_A[a](peer.key, offset, packed, bell):
                    await peer.link.write(peer.key, offset, packed, notify=bell, timeout_us=self._timeout_us)

    def close(self) -> None:
        """See ``Group.close``."""
        self._readers_A.clear()

    # On the stream

    def _gather(self, entry: PlanEntry, staging: Staging) -> None:
        parts: list[tuple[int, Inputs]] = []
        for a, tokens in enumerate(entry.tokens_A):
            if tokens:
                inputs = self._inputs(entry, a)
                # They were there when this was enqueued, and their owner may rewrite them only after this worker's reply.
                assert inputs is not None, f"inputs of {entry.target} from attention worker {a} are gone"
                parts.append((a, inputs))
        if len(parts) == 1:
            a, (staging.hidden_TD, staging.ids_TK, staging.weights_TK) = parts[0]
            staging.out_TD = self._replies_MA[entry.target.microbatch][a].rows(entry.tokens_A[a])
            return
        staging.resize(sum(entry.tokens_A))
        row = 0
        for _, (hidden_TD, ids_TK, weights_TK) in parts:
            end = row + hidden_TD.shape[0]
            staging.hidden_TD[row:end] = hidden_TD
            staging.ids_TK[row:end] = ids_TK
            staging.weights_TK[row:end] = weights_TK
            row = end

    def _split(self, entry: PlanEntry, staging: Staging) -> None:
        if sum(tokens > 0 for tokens in entry.tokens_A) == 1:
            # The experts wrote into the reply itself.
            return
        row = 0
        for a, tokens in enumerate(entry.tokens_A):
            if tokens:
                self._replies_MA[entry.target.microbatch][a].rows(tokens)[:] = staging.out_TD[row : row + tokens]
                row += tokens

    def _inputs(self, entry: PlanEntry, a: int) -> Inputs | None:
        inputs = self._readers_A[a].read(entry.target.microbatch, entry.target)
        if inputs is None or inputs[0].shape[0] != entry.tokens_A[a]:
            return None
        return inputs

    def _input_nbytes(self, tokens: int) -> int:
        return tokens * (self._layout.hidden * 4 + self._layout.top_k * 8)
