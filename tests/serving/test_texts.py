"""Texts of library clients: what cannot fit is refused unread; a long text is tokenized while the engine goes on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from afore.core import control
from afore.core.clock import LoopClock
from afore.core.config import BatchOptions, RunConfig
from afore.core.topology import Topology
from afore.serving.admission import Limits
from afore.serving.engine import Engine
from afore.serving.hub import Hub
from afore.serving.spelling import Speller
from afore.serving.texts import QUICK_CHARACTERS, most_characters
from afore.transport.loopback import LoopbackFabric, LoopbackNetwork

CONFIG = RunConfig(topology=Topology(attention=1, ffn=2, microbatches=1), batch=BatchOptions(max_num_seqs=8))
LIMITS = Limits(vocab_size=10, max_model_len=20_000, kv_tokens=1 << 20, eos_ids=frozenset())


class Letters:
    """A token for every character; a text of letters ``w`` is tokenized once ``released`` is set."""

    has_chat_template = False
    longest_token = 1

    def __init__(self) -> None:
        self.asked = 0
        self.released = threading.Event()

    def encode(self, text: str) -> list[int]:
        self.asked += 1
        if text.startswith("broken"):
            raise RuntimeError(text[:10])
        if text.startswith("w"):
            assert self.released.wait(60)
        return [1] * len(text)

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        raise NotImplementedError

    def encode_rendered(self, text: str) -> list[int]:
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "x" * len(token_ids)

    def detokenizer(self) -> Speller:
        return Plain()


class Plain:
    """Nothing is spelled in these tests."""

    def push(self, token_id: int) -> str:
        return "x"

    def flush(self) -> str:
        return ""


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # nothing tells of every change
            await asyncio.sleep(0)


class World:
    """An engine without roles, and one client of it."""

    def __init__(self, config: RunConfig = CONFIG) -> None:
        self.text = Letters()
        self.hub = Hub(LoopbackFabric(LoopbackNetwork(LoopClock()), "hub"), config)
        self.engine = Engine(self.hub, config, LIMITS, self.text)
        self.heard: list[control.Message] = []
        self.client = self.hub.attach(self.heard.append)

    def submit(self, name: str, text: str) -> None:
        self.hub.from_local(self.client, control.Submit(name, text, (), 2, True, control.Sampling()))

    async def until(self, live: int, waiting: int) -> None:
        await eventually(lambda: (self.engine.live_requests, self.engine.num_waiting) == (live, waiting))

    def failure(self) -> control.Failed:
        (failed,) = self.heard
        assert isinstance(failed, control.Failed)
        return failed


LONG = "w" * (QUICK_CHARACTERS + 1)


async def test_a_text_that_cannot_fit_is_refused_before_it_is_read() -> None:
    world = World()
    most = most_characters(LIMITS.max_model_len, 1)
    world.submit("a", "x" * (most + 1))
    assert world.failure().kind == "PromptTooLong"
    assert f"{most + 1:,} characters" in world.failure().problem
    assert world.text.asked == 0
    world.heard.clear()
    world.submit("b", "x" * most)
    await eventually(lambda: world.heard != [])
    assert "prompt tokens" in world.failure().problem  # read, and then counted in tokens


async def test_a_long_text_is_read_beside_the_loop_and_others_go_on() -> None:
    world = World()
    world.submit("long", LONG)
    await world.until(live=0, waiting=1)
    world.submit("short", "xxx")
    assert world.engine.live_requests == 1
    world.text.released.set()
    await eventually(lambda: world.engine.live_requests == 2)
    assert world.heard == []


@pytest.mark.parametrize("how", ["cancel", "leave"])
async def test_a_client_that_no_longer_wants_it_gets_nothing(how: str) -> None:
    world = World()
    world.submit("long", LONG)
    await asyncio.sleep(0)
    if how == "cancel":
        world.hub.from_local(world.client, control.Cancel("long"))
    else:
        world.hub.detach(world.client)
    await world.until(live=0, waiting=0)
    world.text.released.set()
    assert world.engine.live_requests == 0
    assert world.heard == []


async def test_texts_being_read_count_as_waiting() -> None:
    world = World(RunConfig(topology=CONFIG.topology, batch=BatchOptions(max_num_seqs=8, max_waiting=1)))
    world.submit("a", LONG)
    world.submit("b", LONG)
    assert world.failure().kind == "QueueFull"
    world.text.released.set()
    await eventually(lambda: world.engine.live_requests == 1)


async def test_a_tokenizer_that_fails_fails_the_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.submit("a", "broken" + LONG)
    await eventually(lambda: world.heard != [])
    assert "cannot be tokenized (RuntimeError)" in world.failure().problem
    assert "cannot be tokenized" in caplog.text
