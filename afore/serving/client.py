"""A client of the hub: submits requests, streams tokens, watches plans and spans; what ``Cluster`` and the launcher use."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from afore.core import control
from afore.core.clock import Clock, deadline
from afore.core.errors import PeerLost, PromptTooLong, QueueFull, RequestError, RoleLost, TransportError
from afore.core.messages import from_wire, to_wire
from afore.transport.api import Channel, Fabric

HUB = "hub"
WATCH_BACKLOG = 10_000
"""Plans or spans kept for a watcher that reads slowly; older ones make room."""

DOOR_GONE = "door-0: its process ended"
"""The ``lost`` of a status that the hub did not send: its channel ended."""

Event = control.TokenOut | control.Finished | control.Failed

Take = Callable[[tuple[int, Event]], None]
"""Called with (arrival time in ns, event) of one request."""


class Client:
    """One channel to the hub. Use as ``async with Client.connect(…) as client``."""

    def __init__(self, channel: Channel, clock: Clock, timeout_us: float) -> None:
        self._channel = channel
        self._clock = clock
        self._timeout_us = timeout_us
        self._requests: dict[str, Take] = {}
        self._leaving: set[str] = set()
        """Those of them that leave with their last event."""
        self._plans: list[asyncio.Queue[control.PlanSeen]] = []
        self._spans: list[asyncio.Queue[control.SpansSeen]] = []
        self._stats: dict[int, asyncio.Future[str]] = {}
        self._next_ticket = 0
        self._next_request = 0
        self._changed = asyncio.Condition()
        self.status = control.Status(False, (), "", 0, 0)
        """What the hub said last about who is up."""
        self._heard = False
        self._gone: TransportError | None = None

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(
        cls, fabric: Fabric, hub_address: str, clock: Clock, *, timeout_us: float
    ) -> AsyncIterator[Client]:
        """Raises ``PeerLost`` when no hub listens there."""
        channel = await fabric.dial(hub_address, timeout_us=timeout_us)
        client = cls(channel, clock, timeout_us)
        await client._send(control.Join("client", -1, os.getpid(), fabric.address))
        reader = asyncio.create_task(client._read(), name="client")
        try:
            yield client
        finally:
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader
            await channel.close()

    async def serving(self, *, timeout_us: float) -> None:
        """Returns once every role is linked. Raises ``RoleLost`` when one died on the way, ``DeadlineExceeded``."""
        async with (
            deadline(timeout_us, peer=HUB, operation="waiting for the cluster to serve", hint="see the roles' logs"),
            self._changed,
        ):
            await self._changed.wait_for(lambda: self.status.serving or self.status.lost or self._gone)
        self.raise_if_lost()

    async def known(self) -> None:
        """Returns once the hub has said who is up; it does at once, so the wait is the caller's to bound."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._heard or self._gone)

    async def status_after(self, seen: control.Status) -> control.Status:
        """The hub's word once it is another than ``seen``; one that came before this was called counts, so none is missed."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.status is not seen)
        return self.status

    async def submit(
        self,
        prompt: str | tuple[int, ...],
        *,
        max_new_tokens: int,
        ignore_eos: bool = False,
        sampling: control.Sampling | None = None,
    ) -> AsyncGenerator[tuple[int, control.TokenOut | control.Finished], None]:
        """Streams (arrival time in ns, token or end) of one request; leaving the loop early cancels it.

        Raises ``RequestError``, ``PromptTooLong``, ``RoleLost``.
        """
        name = f"r{self._next_request}"
        self._next_request += 1
        queue: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._requests[name] = queue.put_nowait
        ended = False
        try:
            self.raise_if_lost()
            text, ids = (prompt, ()) if isinstance(prompt, str) else ("", prompt)
            submit = control.Submit(name, text, ids, max_new_tokens, ignore_eos, sampling or control.Sampling())
            await self._send(submit)
            while True:
                # The hub answers every request or ends; its end is put into the queue by the reader.
                at_ns, event = await queue.get()
                if isinstance(event, control.Failed):
                    ended = True
                    raise failure(event)
                yield at_ns, event
                if isinstance(event, control.Finished):
                    ended = True
                    return
        finally:
            del self._requests[name]
            if not ended and self._gone is None:
                with contextlib.suppress(TransportError):
                    await self._send(control.Cancel(name))

    async def submit_to(
        self, take: Take, prompt: tuple[int, ...], *, max_new_tokens: int, ignore_eos: bool = False
    ) -> None:
        """Submits one request whose events ``take`` hears, its end (or failure) last: for whoever has thousands, without a
        task for each. ``take`` must not raise. Raises ``RoleLost``.
        """
        self.raise_if_lost()
        name = f"r{self._next_request}"
        self._next_request += 1
        self._requests[name] = take
        self._leaving.add(name)
        await self._send(control.Submit(name, "", prompt, max_new_tokens, ignore_eos, control.Sampling()))

    async def stats(self) -> dict[str, Any]:
        """The scheduler's statistics so far: the keys ``imbalance`` and ``migration`` of ``--json``, and counters."""
        ticket = self._next_ticket
        self._next_ticket += 1
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._stats[ticket] = future
        try:
            await self._send(control.StatsRequest(ticket))
            async with deadline(self._timeout_us, peer="scheduler-0", operation="statistics"):
                return dict(json.loads(await future))
        finally:
            del self._stats[ticket]

    async def plans(self) -> AsyncGenerator[control.PlanSeen, None]:
        """Published targets as they happen."""
        queue: asyncio.Queue[control.PlanSeen] = asyncio.Queue(WATCH_BACKLOG)
        self._plans.append(queue)
        try:
            await self._watch()
            while True:
                yield await queue.get()
        finally:
            self._plans.remove(queue)
            if self._gone is None:
                with contextlib.suppress(TransportError):
                    await self._watch()

    async def spans(self) -> AsyncGenerator[control.SpansSeen, None]:
        """Batches of spans of every role as they happen."""
        queue: asyncio.Queue[control.SpansSeen] = asyncio.Queue(WATCH_BACKLOG)
        self._spans.append(queue)
        try:
            await self._watch()
            while True:
                yield await queue.get()
        finally:
            self._spans.remove(queue)
            if self._gone is None:
                with contextlib.suppress(TransportError):
                    await self._watch()

    async def stop(self, reason: str) -> None:
        """Ends the cluster."""
        await self._send(control.Stop(reason))

    def raise_if_lost(self) -> None:
        if self.status.lost:
            role, _, reason = self.status.lost.partition(": ")
            raise RoleLost(role, reason)
        if self._gone is not None:
            raise self._gone

    async def _watch(self) -> None:
        await self._send(control.Watch(plans=bool(self._plans), spans=bool(self._spans)))

    async def _send(self, message: control.Message) -> None:
        await self._channel.send(to_wire(message), timeout_us=self._timeout_us)

    async def _read(self) -> None:
        try:
            while True:
                self._take(from_wire(await self._channel.receive(timeout_us=None), peer=HUB))
                async with self._changed:
                    self._changed.notify_all()
        except TransportError as error:
            self._gone = error
            if not self.status.lost:
                self.status = dataclasses.replace(self.status, serving=False, lost=DOOR_GONE)
            at_ns = self._clock.now_ns()
            for name, take in tuple(self._requests.items()):
                if name in self._leaving:
                    del self._requests[name]
                take((at_ns, control.Failed(name, "RoleLost", DOOR_GONE, "start again")))
            for future in self._stats.values():
                if not future.done():
                    future.set_exception(PeerLost(HUB, "ended before it answered"))
            async with self._changed:
                self._changed.notify_all()

    def _take(self, message: control.Message) -> None:
        if isinstance(message, control.TokensOut):
            at_ns = self._clock.now_ns()
            for token in message.each():
                take = self._requests.get(token.request)
                if take is not None:
                    take((at_ns, token))
        elif isinstance(message, control.TokenOut | control.Finished | control.Failed):
            take = self._requests.get(message.request)
            if take is not None:
                if message.request in self._leaving and not isinstance(message, control.TokenOut):
                    self._leaving.discard(message.request)
                    del self._requests[message.request]
                take((self._clock.now_ns(), message))
        elif isinstance(message, control.Status):
            self.status = message
            self._heard = True
        elif isinstance(message, control.Stats):
            future = self._stats.get(message.ticket)
            if future is not None and not future.done():
                future.set_result(message.payload)
        elif isinstance(message, control.PlanSeen):
            for plan_queue in self._plans:
                _put_newest(plan_queue, message)
        elif isinstance(message, control.SpansSeen):
            for span_queue in self._spans:
                _put_newest(span_queue, message)


def _put_newest(queue: asyncio.Queue[Any], item: object) -> None:
    if queue.full():
        queue.get_nowait()
    queue.put_nowait(item)


def failure(failed: control.Failed) -> RequestError | RoleLost:
    """The error that a message stands for."""
    if failed.kind == "RoleLost":
        role, _, reason = failed.problem.partition(": ")
        return RoleLost(role, reason, failed.remedy)
    kind = {"PromptTooLong": PromptTooLong, "QueueFull": QueueFull}.get(failed.kind, RequestError)
    return kind(failed.request, failed.problem, failed.remedy)
