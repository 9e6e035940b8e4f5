"""``afore-plus`` for one layer: the same planner, state and plan as ``Planner``, with the search behind Algorithm 1."""

from __future__ import annotations

from typing import ClassVar

from afore.scheduler.planner import Planner


class PlusPlanner(Planner):
    """As ``Planner``; its plans have no more tiles on the most loaded worker than Algorithm 1's from the same state.

    Where the search replaced Algorithm 1's plan, ``within_max_tiles`` is the least maximum over existing replicas (exact flow).
    """

    searches: ClassVar[bool] = True
