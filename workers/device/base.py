"""The device's seam: streams, events, copies and kernels, the same on CPUs, emulated devices and (later) CUDA.

A stream runs what is enqueued on it in order; the host never waits for it except by awaiting an ``Event``. Work is described by
a ``Work`` record (an emulated device charges time from it) beside the closure that does it (a real device runs it).
Waiting on an event that nobody has recorded is a mistake of the caller and raises: CUDA would silently not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from afore.core.record import record
from afore.core.target import Target
from afore.models.expert_form import SILU_GATED, ExpertForm

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]


@record
class Work:
    """What a piece of work costs, in the units a cost profile speaks of. ``span`` is its name in traces."""

    span: str
    target: Target | None
    tokens: int = 0
    """Rows of hidden states."""
    pairs: int = 0
    """Token-expert pairs."""
    tiles: int = 0
    """Tiles of M_tile pairs of one expert, summed over experts."""
    context: int = 0
    """Cached positions that attention reads, summed over tokens."""
    nbytes: int = 0


@record
class CopyJob:
    """One expert's weights from the primary on ``source`` into a redundant slot on ``destination`` (ranks, for port contention)."""

    source: int
    destination: int
    nbytes: int
    run: Callable[[], None]
    """Does the copy on this device's memory; called on the stream it was enqueued on."""


class Event(Protocol):
    """A point in a stream's order."""

    @property
    def done(self) -> bool: ...

    @property
    def completed_ns(self) -> int:
        """When the stream reached this point (the clock's nanoseconds). Only valid once ``done``."""
        ...

    async def wait(self, *, timeout_us: float) -> None:
        """Awaits completion in the event loop. Raises ``DeadlineExceeded``, or the error of the work before it."""
        ...


class Stream(Protocol):
    """An ordered queue of work."""

    @property
    def name(self) -> str: ...

    def run(self, work: Work, do: Callable[[], None]) -> None:
        """Enqueues ``do``."""
        ...

    def copy(self, work: Work, jobs: Sequence[CopyJob]) -> None:
        """Enqueues a batch of copies; contention at ports is the device's business."""
        ...

    def wait(self, event: Event) -> None:
        """What is enqueued from now on starts after ``event``, which must have been recorded."""
        ...

    def record(self) -> Event:
        """An event that completes when all that was enqueued so far is finished."""
        ...

    def flush(self) -> None:
        """Hands what is enqueued to the device: devices with a costly hand-over collect a target's work until here."""
        ...


@dataclass(slots=True)
class Pairs:
    """A worker's pairs of a target, grouped by store row (S rows), in gathered order within a row.

    Preallocated once by ``Pairs.empty`` and filled for every target; the first ``count`` are valid.
    """

    token_P: I32
    """Row of hidden_TD of each pair."""
    k_P: I32
    """Which of the token's K choices the pair is (its routing weight is weights_TK[token, k])."""
    start_S1: I32
    """[S+1] pairs of store row s are start_S1[s] … start_S1[s+1]-1."""
    expert_S: I32
    """[S] expert that each store row serves in this target, -1 for rows without pairs: what a tagged store compares with."""
    count: int = 0

    @classmethod
    def empty(cls, capacity: int, num_rows: int) -> Pairs:
        """Room for ``capacity`` pairs (the most tokens of a target times K) over ``num_rows`` store rows."""
        return cls(
            token_P=np.zeros(capacity, dtype=np.int32),
            k_P=np.zeros(capacity, dtype=np.int32),
            start_S1=np.zeros(num_rows + 1, dtype=np.int32),
            expert_S=np.full(num_rows, -1, dtype=np.int32),
        )


class Kernels(Protocol):
    """What runs on a stream for a target."""

    def partition(
        self,
        ids_TK: I32,
        shares_X4: I32,
        primary_row_E: I32,
        my_rank: int,
        num_rows: int,
        first_redundant: int,
        out: Pairs,
    ) -> None:
        """Exact share of this worker (paper eq. 11) in gathered order (attention rank, row, k).

        ``shares_X4``: expert, worker, slot, count, by expert then worker. ``primary_row_E``: row of each expert's primary here,
        -1 elsewhere. Raises ``WireError`` naming the gathered row of an unknown expert id, ``PlanError`` for shares that break a
        rule, ``ValueError`` when ``out`` is too small.
        """
        ...

    def grouped_mlp(
        self,
        hidden_TD: F32,
        weights_TK: F32,
        pairs: Pairs,
        gate_up_SFD: Any,
        down_SDI: Any,
        out_TD: F32,
        form: ExpertForm = SILU_GATED,
        biases: Any = None,
    ) -> None:
        """out[t] = sum over this worker's pairs (t, k) of weights[t, k] * down(silu(gate x) * up x); rows without pairs are 0.

        ``form`` says another activation and whether both products add ``biases`` ([S, F], [S, D]).
        """
        ...


class Device(Protocol):
    """One worker's device."""

    @property
    def name(self) -> str: ...

    @property
    def model_stream(self) -> Stream: ...

    @property
    def migration_stream(self) -> Stream: ...

    @property
    def kernels(self) -> Kernels: ...

    def close(self) -> None:
        """Ends threads and frees streams; idempotent. Work that has not started is dropped."""
        ...


@runtime_checkable
class OwnCollectives(Protocol):
    """A device with streams for collectives: those of gathering and of reducing.

    Beside the model stream, a target's gathering overlaps with the experts of the target ahead, and its reducing with the next's.
    """

    @property
    def collective_streams(self) -> tuple[Stream, Stream]: ...


def collective_streams(device: Device) -> tuple[Stream, Stream]:
    """Where a device gathers and reduces: on the model stream, unless it has streams of its own for it."""
    return (
        device.collective_streams if isinstance(device, OwnCollectives) else (device.model_stream, device.model_stream)
    )
