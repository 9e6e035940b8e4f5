"""What the figures mean, defined once: imbalance, migration, percentiles. Commands print ``FORMULAS`` under their tables.

Letters: E routed experts, N FFN workers. Everything here is a pure function or an accumulator; what leaves it for JSON is a plain
int, float or None. None means that nothing was measured: a zero would claim that something was.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from afore.core.plan import Share
from afore.core.record import record
from afore.core.speeds import even_workers, least_load

Integers = npt.NDArray[np.integer[Any]]

FORMULAS: Final[Mapping[str, str]] = {
    "token imbalance": "max/mean over FFN workers of token-expert pairs, mean over targets",
    "tile imbalance": "max over FFN workers of Σ_e ⌈pairs_e/M_tile⌉, over mean = Σ_e ⌈demand_e/M_tile⌉ / N, mean over targets",
    "unequal speeds": "a worker's pairs and tiles count 1/speed each, and the mean is that of pairs or tiles cut at will: "
    "time over the time of an even share",
    "before / after": "the same demand, all on primaries / as the plan assigned it",
    "bound": "⌈tiles/N⌉ (by speed, where speeds differ) over mean: no assignment of whole tiles can be more even",
    "raw D": "copy submission → completion; the slowest worker of each target, mean over targets with copies",
    "window W": "copy submission → the model stream reaching its wait; the shortest of each target, mean",
    "exposed O": "max(0, D - W); the largest over workers of each target, mean",
    "slack": "W - D; the smallest over workers and targets (below 0: somebody waited)",
}
"""Each figure's definition, as printed by commands."""

_OPEN_TARGETS = 1024
"""Targets whose workers may still report; older ones are settled, so that a server that runs for months stays small."""


# Imbalance


def primary_assignment(demand_E: Integers, primaries_E: Integers, num_workers: int) -> npt.NDArray[np.int64]:
    """assign_EN [E, N]: every expert's demand on its primary worker."""
    assign_EN = np.zeros((len(demand_E), num_workers), np.int64)
    assign_EN[np.arange(len(demand_E)), primaries_E] = demand_E
    return assign_EN


def shared_assignment(
    demand_E: Integers, shares: Iterable[Share], primaries_E: Integers, num_workers: int
) -> npt.NDArray[np.int64]:
    """assign_EN [E, N] that workers execute: the shares in rank order, clipped to the true demand, the primary takes the rest."""
    assign_EN = np.zeros((len(demand_E), num_workers), np.int64)
    rest_E = np.asarray(demand_E, np.int64).copy()
    for share in sorted(shares, key=lambda share: (share.expert, share.worker)):
        taken = min(share.count, int(rest_E[share.expert]))
        assign_EN[share.expert, share.worker] += taken
        rest_E[share.expert] -= taken
    assign_EN[np.arange(len(demand_E)), primaries_E] += rest_E
    return assign_EN


def token_loads(assign_EN: Integers) -> npt.NDArray[np.int64]:
    """Token-expert pairs of each worker [N] (paper eq. 3)."""
    loads_N: npt.NDArray[np.int64] = assign_EN.sum(axis=0, dtype=np.int64)
    return loads_N


def tile_loads(assign_EN: Integers, tile_tokens: int) -> npt.NDArray[np.int64]:
    """Tiles of each worker [N]: pairs of different experts cannot share a tile (paper eq. 4)."""
    tiles_N: npt.NDArray[np.int64] = (-(-assign_EN // tile_tokens)).sum(axis=0, dtype=np.int64)
    return tiles_N


@record(kw_only=True)
class Imbalance:
    """One target's imbalance: 1.0 is even."""

    token_before: float
    token_after: float
    tile_before: float
    tile_after: float
    tile_bound: float
    """What no assignment of whole tiles can be below."""


def imbalance(
    demand_E: Integers,
    assign_EN: Integers,
    primaries_E: Integers,
    tile_tokens: int,
    costs_N: Sequence[int] | None = None,
) -> Imbalance | None:
    """The imbalance of a target whose demand [E] was executed as assign_EN [E, N]; none without demand.

    ``costs_N``: what a tile costs on each worker (``afore.core.speeds``); none: all are equally fast.

    Tiles are compared with the mean of the demand's own tiles, before and after alike: were it the mean of the tiles executed,
    a plan that splits experts into more tiles would look the more even for the waste.
    Raises ``ValueError`` where the assignment does not add up to the demand.
    """
    demand_E = np.asarray(demand_E, np.int64)
    if demand_E.shape != assign_EN.shape[:1] or not np.array_equal(assign_EN.sum(axis=1), demand_E):
        raise ValueError("the assignment does not add up to the demand, expert by expert")
    num_workers = assign_EN.shape[1]
    pairs = int(demand_E.sum())
    if pairs == 0:
        return None
    costs_N = costs_N or (1,) * num_workers
    tiles_E = -(-demand_E // tile_tokens)
    tiles = int(tiles_E.sum())
    loads = Loads(
        pairs=pairs,
        tiles=tiles,
        max_pairs_before=int((np.bincount(primaries_E, weights=demand_E, minlength=num_workers) * costs_N).max()),
        max_pairs_after=int((token_loads(assign_EN) * costs_N).max()),
        max_tiles_before=int((np.bincount(primaries_E, weights=tiles_E, minlength=num_workers) * costs_N).max()),
        max_tiles_after=int((tile_loads(assign_EN, tile_tokens) * costs_N).max()),
        bound_tiles=least_load(tiles, costs_N),
    )
    return loads.imbalance(even_workers(costs_N))


@record(kw_only=True)
class Loads:
    """What one target asks of the FFN workers; maxima are over workers, before and after its shares.

    They count a worker's pairs and tiles by its tile cost (``afore.core.speeds``): once each, where all are equally fast.
    """

    pairs: int
    """Token-expert pairs of its demand."""
    tiles: int
    """Tiles of its demand, were every expert computed in one place."""
    max_pairs_before: int
    max_pairs_after: int
    max_tiles_before: int
    max_tiles_after: int
    bound_tiles: int
    """No assignment of whole tiles has a lower maximum."""

    def imbalance(self, num_workers: float) -> Imbalance | None:
        """The same as ratios; none without demand. ``num_workers``: N, or ``even_workers`` of unequal ones."""
        if self.pairs == 0:
            return None
        return Imbalance(
            token_before=self.max_pairs_before * num_workers / self.pairs,
            token_after=self.max_pairs_after * num_workers / self.pairs,
            tile_before=self.max_tiles_before * num_workers / self.tiles,
            tile_after=self.max_tiles_after * num_workers / self.tiles,
            tile_bound=self.bound_tiles * num_workers / self.tiles,
        )


def shared_loads(
    demand_E: Integers,
    shares: Iterable[Share],
    primaries_E: Integers,
    num_workers: int,
    tile_tokens: int,
    costs_N: Sequence[int] | None = None,
) -> Loads:
    """What ``shared_assignment`` amounts to: the plain version of what the scheduler computes for every target."""
    costs_N = costs_N or (1,) * num_workers
    demand_E = np.asarray(demand_E, np.int64)
    tiles_E = -(-demand_E // tile_tokens)
    pairs_N = np.bincount(primaries_E, weights=demand_E, minlength=num_workers)
    tiles_N = np.bincount(primaries_E, weights=tiles_E, minlength=num_workers)
    max_pairs, max_tiles = int((pairs_N * costs_N).max()), int((tiles_N * costs_N).max())
    cells: dict[tuple[int, int], int] = {}
    rest: dict[int, int] = {}
    for share in sorted(shares, key=lambda share: (share.expert, share.worker)):
        left = rest.setdefault(share.expert, int(demand_E[share.expert]))
        taken = min(share.count, left)
        rest[share.expert] = left - taken
        cells[share.expert, share.worker] = cells.get((share.expert, share.worker), 0) + taken
    for expert, left in rest.items():
        primary = int(primaries_E[expert])
        pairs_N[primary] -= demand_E[expert]
        tiles_N[primary] -= tiles_E[expert]
        cells[expert, primary] = cells.get((expert, primary), 0) + left
    for (_, worker), pairs in cells.items():
        pairs_N[worker] += pairs
        tiles_N[worker] += -(-pairs // tile_tokens)
    return Loads(
        pairs=int(demand_E.sum()),
        tiles=int(tiles_E.sum()),
        max_pairs_before=max_pairs,
        max_pairs_after=int((pairs_N * costs_N).max()) if rest else max_pairs,
        max_tiles_before=max_tiles,
        max_tiles_after=int((tiles_N * costs_N).max()) if rest else max_tiles,
        bound_tiles=least_load(int(tiles_E.sum()), costs_N),
    )


class _Mean:
    """Sums of the five ratios of ``Imbalance``."""

    __slots__ = ("sums", "targets")

    def __init__(self) -> None:
        self.targets = 0
        self.sums = [0.0] * 5

    def add(self, one: Imbalance) -> None:
        self.targets += 1
        for index, value in enumerate(
            (one.token_before, one.token_after, one.tile_before, one.tile_after, one.tile_bound)
        ):
            self.sums[index] += value

    def to_json(self) -> dict[str, Any]:
        means = [total / self.targets if self.targets else None for total in self.sums]
        return {
            "token": {"before": means[0], "after": means[1]},
            "tile": {"before": means[2], "after": means[3], "bound": means[4]},
        }


class ImbalanceStats:
    """Mean imbalance over targets, in all and for each layer. Decode only, or prefill only: the caller never mixes them."""

    def __init__(
        self,
        primaries_LE: Sequence[Integers],
        num_workers: int,
        tile_tokens: int,
        costs_N: Sequence[int] | None = None,
    ) -> None:
        self._primaries_LE = [np.asarray(primaries_E, np.int64) for primaries_E in primaries_LE]
        self._costs_N = costs_N or (1,) * num_workers
        self._even_workers = even_workers(self._costs_N)
        self._tile_tokens = tile_tokens
        self._all = _Mean()
        self._layers = [_Mean() for _ in primaries_LE]

    @property
    def targets(self) -> int:
        """Targets with demand so far."""
        return self._all.targets

    def add(self, layer: int, demand_E: Integers, assign_EN: Integers) -> Imbalance | None:
        """Counts one target; returns its imbalance, none without demand. Raises ``ValueError`` as ``imbalance`` does."""
        return self._count(
            layer, imbalance(demand_E, assign_EN, self._primaries_LE[layer], self._tile_tokens, self._costs_N)
        )

    def add_loads(self, layer: int, loads: Loads) -> None:
        """The same from a target's loads."""
        self._count(layer, loads.imbalance(self._even_workers))

    def _count(self, layer: int, one: Imbalance | None) -> Imbalance | None:
        if one is not None:
            self._all.add(one)
            self._layers[layer].add(one)
        return one

    def to_json(self) -> dict[str, Any]:
        """``{"token": {"before", "after"}, "tile": {"before", "after", "bound"}}``; None where no target had demand."""
        return self._all.to_json()

    def layers_to_json(self) -> list[dict[str, Any]]:
        """The same for each layer, with ``layer`` and ``targets``."""
        return [{"layer": layer, "targets": mean.targets, **mean.to_json()} for layer, mean in enumerate(self._layers)]


# Migration


@dataclass(slots=True)
class _Migration:
    """One target's copies, over the workers that have reported."""

    raw_us: float
    window_us: float
    exposed_us: float
    slack_us: float


class MigrationStats:
    """What moving experts cost. One report for each worker and target that copied; reports may come in any order."""

    def __init__(self) -> None:
        self.copies = 0
        self.targets = 0
        self.exposed_targets = 0
        self._raw_us = self._window_us = self._exposed_us = 0.0
        self._slack_us = math.inf
        self._open: OrderedDict[tuple[int, int], _Migration] = OrderedDict()

    def add(self, sequence: int, copies: int, copy_us: float, window_us: float, *, epoch: int = 0) -> None:
        """One worker's report on the entry ``sequence``: how many copies it made, D and W. Without copies it counts nothing."""
        if copies <= 0:
            return
        self.copies += int(copies)
        raw_us, window_us = float(copy_us), float(window_us)
        slack_us = window_us - raw_us
        exposed_us = max(0.0, -slack_us)
        known = self._open.get((epoch, sequence))
        if known is None:
            self._open[epoch, sequence] = _Migration(raw_us, window_us, exposed_us, slack_us)
            if len(self._open) > _OPEN_TARGETS:
                self._settle(self._open.popitem(last=False)[1])
        else:
            known.raw_us = max(known.raw_us, raw_us)
            known.window_us = min(known.window_us, window_us)
            known.exposed_us = max(known.exposed_us, exposed_us)
            known.slack_us = min(known.slack_us, slack_us)

    def _settle(self, one: _Migration) -> None:
        self.targets += 1
        self.exposed_targets += one.exposed_us > 0
        self._raw_us += one.raw_us
        self._window_us += one.window_us
        self._exposed_us += one.exposed_us
        self._slack_us = min(self._slack_us, one.slack_us)

    def to_json(self) -> dict[str, Any]:
        """``targets`` with copies, ``copies``, ``raw_ms_mean`` … ``slack_ms_min``; the times are None while nothing was copied."""
        whole = MigrationStats()
        whole.__dict__.update(self.__dict__)
        for one in self._open.values():
            whole._settle(one)
        count = whole.targets
        return {
            "targets": count,
            "copies": whole.copies,
            "raw_ms_mean": whole._raw_us / count / 1e3 if count else None,
            "window_ms_mean": whole._window_us / count / 1e3 if count else None,
            "exposed_ms_mean": whole._exposed_us / count / 1e3 if count else None,
            "exposed_targets": whole.exposed_targets if count else None,
            "slack_ms_min": whole._slack_us / 1e3 if count else None,
        }


# Percentiles


def percentile(values: Sequence[float] | npt.NDArray[Any], q: float) -> float | None:
    """The ``q``-th percentile (0 … 100), linear between neighbours (numpy's default); none of no values."""
    return float(np.percentile(np.asarray(values, np.float64), q)) if len(values) else None


def percentiles(values: Sequence[float] | npt.NDArray[Any], qs: Sequence[int] = (50, 95)) -> dict[str, float | None]:
    """``{"p50": …, "p95": …}``."""
    return {f"p{q}": percentile(values, q) for q in qs}
