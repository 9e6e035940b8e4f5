"""A GPU to measure on: two streams, device memory, made-up experts of any size, and the time between two events.

``Bench`` runs as well over a driver that stands for a GPU, so that everything here runs in tests before a GPU has seen it.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from afore.core.errors import HostError
from afore.models.expert_form import SILU_GATED
from afore.workers.device.cuda.device import torch_streams
from afore.workers.device.cuda.driver import Driver, Span, load_driver
from afore.workers.device.cuda.kernels import (
    TORCH,
    Implementation,
    applicable,
    torch_implementation,
    triton_missing,
)
from afore.workers.device.cuda.memory import DeviceMemory, address_of
from afore.workers.device.cuda.stopwatch import Sleep, Stopwatch, Timed, torch_sleep


class Bench:
    """One GPU, opened for measuring. ``on_gpu`` False: the driver's memory is the host's."""

    def __init__(
        self,
        driver: Driver,
        implementation: Implementation,
        *,
        on_gpu: bool = True,
        ordinal: int = 0,
        sleep: Sleep | None = None,
    ) -> None:
        """``sleep``: what holds a stream where there is no GPU; on one, torch does."""
        self.driver = driver
        self.implementation = implementation
        self.on_gpu = on_gpu
        self.ordinal = ordinal
        self.context = driver.retain_context(ordinal)
        least, greatest = driver.priority_range()
        self.compute, self.copies = driver.create_stream(greatest), driver.create_stream(least)
        self.memory = DeviceMemory(driver, ordinal if on_gpu else None)
        self._events: list[int] = []
        self._current = torch_streams(ordinal) if on_gpu else (lambda handle: contextlib.nullcontext())
        self.without_triton = triton_missing() if implementation.name == TORCH and on_gpu else ""
        """Why nothing here is computed by our own kernels; empty where it is."""
        self._watch = Stopwatch(driver, self._current, torch_sleep(self._current) if on_gpu else sleep)

    @classmethod
    def open(cls) -> Bench:
        """This machine's first GPU. Raises ``HostError``."""
        driver = load_driver(name="gpu")
        if not torch.cuda.is_available():
            problem = f"torch {torch.__version__} was built without CUDA, or for a newer driver"
            raise HostError("GPU", problem, "install a torch for this driver's CUDA")
        torch.cuda.set_device(0)
        bench = cls(driver, applicable(torch.float32)[0])
        bench.try_out()
        return bench

    def try_out(self) -> None:
        """Computes a target of a few rows. Where our kernels do not compile or run, torch's are taken from here on; why is kept."""
        if self.implementation.name == TORCH:
            return
        size = ExpertSize(name="a few rows", hidden_size=64, expert_size=32, rows=2, dtype=torch.float32)
        try:
            with self.on_compute():
                Layer(self, size, most_pairs=32).experts(2, 16)()
            self.finish()
        except Exception as error:
            first_line = (str(error).splitlines() or [""])[0]
            self.without_triton = f"our kernels do not work here: {type(error).__name__}: {first_line}"
            self.implementation = torch_implementation()

    def ways(self, dtype: torch.dtype, widths: tuple[int, ...]) -> list[Implementation]:
        """What computes experts of ``dtype`` here."""
        if not self.on_gpu or self.without_triton:
            return [self.implementation]
        return applicable(dtype, self.capability, widths)

    @property
    def device(self) -> torch.device:
        """Where tensors lie."""
        return self.memory.torch_device

    @property
    def capability(self) -> tuple[int, int]:
        """The GPU's compute capability."""
        ask = self.driver.attribute
        return ask("COMPUTE_CAPABILITY_MAJOR", self.ordinal), ask("COMPUTE_CAPABILITY_MINOR", self.ordinal)

    def on_compute(self) -> contextlib.AbstractContextManager[object]:
        """torch enqueues on the compute stream in this block."""
        return self._current(self.compute)

    def event(self) -> int:
        """A new event; ``close`` destroys it."""
        self._events.append(self.driver.create_event())
        return self._events[-1]

    def mark(self, stream: int) -> int:
        """An event recorded now."""
        event = self.event()
        self.driver.record(event, stream)
        return event

    def finish(self) -> None:
        """Blocks until both streams are idle."""
        for stream in (self.compute, self.copies):
            self.driver.synchronise(self.mark(stream))

    @property
    def late(self) -> int:
        """Measurements that have time of the host's in them, because it took longer to enqueue than a stream can be held."""
        return self._watch.late

    def time_us(self, enqueue: Callable[[], None], stream: int, *, repeats: int) -> float:
        """Median microseconds that the GPU takes for what ``enqueue`` puts on ``stream``."""
        return statistics.median(each[0].took_us for each in self.times([(stream, enqueue)], repeats=repeats))

    def times(self, works: Sequence[tuple[int, Callable[[], None]]], *, repeats: int) -> list[list[Timed]]:
        """So many times, what each of ``works`` takes while all of them run, each on its stream, begun at one instant."""
        for stream, enqueue in works:  # compiles
            with self._current(stream):
                enqueue()
        self.finish()
        return [self._watch.together(works) for _ in range(repeats)]

    def close(self) -> None:
        """Gives everything back."""
        self.finish()
        for event in self._events:
            self.driver.destroy_event(event)
        for stream in (self.compute, self.copies):
            self.driver.destroy_stream(stream)
        self.memory.close()
        self.driver.release_context(self.ordinal)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSize:
    """What a layer's experts are like."""

    name: str
    hidden_size: int
    expert_size: int
    rows: int
    """Store rows of one worker: primaries and redundant slots."""
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one expert: what a copy moves."""
        return 3 * self.hidden_size * self.expert_size * self.dtype.itemsize

    def describe(self) -> dict[str, Any]:
        """For reports."""
        return {
            "name": self.name,
            "hidden_size": self.hidden_size,
            "expert_size": self.expert_size,
            "store_rows": self.rows,
            "dtype": str(self.dtype).removeprefix("torch."),
            "expert_mib": self.nbytes / 2**20,
        }


GLM_AIR = ExpertSize(name="GLM-4.5-Air", hidden_size=4096, expert_size=1408, rows=36, dtype=torch.bfloat16)
"""Its routed experts, 32 primaries of 128 on each of four workers, and four slots."""


class Layer:
    """One layer's experts on a bench, and targets of as many full tiles as are asked for."""

    def __init__(self, bench: Bench, size: ExpertSize, *, most_pairs: int) -> None:
        self.bench, self.size, self._most = bench, size, most_pairs
        rows, hidden, expert = size.rows, size.hidden_size, size.expert_size
        memory = bench.memory
        with bench.on_compute():
            self.gate_up = memory.tensor((rows, 2 * expert, hidden), size.dtype).normal_(0, hidden**-0.5)
            self.down = memory.tensor((rows, hidden, expert), size.dtype).normal_(0, expert**-0.5)
            self.act = memory.tensor((most_pairs, expert), size.dtype).zero_()
            self.y = memory.tensor((most_pairs, hidden), torch.float32).zero_()
            self.hidden = memory.tensor((most_pairs, hidden), torch.float32).normal_()
            self.out = memory.tensor((most_pairs, hidden), torch.float32)
            self.weight = memory.tensor((most_pairs, 1), torch.float32).fill_(1.0)
            self.pairs = memory.tensor((most_pairs,), torch.int32)
            self.pairs.copy_(torch.arange(most_pairs, dtype=torch.int32))
            self._starts: dict[tuple[int, int, int], torch.Tensor] = {}

    def experts(
        self, tiles: int, tile_tokens: int, implementation: Implementation | None = None, *, rows: int | None = None
    ) -> Callable[[], None]:
        """What enqueues a target of ``tiles`` full tiles, spread over the first ``rows`` rows, or all. A token has one choice."""
        pairs = tiles * tile_tokens
        if pairs > self._most:
            raise ValueError(f"{tiles} tiles of {tile_tokens} are more than {self._most} pairs")
        start_S1 = self._start(tiles, tile_tokens, min(rows or self.size.rows, self.size.rows))
        chosen = implementation or self.bench.implementation

        def enqueue() -> None:
            chosen.experts(
                self.hidden[:pairs],
                self.weight[:pairs],
                self.pairs,
                self.pairs,
                start_S1,
                self.gate_up,
                self.down,
                None,
                self.act,
                self.y,
                self.out[:pairs],
                SILU_GATED,
                tile_tokens,
            )

        return enqueue

    def row_spans(self, source: int, destination: int) -> list[Span]:
        """What copies one row's expert into another row."""
        spans = []
        for part in (self.gate_up, self.down):
            spans.append(Span(address_of(part[destination]), address_of(part[source]), part[source].nbytes))
        return spans

    def _start(self, tiles: int, tile_tokens: int, used: int) -> torch.Tensor:
        key = (tiles, tile_tokens, used)
        if key not in self._starts:
            rows = self.size.rows
            each = torch.zeros(rows, dtype=torch.int32)
            each[:used] = tiles // used
            each[: tiles % used] += 1
            host_S1 = torch.zeros(rows + 1, dtype=torch.int32)
            host_S1[1:] = torch.cumsum(each * tile_tokens, 0)
            with self.bench.on_compute():
                start_S1 = self.bench.memory.tensor((rows + 1,), torch.int32)
                start_S1.copy_(host_S1)
            self._starts[key] = start_S1
        return self._starts[key]
