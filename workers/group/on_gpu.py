"""The group of FFN workers on GPUs: how a target's rows come to each of them, and partial rows go back.

Three forms, by where workers are:

- ``hosted``: attention workers write rows into host memory; each FFN worker uploads all of them, and sends partial rows;
- ``ipc``: rows lie in the attention workers' GPU memory, written once; each FFN worker opens it and reads them in place, and
  writes its partial rows there, where their owner sums them: nothing of a target passes through the host but headers;
- ``nccl``: each FFN worker, on a GPU of its own, takes an even part of the rows from where they lie; the parts are gathered among
  the workers on the model stream, partial rows are summed among them, and each sends the rows of its part.

With ``nccl`` every worker makes the same calls for every target, in ring order: one that skips an aborted target takes part with
rows of zeros.

Letters: N workers, T rows of a target, P rows of a part (N·P ≥ T), D hidden size, K experts per token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch

from afore.core.plan import PlanEntry
from afore.transport import bells
from afore.transport.exchange import ExchangeLayout, Part
from afore.workers.cuda_target import CudaStaging
from afore.workers.device.base import Stream, Work
from afore.workers.device.cuda.driver import Driver, Span
from afore.workers.device.cuda.memory import DeviceMemory, address_of
from afore.workers.device.cuda.pinned import PinnedRegions
from afore.workers.device.cuda.streams import CudaStream
from afore.workers.gpu_rows import OpenedRows, rows_of
from afore.workers.group.collective import Collective
from afore.workers.group.parts import own_rows, part_rows, parts_within
from afore.workers.group.row_ends import GpuEnd, HostEnd, RowEnd
from afore.workers.group.shared import AttentionPeer, SharedGroup
from afore.workers.staging import Staging

_log = logging.getLogger(__name__)


class GpuGroup(SharedGroup):
    """One worker's side. ``drain`` blocks until the GPU is past everything."""

    def __init__(
        self,
        driver: Driver,
        memory: DeviceMemory,
        stream: CudaStream,
        drain: Callable[[], None],
        *,
        rank: int,
        epoch: int,
        layout: ExchangeLayout,
        peers_A: Sequence[AttentionPeer],
        timeout_us: float,
        collective: Collective | None = None,
        process: int | None = None,
        gpu: bytes = b"",
    ) -> None:
        """``gpu``: this worker's. ``collective``: of the workers that gather and reduce together; none: each reads all rows.

        Raises ``WireError``, ``CudaError`` where an attention worker's GPU memory cannot be opened.
        """
        super().__init__(rank=rank, epoch=epoch, layout=layout, peers_A=peers_A, timeout_us=timeout_us)
        self._driver = driver
        self._model = stream
        self._drain = drain
        self._pinned = PinnedRegions(driver)
        self._collective = collective
        self._ends_A: list[RowEnd] = []
        try:
            for a, peer in enumerate(peers_A):
                if peer.rows is not None:
                    opened = OpenedRows(driver, memory, layout, a, peer.rows, process, gpu)
                    self._ends_A.append(GpuEnd(opened, layout, rank, epoch))
                else:
                    in_place = self._pinned.add(peer.inputs.memory)
                    self._ends_A.append(HostEnd(memory, layout, rank, epoch, in_place=in_place))
                    if not in_place:
                        _log.warning(
                            "inputs cannot be pinned where they lie (%s): every row is copied once more",
                            self._pinned.reason,
                        )
        except Exception:
            self.close()
            raise
        if collective is not None:
            most = part_rows(len(peers_A) * layout.max_tokens, collective.size)
            self._own_hidden_PD = memory.tensor((most, layout.hidden), torch.float32)
            self._own_ids_PK = memory.tensor((most, layout.top_k), torch.int32)
            self._own_weights_PK = memory.tensor((most, layout.top_k), torch.float32)
            self._own_choices_PX = memory.tensor((most, 2 * layout.top_k), torch.int32)
            self._choices_TX = memory.tensor((collective.size * most, 2 * layout.top_k), torch.int32)
            self._hidden_TD = memory.tensor((collective.size * most, layout.hidden), torch.float32)
            self._sums_TD = memory.tensor((collective.size * most, layout.hidden), torch.float32)

    @property
    def name(self) -> str:
        """``hosted``, ``ipc`` or ``nccl``: what logs and tables call it."""
        if self._collective is not None:
            return self._collective.backend
        return "ipc" if self._ends_A and all(end.opened is not None for end in self._ends_A) else "hosted"

    def gather(self, stream: Stream, entry: PlanEntry, staging: Staging) -> None:
        """See ``Group.gather``: enqueues what brings all rows here, or says where they lie."""
        assert isinstance(staging, CudaStaging), "a GPU's group needs a GPU's buffers"
        tokens = sum(entry.tokens_A)
        work = Work("gather", entry.target, tokens=tokens, nbytes=self._input_nbytes(tokens))
        stream.run(work, partial(self._bring, entry, staging))

    def reduce(self, stream: Stream, entry: PlanEntry, staging: Staging) -> None:
        """See ``Group.reduce``: enqueues what takes partial rows to where they are replied."""
        assert isinstance(staging, CudaStaging), "a GPU's group needs a GPU's buffers"
        tokens = sum(entry.tokens_A)
        work = Work("reduce", entry.target, tokens=tokens, nbytes=tokens * self._layout.hidden * 4)
        stream.run(work, partial(self._return, entry, staging))

    def skip(self, entry: PlanEntry) -> None:
        """See ``Group.skip``: with ``nccl`` this worker takes part all the same, with rows of zeros."""
        if self._collective is not None:
            self._model.run(Work("gather", entry.target), partial(self._gather_nothing, entry))
            self._model.run(Work("reduce", entry.target), partial(self._reduce_nothing, entry))
            self._model.flush()

    async def reply(self, entry: PlanEntry) -> None:
        """See ``Group.reply``."""
        target = entry.target
        bell, offset = bells.REPLY(target.microbatch, self._rank), self._reply_offsets_M[target.microbatch]
        parts_A = parts_within(entry.tokens_A, self._own(entry))
        for a, tokens in enumerate(entry.tokens_A):
            if tokens:
                peer, end = self._peers_A[a], self._ends_A[a]
                here = end.opened is None
                packed = end.reply(target.microbatch).pack(target, tokens, parts_A[a], here=here)
                await peer.link.write(peer.key, offset, packed, notify=bell, timeout_us=self._timeout_us)

    def close(self) -> None:
        """See ``Group.close``."""
        if self._collective is not None:
            self._collective.leave()
        self._drain()
        self._pinned.close()
        for end in self._ends_A:
            if end.opened is not None:
                end.opened.close()
        super().close()

    def _own(self, entry: PlanEntry) -> Part:
        """The rows of the target that this worker brings and replies."""
        tokens = sum(entry.tokens_A)
        return (0, tokens) if self._collective is None else own_rows(tokens, self._rank, self._collective.size)

    # On the stream

    def _bring(self, entry: PlanEntry, room: CudaStaging) -> None:
        tokens = sum(entry.tokens_A)
        if self._collective is not None:
            self._gather_parts(entry, room, self._collective)
            return
        alone = self._only_opened(entry)
        if alone is not None:
            microbatch = entry.target.microbatch
            out_TD = alone.replies_MN[microbatch][self._rank][:tokens]
            room.use(*rows_of(alone.inputs_M[microbatch], tokens), out_TD)
            return
        room.use_room(tokens)
        self._copy_in(entry, (0, tokens), room.device_hidden_TD, room.device_ids_TK, room.device_weights_TK)

    def _return(self, entry: PlanEntry, room: CudaStaging) -> None:
        rows_TD = room.out_now_TD
        if self._collective is not None:
            part = part_rows(room.tokens, self._collective.size)
            self._sums_TD[: room.tokens].copy_(rows_TD)
            rows_TD = self._own_hidden_PD[:part]
            self._collective.scatter_sum(rows_TD, self._sums_TD[: part * self._collective.size])
        elif self._only_opened(entry) is not None:
            return  # the experts wrote where the reply is read
        spans: list[Span] = []
        row = 0
        for a, (_, count) in enumerate(parts_within(entry.tokens_A, self._own(entry))):
            if count:
                nbytes = count * self._layout.hidden * 4
                to = self._ends_A[a].destination(entry.target.microbatch)
                spans.append(Span(to, address_of(rows_TD[row]), nbytes))
                row += count
        if spans:
            self._driver.copy(spans, self._model.handles.stream)

    def _only_opened(self, entry: PlanEntry) -> OpenedRows | None:
        """This GPU's memory of the one attention worker that has all rows; none where there are several, or they lie elsewhere."""
        present = [a for a, tokens in enumerate(entry.tokens_A) if tokens]
        opened = self._ends_A[present[0]].opened if len(present) == 1 else None
        return opened if opened is not None and opened.near else None

    def _copy_in(
        self, entry: PlanEntry, rows: Part, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> None:
        """Enqueues copies of ``rows`` of the target to the beginning of three tensors."""
        wide, narrow = self._layout.hidden * 4, self._layout.top_k * 4
        spans: list[Span] = []
        row = 0
        for a, part in enumerate(parts_within(entry.tokens_A, rows)):
            count = part[1]
            if not count:
                continue
            inputs = self._inputs(entry, a)
            # They were there when this was enqueued, and their owner may rewrite them only after this worker's reply.
            assert inputs is not None, f"inputs of {entry.target} from attention worker {a} are gone"
            sources = self._ends_A[a].sources(entry.target.microbatch, inputs, part)
            for room, source, row_nbytes in zip(
                (hidden_TD, ids_TK, weights_TK), sources, (wide, narrow, narrow), strict=True
            ):
                spans.append(Span(address_of(room[row]), source, count * row_nbytes))
            row += count
        if spans:
            self._driver.copy(spans, self._model.handles.stream)

    # Together

    def _gather_parts(self, entry: PlanEntry, room: CudaStaging, collective: Collective) -> None:
        tokens, top_k = sum(entry.tokens_A), self._layout.top_k
        self._copy_in(entry, self._own(entry), self._own_hidden_PD, self._own_ids_PK, self._own_weights_PK)
        part = part_rows(tokens, collective.size)
        self._own_choices_PX[:part, :top_k].copy_(self._own_ids_PK[:part])
        self._own_choices_PX[:part, top_k:].copy_(self._own_weights_PK[:part].view(torch.int32))
        self._exchange(part, collective)
        room.use_room(tokens)
        room.device_hidden_TD[:tokens].copy_(self._hidden_TD[:tokens])
        room.device_ids_TK[:tokens].copy_(self._choices_TX[:tokens, :top_k])
        room.device_weights_TK[:tokens].view(torch.int32).copy_(self._choices_TX[:tokens, top_k:])

    def _gather_nothing(self, entry: PlanEntry) -> None:
        assert self._collective is not None
        part = part_rows(sum(entry.tokens_A), self._collective.size)
        self._own_hidden_PD[:part].zero_()
        self._own_choices_PX[
            :part
        ].zero_()  # expert 0 is known everywhere: whoever runs the target finds another demand
        self._exchange(part, self._collective)

    def _reduce_nothing(self, entry: PlanEntry) -> None:
        assert self._collective is not None
        part = part_rows(sum(entry.tokens_A), self._collective.size)
        rows = part * self._collective.size
        self._sums_TD[:rows].zero_()
        self._collective.scatter_sum(self._own_hidden_PD[:part], self._sums_TD[:rows])

    def _exchange(self, part: int, collective: Collective) -> None:
        rows = part * collective.size
        collective.gather(self._hidden_TD[:rows], self._own_hidden_PD[:part])
        collective.gather(self._choices_TX[:rows], self._own_choices_PX[:part])
