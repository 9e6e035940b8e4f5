"""One FFN worker's group in a process of its own: ``python -m tests.workers.group_process RANK SIZE FOLDER``.

The strict driver's memory stands for a GPU's, gloo for NCCL; all else is what runs on GPUs. The parent writes inputs into files
that stand for the attention workers' regions, and compares what comes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import mmap
import sys
from pathlib import Path
from typing import Any

import numpy as np

from afore.core.clock import WallClock
from afore.core.plan import CopyStart, EntryKind, PlanEntry
from afore.core.target import Phase, Target
from afore.transport.exchange import ExchangeLayout, InputReader
from afore.workers.cuda_target import CudaStaging
from afore.workers.device.cuda.device import CudaDevice
from afore.workers.device.cuda.driver import Driver
from afore.workers.device.cuda.memory import DeviceMemory
from afore.workers.group.collective import Collective
from afore.workers.group.on_gpu import GpuGroup
from afore.workers.group.shared import AttentionPeer
from tests.workers.device.cuda.fake_driver import FakeCalls

LAYOUT = ExchangeLayout(num_microbatches=2, num_ffn=2, max_tokens=5, hidden=6, top_k=2)
EPOCH = 3
NUM_EXPERTS = 4
TARGETS: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((3, 2), ()),
    ((5, 0), ()),
    ((0, 1), ()),
    ((2, 3), (1,)),
    ((4, 4), ()),
    ((1, 1), (0, 1)),
    ((5, 5), ()),
)
"""(rows of each attention worker, FFN workers that skip it) of one target after another."""


def entry(sequence: int, tokens_A: tuple[int, ...]) -> PlanEntry:
    """A target without a plan."""
    return PlanEntry(
        kind=EntryKind.PLAN,
        epoch=EPOCH,
        sequence=sequence,
        target=Target(0, 0, sequence),
        phase=Phase.DECODE,
        tokens_A=tokens_A,
        demand_crc=0,
        shares=(),
        copies=(),
        start=CopyStart.NOW,
        cancels=-1,
    )


class Told:
    """A link that keeps what is written."""

    def __init__(self) -> None:
        self.replies: list[bytes] = []

    async def write(self, remote: Any, offset: int, data: Any, *, notify: Any = None, timeout_us: float) -> None:
        self.replies.append(bytes(data))


async def take_part(rank: int, size: int, folder: Path) -> None:
    """Runs all targets and writes what was gathered and replied."""
    calls = FakeCalls()
    driver = Driver(calls)
    device = CudaDevice(
        driver, WallClock(), asyncio.get_running_loop(), current=lambda handle: contextlib.nullcontext()
    )
    memory = DeviceMemory(driver, None)
    device.on_close(memory.close)

    async def meet(own: int | None) -> tuple[str, int]:
        if own is not None:
            sys.stdout.write(f"{own}\n")
            sys.stdout.flush()
            return "127.0.0.1", own
        return "127.0.0.1", int(sys.stdin.readline())

    collective = await Collective.join(
        meet, backend="gloo", rank=rank, size=size, epoch=EPOCH, timeout_s=60, ordinal=None
    )
    links = [Told(), Told()]
    peers = []
    for a, link in enumerate(links):
        with (folder / f"inputs-{a}").open("r+b") as file:
            region = memoryview(mmap.mmap(file.fileno(), 0))
        peers.append(AttentionPeer(link=link, key=None, inputs=InputReader(region, LAYOUT, EPOCH)))  # type: ignore[arg-type]
    group = GpuGroup(
        driver,
        memory,
        device.model_stream,
        device.drain,
        rank=rank,
        epoch=EPOCH,
        layout=LAYOUT,
        peers_A=peers,
        timeout_us=1e6,
        collective=collective,
    )
    assert group.name == "gloo"
    room = CudaStaging(
        memory,
        max_tokens=2 * LAYOUT.max_tokens,
        hidden_size=LAYOUT.hidden,
        top_k=LAYOUT.top_k,
        num_rows=2,
        num_experts=NUM_EXPERTS,
    )
    gathered: list[list[Any] | None] = []
    stream = device.model_stream
    for sequence, (tokens_A, skips) in enumerate(TARGETS):
        one = entry(sequence, tokens_A)
        # The parent writes a target's inputs once both workers are through with the one before, and says so.
        assert sys.stdin.readline() == "go\n"
        assert group.missing(one) == ()
        if rank in skips:
            group.skip(one)
            gathered.append(None)
        else:
            group.gather(stream, one, room)

            def experts(rank: int = rank) -> None:
                room.out_now_TD.copy_(room.hidden_now_TD * (rank + 1))

            stream.run(_work(), experts)
            group.reduce(stream, one, room)
            done = stream.record()
            stream.flush()
            await done.wait(timeout_us=20e6)
            gathered.append([room.hidden_now_TD.tolist(), room.ids_now_TK.tolist(), room.weights_now_TK.tolist()])
            await group.reply(one)
        sys.stdout.write("done\n")
        sys.stdout.flush()
    group.close()
    device.close()
    assert calls.mistakes == []
    assert set(calls.live.values()) == {0}, calls.live
    replies = [[reply.hex() for reply in link.replies] for link in links]
    (folder / f"found-{rank}.json").write_text(json.dumps({"gathered": gathered, "replies": replies}))


def _work() -> Any:
    from afore.workers.device.base import Work

    return Work("experts", None)


def rows_of(sequence: int, a: int, tokens: int) -> tuple[Any, Any, Any]:
    """Inputs that tell their target, worker and row."""
    row_T = np.arange(tokens)[:, None]
    hidden_TD = (100 * sequence + 10 * a + row_T + np.arange(LAYOUT.hidden) / 8).astype(np.float32)
    ids_TK = ((sequence + a + row_T + np.arange(LAYOUT.top_k)) % NUM_EXPERTS).astype(np.int32)
    weights_TK = (1 / (1 + sequence + a + row_T + np.arange(LAYOUT.top_k))).astype(np.float32)
    return hidden_TD, ids_TK, weights_TK


if __name__ == "__main__":
    rank_, size_, folder_ = sys.argv[1:]
    asyncio.run(take_part(int(rank_), int(size_), Path(folder_)))
