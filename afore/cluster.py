"""The scripting API: start a topology, generate through it, watch plans, imbalance and spans as they happen.

from afore import Cluster, Topology

async with Cluster.start(Topology(attention=1, ffn=2)) as cluster:
    async for token in cluster.generate("Question: What is 3 * 4?\\nAnswer:"):
        print(token.text, end="")
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afore.core import control
from afore.core.clock import Clock, WallClock
from afore.core.config import RunConfig
from afore.core.target import Target
from afore.core.topology import Topology
from afore.serving.client import Client
from afore.serving.start import running_processes


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token."""

    id: int
    text: str
    """What it adds to the text; empty while a character is not complete."""
    index: int
    """0 for the first generated token."""
    at_ns: int
    """When it reached this process."""
    finish_reason: str = ""
    """``stop`` (the model ended) or ``length``, with the last token."""


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """One span of one process (``afore.core.trace`` names them)."""

    process: str
    kind: str
    name: str
    target: Target | None
    start_ns: int
    end_ns: int
    args: dict[str, Any]


class Cluster:
    """A running topology. Made by ``Cluster.start``."""

    def __init__(self, client: Client, config: RunConfig, clock: Clock) -> None:
        self._client = client
        self.config = config
        """The run's configuration, resolved."""
        self.clock = clock

    @classmethod
    @contextlib.asynccontextmanager
    async def start(
        cls,
        topology: Topology | None = None,
        *,
        inproc: bool = False,
        config: RunConfig | None = None,
        model: str | Path | None = None,
        policy: str | None = None,
    ) -> AsyncIterator[Cluster]:
        """Starts a cluster and serves until the block ends; nothing is left behind.

        ``inproc`` runs every role in this process, over loopback; otherwise each role is a process of its own. ``topology``,
        ``model`` and ``policy`` override those of ``config``. Raises ``ConfigError``, ``CheckpointError``, ``HostError`` before
        anything runs; ``RoleLost`` when a role does not come up.
        """
        chosen = config or RunConfig()
        overrides: dict[str, Any] = {}
        if topology is not None:
            overrides["topology"] = topology
        if model is not None:
            overrides["model"] = str(model)
        if policy is not None:
            overrides["policy"] = policy
        chosen = dataclasses.replace(chosen, **overrides)
        clock = WallClock()
        running: contextlib.AbstractAsyncContextManager[Client]
        if inproc:
            # Only then does this process need torch and every role.
            from afore.serving.inproc import running_inproc

            running = running_inproc(chosen, clock)
        else:
            running = running_processes(chosen, clock)
        async with cls.over(running, chosen, clock) as cluster:
            yield cluster

    @classmethod
    @contextlib.asynccontextmanager
    async def over(
        cls, running: contextlib.AbstractAsyncContextManager[Client], config: RunConfig, clock: Clock
    ) -> AsyncIterator[Cluster]:
        """A cluster over something that runs one (``afore.serving.start``); it ends with the block."""
        async with running as client:
            yield cls(client, config, clock)

    @property
    def url(self) -> str:
        """Where the door listens for HTTP; empty unless ``config.serve.http`` asks for it."""
        return self._client.status.url

    async def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int = 64,
        ignore_eos: bool = False,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int | None = None,
    ) -> AsyncGenerator[Token, None]:
        """Streams the tokens that follow ``prompt`` (text, or token ids). Leaving the loop early cancels the request.

        Raises ``RequestError`` (``PromptTooLong``), ``RoleLost`` when a role died.
        """
        sampling = control.Sampling(temperature, top_p, top_k, self.config.seed if seed is None else seed, 0)
        stream = self._client.submit(
            prompt if isinstance(prompt, str) else tuple(prompt),
            max_new_tokens=max_new_tokens,
            ignore_eos=ignore_eos,
            sampling=sampling,
        )
        async with contextlib.aclosing(stream):
            async for at_ns, event in stream:
                if isinstance(event, control.TokenOut):
                    yield Token(event.token, event.text, event.index, at_ns, event.finish)

    async def plans(self) -> AsyncGenerator[control.PlanSeen, None]:
        """Every published target as it happens: copies, tiles before and after, imbalance, why there were no copies."""
        async with contextlib.aclosing(self._client.plans()) as plans:
            async for plan in plans:
                yield plan

    async def spans(self) -> AsyncGenerator[SpanRecord, None]:
        """Spans of every role, a few times a second."""
        async with contextlib.aclosing(self._client.spans()) as batches:
            async for batch in batches:
                for document in batch.spans:
                    fields = json.loads(document)
                    target = fields.pop("target")
                    yield SpanRecord(batch.process, target=Target(*target) if target else None, **fields)

    async def stats(self) -> dict[str, Any]:
        """Imbalance, migration, per-layer figures and counters so far (the keys of the demo's ``--json``)."""
        return await self._client.stats()

    async def imbalance(self) -> dict[str, Any]:
        """``{"token": {"before", "after"}, "tile": {"before", "after", "bound"}}`` so far."""
        return dict((await self.stats())["imbalance"])

    async def lost(self) -> str:
        """Returns, naming it, when a role has died."""
        status = self._client.status
        while not status.lost:
            status = await self._client.status_after(status)
        return status.lost


async def complete(cluster: Cluster, prompt: str | Sequence[int], **options: Any) -> list[Token]:
    """All tokens of one ``generate``."""
    return [token async for token in cluster.generate(prompt, **options)]


async def complete_all(cluster: Cluster, prompts: Sequence[str | Sequence[int]], **options: Any) -> list[list[Token]]:
    """Many at once, in the order of ``prompts``."""
    return list(await asyncio.gather(*(complete(cluster, prompt, **options) for prompt in prompts)))
