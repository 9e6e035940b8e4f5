"""The compiled call as the service uses it: whose state it works on, when it may be used, and what it published."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from afore.core.demand import DemandVector
from afore.core.metrics import Loads
from afore.core.plan import CopyStart
from afore.core.record import record
from afore.core.target import Target
from afore.scheduler import core_layout as layout
from afore.scheduler.bindings import CellBindings
from afore.scheduler.costs import Costs
from afore.scheduler.demand_book import Gathering
from afore.scheduler.hot_core import (
    O_COPIES,
    O_MAX_PAIRS_AFTER,
    O_MAX_PAIRS_BEFORE,
    O_PAIRS,
    O_SHARES,
    O_WAITING,
    OUT,
    PUBLISHED,
    compile_hot_path,
    hot_core,
    out_words,
)
from afore.scheduler.plan import why_no_copies
from afore.scheduler.policies.afore import Afore
from afore.scheduler.policies.base import Policy
from afore.scheduler.publisher import Publisher
from afore.transport.entry_core import W_VECTOR32, can_compile, wire_shape
from afore.transport.mailbox import Mailbox
from afore.transport.ring import RingWriter


@record(kw_only=True)
class Done:
    """What the last call published."""

    loads: Loads
    skipped: str
    """Why there are no copies; empty if there are."""


class HotPath:
    """From demand to entry for one policy over one epoch's mailbox and ring."""

    def __init__(
        self,
        policy: Afore,
        cells: CellBindings,
        mailbox: Mailbox,
        ring: RingWriter,
        *,
        epoch: int,
        publisher: Publisher,
    ) -> None:
        layers = policy.compiled_layers()
        assert layers is not None
        compile_hot_path(search=layers[0].scratch is not None)
        self._policy = policy
        self._start = int(CopyStart.ARRIVAL if policy.start == "arrival" else CopyStart.NOW)
        self._publisher = publisher
        self._ring = ring
        self._states_L = [(*layer, bound) for layer, bound in zip(layers, cells.cells_L, strict=True)]
        self._headers_L = [layer.buffer[: layout.HEADER] for layer in layers]
        self._shape = wire_shape(mailbox.layout, ring.layout, epoch)
        self._regions = mailbox.words32(), ring.words64()
        header = self._headers_L[0]
        E, N = int(header[layout.H_EXPERTS]), int(header[layout.H_WORKERS])
        self._num_experts = E
        self._slots_shape = N, int(header[layout.H_SLOTS])
        self._most_copies = int(header[layout.H_COPY_CAP])
        self._num_attention = mailbox.layout.num_attention
        self._out = np.zeros(out_words(E, N, int(self._shape[W_VECTOR32])), np.int64)
        self._layer = 0
        self._costs = policy.costs(0)

    def serves(self, state: Gathering) -> bool:
        """Whether a step's targets may go this way: one with nobody in it, or impossible counts, is for the plain way to judge."""
        tokens_A = state.tokens_A
        return state.waiting > 0 and len(tokens_A) == self._num_attention and min(tokens_A) >= 0

    def call(self, state: Gathering, target: Target, *, may_plan: bool, stamp_ns: int) -> int:
        """Takes what has come of ``target``; with ``may_plan``, plans and publishes it when that completes it.

        The ring must have room, and refusals must have been heard. Returns the status (``hot_core``).
        """
        buffer, scratch, window, bound = self._states_L[target.layer]
        if may_plan:
            self._costs = self._policy.costs(target.layer)
        costs, out = self._costs, self._out
        status = int(
            hot_core(
                buffer,
                scratch,
                state.words,
                *self._regions,
                window,
                bound,
                self._shape,
                out,
                target.word(),
                may_plan,
                self._ring.sequence,
                stamp_ns,
                self._start,
                costs.tile_us,
                costs.copy_us,
                costs.window_us,
            )
        )
        state.waiting = int(out[O_WAITING])
        self._layer = target.layer
        if status == PUBLISHED:
            self._publisher.published(target.layer, stamp_ns, binds=bool(out[O_COPIES] or out[O_SHARES]))
        return status

    @property
    def costs(self) -> Costs:
        """The estimates that the last call planned with."""
        return self._costs

    def demand_E(self) -> DemandVector:
        """The demand [E] of the target that the last call published: what it was gathered in has been begun anew."""
        return self._out[OUT : OUT + self._num_experts].astype(np.int32)

    def protected_NR(self) -> NDArray[np.bool_]:
        """U_t that the last call planned with."""
        N, R = self._slots_shape
        return self._states_L[self._layer][2][: N * R].reshape(N, R).copy()

    def planned(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """(shares [X, 4], copies [Y, 3]) that the last call planned."""
        buffer, header = self._states_L[self._layer][0], self._headers_L[self._layer]
        N, R = self._slots_shape
        copies_at = layout.HEADER + self._num_experts + 3 * N * R
        shares_at = copies_at + 3 * self._most_copies
        shares_X4 = buffer[shares_at : shares_at + 4 * header[layout.H_SHARES]].reshape(-1, 4).copy()
        return shares_X4, buffer[copies_at : copies_at + 3 * header[layout.H_COPIES]].reshape(-1, 3).copy()

    @property
    def start(self) -> int:
        """When its copies start, as ring entries say it."""
        return self._start

    def done(self) -> Done:
        """Figures of the target that the last call published."""
        header = self._headers_L[self._layer].tolist()
        found = self._out[: O_MAX_PAIRS_AFTER + 1].tolist()
        skipped = ""
        if found[O_COPIES] == 0:
            skipped = why_no_copies(
                within_max=header[layout.H_WITHIN_MAX_TILES],
                bound=header[layout.H_BOUND_TILES],
                most_copies=self._most_copies,
                tile_us=self._costs.tile_us,
                tried=header[layout.H_TRIED],
            )
        loads = Loads(
            pairs=found[O_PAIRS],
            tiles=header[layout.H_TOTAL_TILES],
            max_pairs_before=found[O_MAX_PAIRS_BEFORE],
            max_pairs_after=found[O_MAX_PAIRS_AFTER],
            max_tiles_before=header[layout.H_BASE_MAX_TILES],
            max_tiles_after=header[layout.H_MAX_TILES],
            bound_tiles=header[layout.H_BOUND_TILES],
        )
        return Done(loads=loads, skipped=skipped)


def compiled_cells(policy: Policy, mailbox: Mailbox, ring: RingWriter) -> CellBindings | None:
    """Bindings for ``HotPath``, where the policy, the machine and the ring's shape allow it; None: the plain way only."""
    layers = policy.compiled_layers() if isinstance(policy, Afore) else None
    if not layers or not can_compile(mailbox.words32().data, ring.words64().data):
        return None
    header = layers[0].buffer[: layout.HEADER].tolist()
    N, R, cap = header[layout.H_WORKERS], header[layout.H_SLOTS], header[layout.H_COPY_CAP]
    shape = ring.layout
    if R == 0 or shape.max_shares < N * R or shape.max_copies < cap:
        return None
    return CellBindings(len(layers), N, R)
