"""Where an attention worker's rows lie, as an FFN worker on a GPU reads and writes them: in host memory, or in a GPU's.

A row goes up from pinned host memory, from a pinned copy where the region cannot be pinned, or is read where it lies in a GPU's
memory. Partial rows go down into a pinned reply, or into the attention worker's GPU memory.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from afore.transport.exchange import ExchangeLayout, Inputs, Part, ReplyBuffer
from afore.transport.records import WORD
from afore.workers.device.cuda.memory import DeviceMemory, address_of
from afore.workers.gpu_rows import GpuInputs, OpenedRows

Addresses = tuple[int, int, int]
"""Of hidden, ids and weights."""


class RowEnd(Protocol):
    """One attention worker's rows."""

    @property
    def opened(self) -> OpenedRows | None:
        """Its GPU memory; None: its rows lie in host memory."""
        ...

    def sources(self, microbatch: int, inputs: Inputs, part: Part) -> Addresses:
        """Where rows of ``part`` can be copied from; ``inputs`` are the views of the host's slot."""
        ...

    def destination(self, microbatch: int) -> int:
        """Where partial rows can be copied to: one behind the other, whichever part of the target they are."""
        ...

    def reply(self, microbatch: int) -> ReplyBuffer:
        """What is sent."""
        ...


class HostEnd:
    """Rows in host memory. ``in_place``: GPUs reach the region where it lies."""

    opened: OpenedRows | None = None

    def __init__(self, memory: DeviceMemory, layout: ExchangeLayout, rank: int, epoch: int, *, in_place: bool) -> None:
        rows, count = layout.max_tokens, layout.num_microbatches
        self._replies_M = [
            ReplyBuffer(layout, rank, epoch, memory.pinned((layout.reply_nbytes // WORD,), np.uint64))
            for _ in range(count)
        ]
        self._bounce_M: list[Inputs | None] = [
            None
            if in_place
            else (
                memory.pinned((rows, layout.hidden), np.float32),
                memory.pinned((rows, layout.top_k), np.int32),
                memory.pinned((rows, layout.top_k), np.float32),
            )
            for _ in range(count)
        ]

    def sources(self, microbatch: int, inputs: Inputs, part: Part) -> Addresses:
        """See ``RowEnd``. Copies rows once more where the region is not pinned."""
        first, count = part
        bounce = self._bounce_M[microbatch]
        if bounce is not None:
            for room, source in zip(bounce, inputs, strict=True):
                np.copyto(room[first : first + count], source[first : first + count])
            inputs = bounce
        hidden_TD, ids_TK, weights_TK = inputs
        return _at(hidden_TD, first), _at(ids_TK, first), _at(weights_TK, first)

    def destination(self, microbatch: int) -> int:
        """See ``RowEnd``."""
        return address_of(self._replies_M[microbatch].rows(1))

    def reply(self, microbatch: int) -> ReplyBuffer:
        """See ``RowEnd``."""
        return self._replies_M[microbatch]


class GpuEnd:
    """Rows in an attention worker's GPU memory."""

    def __init__(self, opened: OpenedRows, layout: ExchangeLayout, rank: int, epoch: int) -> None:
        self.opened: OpenedRows | None = opened
        self._rank = rank
        self._inputs_M: list[GpuInputs] = opened.inputs_M
        self._to_M = [address_of(replies_N[rank]) for replies_N in opened.replies_MN]
        self._header = ReplyBuffer(layout, rank, epoch)

    def sources(self, microbatch: int, inputs: Inputs, part: Part) -> Addresses:
        """See ``RowEnd``."""
        first, _ = part
        hidden_TD, ids_TK, weights_TK = self._inputs_M[microbatch]
        return address_of(hidden_TD[first:]), address_of(ids_TK[first:]), address_of(weights_TK[first:])

    def destination(self, microbatch: int) -> int:
        """See ``RowEnd``."""
        return self._to_M[microbatch]

    def reply(self, microbatch: int) -> ReplyBuffer:
        """See ``RowEnd``: a header and a trailer, made for each write anew."""
        return self._header


def _at(array: npt.NDArray[np.generic], row: int) -> int:
    return int(array.ctypes.data) + row * array.strides[0]
