"""What emulated devices compute: the identity over tagged stores, or only how many pairs each store row has."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from afore.core.demand import DemandVector
from afore.core.record import record
from afore.models.expert_form import SILU_GATED, ExpertForm
from afore.workers.device.base import F32, I32, Pairs, Work
from afore.workers.device.profile import CostProfile
from afore.workers.kernels import CpuKernels
from afore.workers.partition import count_demand, count_pairs, rows_us
from afore.workers.tagged import TaggedLayer


class Charged(Protocol):
    """The device, as its kernels see it."""

    @property
    def profile(self) -> CostProfile: ...

    @property
    def working_on(self) -> Work:
        """The work whose closure runs just now."""
        ...

    def charge_us(self, cost_us: float) -> None:
        """The work that runs just now takes so much longer."""
        ...


@record
class Gathered:
    """What a target's inputs are in a model of counts."""

    demand_E: DemandVector
    crc: int
    """Of it."""
    pairs: int
    """Its sum."""


class EmulatedKernels:
    """Exact partitioning; experts are the identity over a tagged store, and real over real weights.

    Where the host did not know pairs or tiles when it enqueued (``Work.pairs``, ``Work.tiles`` are 0), their time is charged here.
    """

    def __init__(self, device: Charged) -> None:
        self._device = device
        self._real = CpuKernels()

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
        """See ``Kernels.partition``."""
        if self._device.working_on.pairs == 0:
            self._device.charge_us(self._device.profile.partition_pair_ns * ids_TK.size / 1e3)
        self._real.partition(ids_TK, shares_X4, primary_row_E, my_rank, num_rows, first_redundant, out)

    def grouped_mlp(
        self,
        hidden_TD: F32,
        weights_TK: F32,
        pairs: Pairs,
        gate_up_SFD: F32 | TaggedLayer,
        down_SDI: F32 | TaggedLayer,
        out_TD: F32,
        form: ExpertForm = SILU_GATED,
        biases: Any = None,
    ) -> None:
        """See ``Kernels.grouped_mlp``. Over a ``TaggedLayer`` out[t] is hidden[t] times the sum of its weights here."""
        profile = self._device.profile
        if self._device.working_on.tiles == 0:
            self._device.charge_us(profile.rows_us(pairs.start_S1))
        if isinstance(gate_up_SFD, TaggedLayer):
            gate_up_SFD.read(pairs.expert_S)
            token_P = pairs.token_P[: pairs.count]
            weight_P = weights_TK[token_P, pairs.k_P[: pairs.count]]
            weight_T = np.bincount(token_P, weights=weight_P, minlength=hidden_TD.shape[0])
            np.multiply(hidden_TD, weight_T[:, None], out=out_TD, casting="same_kind")
        else:
            assert not isinstance(down_SDI, TaggedLayer)
            self._real.grouped_mlp(hidden_TD, weights_TK, pairs, gate_up_SFD, down_SDI, out_TD, form, biases)


class CountedKernels:
    """Kernels over a model of counts: how many pairs each store row has, and what they cost; no pair is listed, no row computed."""

    def __init__(self, device: Charged) -> None:
        self._device = device

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
        """See ``Kernels.partition``: ``out`` gets its counts alone."""
        if self._device.working_on.pairs == 0:
            self._device.charge_us(self._device.profile.partition_pair_ns * ids_TK.size / 1e3)
        out.count = count_pairs(ids_TK, shares_X4, primary_row_E, my_rank, num_rows, first_redundant, out)

    def partition_gathered(
        self,
        gathered: Gathered,
        shares_X4: I32,
        primary_row_E: I32,
        my_rank: int,
        num_rows: int,
        first_redundant: int,
        out: Pairs,
    ) -> None:
        """``partition`` of inputs that are counted already; charges the same."""
        if self._device.working_on.pairs == 0:
            self._device.charge_us(self._device.profile.partition_pair_ns * gathered.pairs / 1e3)
        out.count = count_demand(gathered.demand_E, shares_X4, primary_row_E, my_rank, num_rows, first_redundant, out)

    def take_time(self, pairs: Pairs) -> None:
        """``grouped_mlp`` without its arguments."""
        if self._device.working_on.tiles == 0:
            profile = self._device.profile
            self._device.charge_us(rows_us(pairs.start_S1, profile.tile_tokens, profile.tile_us, profile.expert_us))

    def grouped_mlp(
        self,
        hidden_TD: F32,
        weights_TK: F32,
        pairs: Pairs,
        gate_up_SFD: F32 | TaggedLayer,
        down_SDI: F32 | TaggedLayer,
        out_TD: F32,
        form: ExpertForm = SILU_GATED,
        biases: Any = None,
    ) -> None:
        """See ``Kernels.grouped_mlp``: takes the time of its tiles."""
        if self._device.working_on.tiles == 0:
            profile = self._device.profile
            self._device.charge_us(rows_us(pairs.start_S1, profile.tile_tokens, profile.tile_us, profile.expert_us))
