"""Inputs and replies of an attention worker in its GPU's memory: one allocation, which FFN workers open by its handle.

The exchange region in host memory (``transport/exchange.py``) keeps the headers, and says what has come; only the rows lie here.
Its owner writes an input slot and awaits the GPU before it publishes the header; an FFN worker awaits the GPU before it sends
the header of its reply. So whoever has read a header may read the rows behind it, in whatever stream.

Letters: M microbatches, N FFN workers, T most tokens of the worker in a microbatch, D hidden size, K experts per token.
"""

from __future__ import annotations

from typing import Any

import torch

from afore.core.topology import ATTENTION, member_name
from afore.transport.exchange import ExchangeLayout
from afore.workers.cuda_store import SHARED_NBYTES
from afore.workers.device.cuda.driver import Driver
from afore.workers.device.cuda.ipc import HandleTable, OpenedMemory
from afore.workers.device.cuda.memory import DeviceMemory
from afore.workers.replies import PendingReplies

_ALIGNMENT = 256
GpuInputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""hidden [T, D] float32, ids [T, K] int32, weights [T, K] float32."""


class RowViews:
    """Tensors of every slot, over an allocation that somebody else owns."""

    def __init__(self, memory: DeviceMemory, base: int, layout: ExchangeLayout) -> None:
        rows, hidden, top_k = layout.max_tokens, layout.hidden, layout.top_k
        self._memory, self._at = memory, base
        self.inputs_M: list[GpuInputs] = [
            (
                self._next((rows, hidden), torch.float32),
                self._next((rows, top_k), torch.int32),
                self._next((rows, top_k), torch.float32),
            )
            for _ in range(layout.num_microbatches)
        ]
        self.replies_MN = [
            [self._next((rows, hidden), torch.float32) for _ in range(layout.num_ffn)]
            for _ in range(layout.num_microbatches)
        ]

    @staticmethod
    def nbytes(layout: ExchangeLayout) -> int:
        """Bytes of the allocation, a multiple of what the driver gives out."""
        wide, narrow = layout.max_tokens * layout.hidden * 4, layout.max_tokens * layout.top_k * 4
        slots = layout.num_microbatches * (_aligned(wide) + 2 * _aligned(narrow) + layout.num_ffn * _aligned(wide))
        return _aligned(slots, SHARED_NBYTES)

    def _next(self, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        tensor = self._memory.view(self._at, shape, dtype)
        self._at += _aligned(shape[0] * shape[1] * 4)
        return tensor


class GpuRows(RowViews):
    """An attention worker's own."""

    def __init__(
        self,
        driver: Driver,
        memory: DeviceMemory,
        ordinal: int,
        layout: ExchangeLayout,
        buffer: memoryview,
        process: int | None = None,
    ) -> None:
        """Publishes the handle in ``buffer``, ``ROWS_NBYTES`` of a region. Raises ``CudaError``."""
        nbytes = self.nbytes(layout)
        base = memory.allocate(nbytes)
        super().__init__(memory, base, layout)
        HandleTable.export(driver, driver.device_uuid(ordinal), [(base, nbytes)], process).write(buffer)

    def sum_TD(self, replies: PendingReplies) -> torch.Tensor:
        """The routed sum [T, D] on torch's current stream: rows added in rank order, so that the same parts give the same bits."""
        parts_N, tokens = replies.parts_N, replies.num_tokens
        slots_N = self.replies_MN[replies.target.microbatch]
        out_TD = torch.zeros_like(slots_N[0][:tokens])
        for slot_TD, (first, count) in zip(slots_N, parts_N, strict=True):
            out_TD[first : first + count] += slot_TD[:count]
        return out_TD


class OpenedRows(RowViews):
    """Another worker's, opened here."""

    def __init__(
        self,
        driver: Driver,
        memory: DeviceMemory,
        layout: ExchangeLayout,
        attention: int,
        buffer: memoryview,
        process: int | None = None,
        gpu: bytes = b"",
    ) -> None:
        """``buffer``: the mapped region with the handle of attention worker ``attention``. ``gpu``: where this worker is.

        Raises ``WireError``, ``CudaError``.
        """
        name = member_name(ATTENTION, attention)
        table = HandleTable.read(buffer, name, 1)
        self.near = table.gpu == gpu
        """Whether it is memory of the same GPU, which kernels may read again and again."""
        self._opened = OpenedMemory(driver, table, name, process)
        super().__init__(memory, self._opened.addresses[0], layout)

    def close(self) -> None:
        """Unmaps it; nothing may be under way. Idempotent."""
        self.inputs_M, self.replies_MN = [], []
        self._opened.close()


def rows_of(inputs: GpuInputs, tokens: int) -> tuple[Any, Any, Any]:
    """The first ``tokens`` rows of a slot."""
    hidden_TD, ids_TK, weights_TK = inputs
    return hidden_TD[:tokens], ids_TK[:tokens], weights_TK[:tokens]


def _aligned(nbytes: int, to: int = _ALIGNMENT) -> int:
    return -(-nbytes // to) * to
