"""The load driver in virtual time: who is sent when, and that no record is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from afore.core.clock import LoopClock
from afore.testing import virtual_now_ns, virtual_test
from afore.tools.bench.latency import UNFINISHED, Record, peak_concurrency
from afore.tools.bench.load import Load, Planned

SEEDS = (None, *range(20))


class Scripted:
    """A server whose answers take a fixed time each; some fail."""

    def __init__(self, takes_s: float, failing: Sequence[int] = ()) -> None:
        self._takes_s = takes_s
        self._failing = failing
        self.sent: list[tuple[int, int]] = []

    def begin(self, planned: Planned, due_ns: int) -> Answer:
        self.sent.append((planned.index, virtual_now_ns()))
        return Answer(planned, due_ns, self._takes_s, "HTTP 500" if planned.index in self._failing else "")


class Answer:
    def __init__(self, planned: Planned, due_ns: int, takes_s: float, failure: str) -> None:
        self._planned = planned
        self._due_ns = due_ns
        self._sent_ns = virtual_now_ns()
        self._takes_s = takes_s
        self._failure = failure
        self._chunks_ns: list[int] = []

    async def follow(self) -> str:
        await asyncio.sleep(self._takes_s / 2)
        self._chunks_ns.append(virtual_now_ns())
        await asyncio.sleep(self._takes_s / 2)
        self._chunks_ns.append(virtual_now_ns())
        return self._failure

    def record(self, failure: str) -> Record:
        return Record(
            index=self._planned.index, due_ns=self._due_ns, sent_ns=self._sent_ns, chunks_ns=tuple(self._chunks_ns),
            ended_ns=virtual_now_ns(), prompt_tokens=1, output_tokens=len(self._chunks_ns), failure=failure,
        )  # fmt: skip


def planned(due_s: Sequence[float]) -> list[Planned]:
    return [Planned(index=index, due_s=at_s, prompt="x", max_tokens=2) for index, at_s in enumerate(due_s)]


async def healthy() -> str:
    return ""


@virtual_test(seeds=SEEDS)
async def test_requests_go_out_when_they_are_due() -> None:
    server = Scripted(takes_s=10)
    load = Load(planned([0, 0, 0.25, 3]), server.begin, LoopClock())
    assert await load.run(healthy) == ""
    assert sorted(server.sent) == [(0, 0), (1, 0), (2, 250_000_000), (3, 3_000_000_000)]
    assert load.unsent == 0
    assert all(record.completed and record.e2e_ms == 10_000 for record in load.records)


@virtual_test(seeds=SEEDS)
async def test_no_more_are_in_flight_than_asked_for_and_lateness_is_seen() -> None:
    server = Scripted(takes_s=1)
    load = Load(planned([0] * 7), server.begin, LoopClock(), concurrency=3)
    await load.run(healthy)
    assert peak_concurrency(load.records) == 3
    late_s = sorted((record.sent_ns - record.due_ns) / 1e9 for record in load.records)
    assert late_s == [0, 0, 0, 1, 1, 1, 2]


@virtual_test(seeds=SEEDS)
async def test_failures_are_records_and_the_load_goes_on_while_the_server_lives() -> None:
    server = Scripted(takes_s=1, failing=[1])
    load = Load(planned([0, 0, 5]), server.begin, LoopClock())
    assert await load.run(healthy) == ""
    assert sorted((record.index, record.failure) for record in load.records) == [(0, ""), (1, "HTTP 500"), (2, "")]


@virtual_test(seeds=SEEDS)
async def test_a_server_that_died_ends_the_load_with_every_record() -> None:
    async def dead() -> str:
        return "it does not answer"

    server = Scripted(takes_s=2, failing=[0])
    load = Load(planned([0, 1, 60]), server.begin, LoopClock())
    assert await load.run(dead) == "it does not answer"
    assert virtual_now_ns() == 2_000_000_000
    assert load.unsent == 1
    first, second = sorted(load.records, key=lambda record: record.index)
    assert first.failure == "HTTP 500"
    assert (second.failure, second.output_tokens) in ((UNFINISHED, 1), (UNFINISHED, 0))


@virtual_test(seeds=SEEDS)
async def test_a_death_with_the_last_request_is_noticed() -> None:
    async def dead() -> str:
        return "gone"

    load = Load(planned([0]), Scripted(takes_s=1, failing=[0]).begin, LoopClock())
    assert await load.run(dead) == "gone"


@virtual_test(seeds=SEEDS)
async def test_a_lost_cluster_ends_the_load() -> None:
    async def lost() -> str:
        await asyncio.sleep(0.5)
        return "ffn-1: killed by SIGKILL"

    load = Load(planned([0, 0]), Scripted(takes_s=10).begin, LoopClock())
    assert await load.run(healthy, lost()) == "ffn-1: killed by SIGKILL"
    assert [record.failure for record in load.records] == [UNFINISHED] * 2


@virtual_test(seeds=SEEDS)
async def test_an_interruption_keeps_what_was_seen() -> None:
    load = Load(planned([0, 0, 9]), Scripted(takes_s=4).begin, LoopClock())
    running = asyncio.create_task(load.run(healthy))
    await asyncio.sleep(3)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [(record.failure, record.output_tokens) for record in load.records] == [(UNFINISHED, 1)] * 2
    assert load.unsent == 1
    assert virtual_now_ns() == 3_000_000_000


@virtual_test
async def test_a_defect_of_the_client_is_not_swallowed() -> None:
    class Broken(Answer):
        async def follow(self) -> str:
            raise ZeroDivisionError

    load = Load(planned([0]), lambda one, due_ns: Broken(one, due_ns, 1, ""), LoopClock())
    with pytest.raises(ExceptionGroup):
        await load.run(healthy)
