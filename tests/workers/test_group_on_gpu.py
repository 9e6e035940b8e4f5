"""FFN workers that gather and reduce among themselves: two processes, the strict driver for a GPU, gloo for NCCL."""

from __future__ import annotations

import asyncio
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afore.core.clock import WallClock
from afore.core.errors import ConfigError, DeadlineExceeded, WireError
from afore.core.target import Target
from afore.transport.api import Lane
from afore.transport.exchange import InputSlots, Replies
from afore.transport.loopback import LoopbackFabric, LoopbackNetwork
from afore.transport.nodes import Nodes
from afore.workers.group.collective import Collective
from afore.workers.group.meeting import HERE, MEETING_NBYTES, Meeting, host_of
from afore.workers.group.parts import own_rows, part_rows, parts_within
from tests.workers.group_process import EPOCH, LAYOUT, TARGETS, rows_of

ROOT = Path(__file__).resolve().parents[2]
SIZE = 2
PATIENCE_S = 120.0


@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(1, 9))
def test_every_row_is_one_workers(tokens_A: list[int], size: int) -> None:
    tokens = sum(tokens_A)
    owned = [own_rows(tokens, rank, size) for rank in range(size)]
    assert [row for first, count in owned for row in range(first, first + count)] == list(range(tokens))
    assert all(count <= part_rows(tokens, size) for _, count in owned)
    assert all(first == rank * part_rows(tokens, size) for rank, (first, count) in enumerate(owned) if count)
    seen: list[list[int]] = [[] for _ in tokens_A]
    for part in owned:
        within = parts_within(tokens_A, part)
        assert sum(count for _, count in within) == part[1]
        for rows, (first, count) in zip(seen, within, strict=True):
            rows += range(first, first + count)
    assert seen == [list(range(count)) for count in tokens_A]


def hear(child: subprocess.Popen[str]) -> str:
    """The next line of a child, which gives up by itself where it waits too long; its failure is told."""
    assert child.stdout is not None
    line = child.stdout.readline()
    assert line, child.communicate()[1][-3000:]
    return line


def say(child: subprocess.Popen[str], line: str) -> None:
    assert child.stdin is not None
    child.stdin.write(line)
    child.stdin.flush()


@pytest.mark.slow
def test_two_workers_gather_and_reduce(tmp_path: Path) -> None:
    """Every worker has all rows, each replies the sum of its part; one that skips a target holds nobody up, and spoils nothing."""
    slots = []
    for a in range(2):
        buffer = bytearray(-(-LAYOUT.nbytes // 4096) * 4096)
        (tmp_path / f"inputs-{a}").write_bytes(buffer)
        memory = np.memmap(tmp_path / f"inputs-{a}", dtype=np.uint8, mode="r+")
        slots.append(InputSlots(memory.data, LAYOUT, EPOCH))
    command = [sys.executable, "-m", "tests.workers.group_process"]
    children = [
        subprocess.Popen(
            [*command, str(rank), str(SIZE), str(tmp_path)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(SIZE)
    ]
    try:
        say(children[1], hear(children[0]))
        for sequence, (tokens_A, _) in enumerate(TARGETS):
            for a, tokens in enumerate(tokens_A):
                if tokens:
                    slots[a].write(Target(0, 0, sequence), *rows_of(sequence, a, tokens))
            for child in children:
                say(child, "go\n")
            assert [hear(child) for child in children] == ["done\n"] * SIZE
        for child in children:
            assert child.wait(PATIENCE_S) == 0, child.communicate()[1][-3000:]
    finally:
        for child in children:
            child.kill()
            child.communicate()
    found = [json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in range(SIZE)]
    taken = [0] * SIZE
    for sequence, (tokens_A, skips) in enumerate(TARGETS):
        present = [a for a, tokens in enumerate(tokens_A) if tokens]
        inputs = [rows_of(sequence, a, tokens_A[a]) for a in present]
        for rank in range(SIZE):
            gathered = found[rank]["gathered"][sequence]
            if rank in skips:
                assert gathered is None
                continue
            if not skips:
                for index in range(3):
                    expected = np.concatenate([part[index] for part in inputs])
                    np.testing.assert_array_equal(np.array(gathered[index], dtype=expected.dtype), expected)
                check_replies(found[rank]["replies"], taken[rank], rank, sequence, tokens_A)
            taken[rank] += 1


def check_replies(replies_A: list[list[str]], nth: int, rank: int, sequence: int, tokens_A: tuple[int, ...]) -> None:
    """Each attention worker's reply of ``rank`` has the rows of its part, summed over both workers: once and twice the input."""
    own = own_rows(sum(tokens_A), rank, SIZE)
    for a, part in enumerate(parts_within(tokens_A, own)):
        if not tokens_A[a]:
            continue
        target = Target(0, 0, sequence)
        packed = next(
            bytes.fromhex(one)
            for one in replies_A[a]
            if struct.unpack_from("<Q", bytes.fromhex(one))[0] == target.word()
        )
        buffer = bytearray(LAYOUT.nbytes + 64)
        offset = LAYOUT.reply_offset(0, rank)
        buffer[offset : offset + len(packed)] = packed
        taken = Replies(memoryview(buffer), LAYOUT, EPOCH).take(0, rank, target, tokens_A[a])
        assert taken is not None
        first, count = taken[0]
        assert (first, count) == part
        hidden_TD = rows_of(sequence, a, tokens_A[a])[0]
        np.testing.assert_array_equal(taken[1], 3 * hidden_TD[first : first + count])


async def never(port: int | None) -> tuple[str, int]:
    await asyncio.get_running_loop().create_future()
    raise AssertionError


async def test_workers_that_do_not_come_are_told_of_in_time() -> None:
    with pytest.raises(DeadlineExceeded, match="the gloo group of 2 FFN workers did not come together"):
        await Collective.join(never, backend="gloo", rank=1, size=2, epoch=0, timeout_s=0.05, ordinal=None)


async def test_an_address_that_is_not_this_machines_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"topology\.listen: nothing can listen at 192\.0\.2\.1"):
        await Collective.join(
            never, backend="gloo", rank=0, size=2, epoch=0, timeout_s=5, ordinal=None, listen_at="192.0.2.1"
        )


async def test_the_first_tells_the_others_where_it_is() -> None:
    network = LoopbackNetwork(WallClock())
    first, second = (LoopbackFabric(network, f"ffn-{rank}") for rank in range(2))
    regions = [fabric.register(MEETING_NBYTES, label="meeting") for fabric in (first, second)]
    link = await first.connect(second.address, Lane.CONTROL, timeout_us=1e6)
    hosting = Meeting(regions[0], HERE, [(link, regions[1].key)], timeout_us=1e6)
    coming = Meeting(regions[1], "", [], timeout_us=1e6)
    assert await hosting.meet(4711) == (HERE, 4711)
    assert await coming.meet(None) == (HERE, 4711)
    with pytest.raises(DeadlineExceeded):
        await Meeting(regions[1], "", [], timeout_us=1e3).meet(None)
    for fabric in (first, second):
        await fabric.close()


class Elsewhere:
    """A fabric as far as its address goes."""

    def __init__(self, address: str) -> None:
        self.address = address

    def node_of(self, address: str) -> str:
        return address.partition(";")[0]


def test_the_host_that_others_reach() -> None:
    def host(address: str, *others: str) -> str:
        fabric: Any = Elsewhere(address)
        endpoints = {("ffn", rank): one for rank, one in enumerate((address, *others))}
        return host_of(fabric, Nodes(fabric, endpoints), len(endpoints))

    assert host("n1;/run/a.sock;tcp=10.0.0.2:41001", "n1;/run/b.sock;tcp=10.0.0.2:41002") == HERE
    assert host("n1;/run/a.sock;tcp=10.0.0.2:41001", "n2;/run/b.sock;tcp=10.0.0.3:41002") == "10.0.0.2"
    assert host("n1;/run/a.sock;tcp=[fd00::2]:41001", "n2;/x;tcp=[fd00::3]:1") == "fd00::2"
    with pytest.raises(WireError, match="no other machine reaches"):
        host("n1;/run/a.sock;tcp=127.0.0.1:41001", "n2;/x")
