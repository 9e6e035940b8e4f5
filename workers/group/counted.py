"""The group of workers of a model of counts: what an all-gather brings is the same on all of them, so it is put together once.

Rows of such a model say nothing (``afore.models.counted``); what counts of a target's inputs is how often each expert is named.
The first worker whose stream gathers reads every attention worker's ids, as each of them would, and counts; the others take its
result, as the parties of a collective do. Nothing is charged less for that: the profile says what gathering costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from afore.core.demand import demand_crc
from afore.core.plan import PlanEntry
from afore.transport.exchange import ExchangeLayout
from afore.workers.device.emulated_kernels import CountedKernels, Gathered
from afore.workers.device.meetings import Meetings
from afore.workers.flight import NO_SHARES, TargetCompute
from afore.workers.group.emulated import EmulatedGroup
from afore.workers.group.shared import AttentionPeer
from afore.workers.partition import count_ids
from afore.workers.staging import Staging


class CountedStaging(Staging):
    """Buffers of one microbatch: of its rows there is nothing to keep but what was gathered."""

    __slots__ = ("gathered",)

    def __init__(self, *, num_rows: int) -> None:
        super().__init__(max_tokens=1, hidden_size=1, top_k=1, num_rows=num_rows)
        self.gathered: Gathered | None = None


class GatheredOnce:
    """The newest gathered inputs of each microbatch, which all workers of a fleet share.

    One of each is enough: a microbatch's next target is written only after all workers have replied to this one, or passed it.
    """

    def __init__(self) -> None:
        self._newest: dict[int, tuple[tuple[int, int], Gathered]] = {}

    def get(self, epoch: int, entry: PlanEntry, gather: Callable[[], Gathered]) -> Gathered:
        """What ``gather`` returned for this entry, to whoever asked first."""
        name = (epoch, entry.sequence)
        newest = self._newest.get(entry.target.microbatch)
        if newest is None or newest[0] != name:
            newest = self._newest[entry.target.microbatch] = (name, gather())
        return newest[1]


class CountedGroup(EmulatedGroup):
    """One worker's side; ``once`` is that of the fleet. Partial rows say nothing: replies have none."""

    _replies_rows = False

    def __init__(
        self,
        meetings: Meetings,
        once: GatheredOnce,
        *,
        num_experts: int,
        rank: int,
        epoch: int,
        layout: ExchangeLayout,
        peers_A: Sequence[AttentionPeer],
        timeout_us: float,
        redistributes: bool = False,
    ) -> None:
        super().__init__(
            meetings,
            rank=rank,
            epoch=epoch,
            layout=layout,
            peers_A=peers_A,
            timeout_us=timeout_us,
            redistributes=redistributes,
        )
        self._once = once
        self._num_experts = num_experts

    def _gather(self, entry: PlanEntry, staging: Staging) -> None:
        assert isinstance(staging, CountedStaging)
        staging.gathered = self._once.get(self._epoch, entry, lambda: self._counted(entry))

    def _counted(self, entry: PlanEntry) -> Gathered:
        """Raises ``WireError`` for an id that is no expert's."""
        ids_A = []
        for a, tokens in enumerate(entry.tokens_A):
            if tokens:
                inputs = self._inputs(entry, a)
                assert inputs is not None, f"inputs of {entry.target} from attention worker {a} are gone"
                ids_A.append(inputs[1])
        demand_E = count_ids(ids_A, self._num_experts)
        return Gathered(demand_E, demand_crc(demand_E), sum(ids_TK.size for ids_TK in ids_A))

    def _split(self, entry: PlanEntry, staging: Staging) -> None:
        """There are no partial rows."""


class CountedCompute(TargetCompute):
    """What the stream of such a worker runs for one target."""

    __slots__ = ()

    def partition(self) -> None:
        """See ``TargetCompute.partition``."""
        staging, kernels, layout = self._staging, self._kernels, self._store.layout
        assert isinstance(staging, CountedStaging)
        assert isinstance(kernels, CountedKernels)
        gathered = staging.gathered
        assert gathered is not None, "the stream gathers before it partitions"
        self.mismatched = gathered.crc != self._entry.demand_crc
        shares_X4 = NO_SHARES if self.mismatched else self._entry.shares_X4()
        kernels.partition_gathered(
            gathered, shares_X4, layout.row_E, layout.rank, layout.num_rows, self.num_primaries, staging.pairs
        )

    def experts(self) -> None:
        """See ``TargetCompute.experts``: the time of the tiles."""
        assert isinstance(self._kernels, CountedKernels)
        self._kernels.take_time(self._staging.pairs)
