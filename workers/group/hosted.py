"""The group of FFN workers on GPUs whose attention workers are in host memory: rows go up with a target, partial rows come down.

As in ``shared``, nothing is exchanged between FFN workers, and each reads the one region that an attention worker writes. That
region is pinned in place where the system lets it be, so that the GPU reads it by itself; else rows pass through a pinned copy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from afore.core.plan import PlanEntry
from afore.transport.exchange import ExchangeLayout, Inputs
from afore.transport.records import WORD
from afore.workers.cuda_target import CudaStaging
from afore.workers.device.base import Stream, Work
from afore.workers.device.cuda.driver import Driver, Span
from afore.workers.device.cuda.memory import DeviceMemory, address_of
from afore.workers.device.cuda.pinned import PinnedRegions
from afore.workers.group.shared import AttentionPeer, SharedGroup
from afore.workers.staging import Staging

_log = logging.getLogger(__name__)


class HostedGroup(SharedGroup):
    """One worker's side. ``stream``: the driver's, behind the model stream. ``drain`` blocks until it is past everything."""

    def __init__(
        self,
        driver: Driver,
        memory: DeviceMemory,
        stream: int,
        drain: Callable[[], None],
        *,
        rank: int,
        epoch: int,
        layout: ExchangeLayout,
        peers_A: Sequence[AttentionPeer],
        timeout_us: float,
    ) -> None:
        self._driver = driver
        self._memory = memory
        self._stream = stream
        self._drain = drain
        self._pinned = PinnedRegions(driver)
        super().__init__(rank=rank, epoch=epoch, layout=layout, peers_A=peers_A, timeout_us=timeout_us)
        self._in_place_A = [self._pinned.add(peer.inputs.memory) for peer in peers_A]
        if not all(self._in_place_A):
            _log.warning(
                "inputs cannot be pinned where they lie (%s): every row is copied once more", self._pinned.reason
            )
        rows = layout.max_tokens
        self._bounce_MA: list[list[Inputs | None]] = [
            [
                None
                if in_place
                else (
                    memory.pinned((rows, layout.hidden), np.float32),
                    memory.pinned((rows, layout.top_k), np.int32),
                    memory.pinned((rows, layout.top_k), np.float32),
                )
                for in_place in self._in_place_A
            ]
            for _ in range(layout.num_microbatches)
        ]

    def gather(self, stream: Stream, entry: PlanEntry, staging: Staging) -> None:
        """See ``Group.gather``: enqueues uploads of all rows."""
        assert isinstance(staging, CudaStaging), "a GPU's group needs a GPU's buffers"
        tokens = sum(entry.tokens_A)
        work = Work("gather", entry.target, tokens=tokens, nbytes=self._input_nbytes(tokens))
        stream.run(work, partial(self._upload, entry, staging))

    def reduce(self, stream: Stream, entry: PlanEntry, staging: Staging) -> None:
        """See ``Group.reduce``: enqueues downloads of partial rows into the replies."""
        assert isinstance(staging, CudaStaging), "a GPU's group needs a GPU's buffers"
        tokens = sum(entry.tokens_A)
        work = Work("reduce", entry.target, tokens=tokens, nbytes=tokens * self._layout.hidden * 4)
        stream.run(work, partial(self._download, entry, staging))

    def close(self) -> None:
        """See ``Group.close``."""
        self._drain()
        self._pinned.close()
        super().close()

    def _reply_storage(self) -> npt.NDArray[np.uint64] | None:
        storage: npt.NDArray[np.uint64] = self._memory.pinned((self._layout.reply_nbytes // WORD,), np.uint64)
        return storage

    # On the stream

    def _upload(self, entry: PlanEntry, room: CudaStaging) -> None:
        spans: list[Span] = []
        row = 0
        for a, tokens in enumerate(entry.tokens_A):
            if not tokens:
                continue
            inputs = self._inputs(entry, a)
            # They were there when this was enqueued, and their owner may rewrite them only after this worker's reply.
            assert inputs is not None, f"inputs of {entry.target} from attention worker {a} are gone"
            bounce = self._bounce_MA[entry.target.microbatch][a]
            rooms = room.device_hidden_TD, room.device_ids_TK, room.device_weights_TK
            for index, (source, there) in enumerate(zip(inputs, rooms, strict=True)):
                if bounce is not None:
                    np.copyto(bounce[index][:tokens], source)
                    source = bounce[index][:tokens]
                spans.append(Span(address_of(there[row]), address_of(source), source.nbytes))
            row += tokens
        room.tokens = row
        self._driver.copy(spans, self._stream)

    def _download(self, entry: PlanEntry, room: CudaStaging) -> None:
        spans: list[Span] = []
        row = 0
        for a, tokens in enumerate(entry.tokens_A):
            if tokens:
                rows_TD = self._replies_MA[entry.target.microbatch][a].rows(tokens)
                spans.append(Span(address_of(rows_TD), address_of(room.device_out_TD[row]), rows_TD.nbytes))
                row += tokens
        self._driver.copy(spans, self._stream)
