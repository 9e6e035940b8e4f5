"""When a prediction is complete, and what becomes of one that is late, early, overwritten or given up."""

from __future__ import annotations

import numpy as np

from afore.core.demand import DemandVector
from afore.core.target import Target
from afore.scheduler.prediction_book import PredictionBook

L, E, M = 4, 2, 2


class Slots:
    """What lies in the attention workers' slots: one vector for each worker and microbatch."""

    def __init__(self) -> None:
        self.held: dict[tuple[int, int], tuple[Target, list[int]]] = {}
        self.book = PredictionBook(num_layers=L, num_experts=E, num_microbatches=M, take=self.take)

    def take(self, attention: int, microbatch: int, expected: Target) -> DemandVector | None:
        target, vector = self.held.get((attention, microbatch), (None, []))
        return np.array(vector, np.int32) if target == expected else None

    def write(self, attention: int, target: Target, *vector: int) -> None:
        self.held[attention, target.microbatch] = (target, list(vector))

    def arrived(self, microbatch: int = 0) -> list[tuple[Target, list[int]]]:
        return [(one.target, one.demand_E.tolist()) for one in self.book.arrived(microbatch)]


def begun(*tokens_A: int) -> Slots:
    slots = Slots()
    slots.book.begin(0, 5, tokens_A)
    return slots


def test_it_is_complete_once_all_with_rows_have_said_theirs() -> None:
    slots = begun(3, 0, 2)
    slots.write(0, Target(1, 0, 5), 3, 1)
    assert slots.arrived() == []
    slots.write(2, Target(1, 0, 5), 0, 4)
    assert slots.arrived() == [(Target(1, 0, 5), [3, 5])]
    assert slots.arrived() == []
    slots.write(0, Target(2, 0, 5), 1, 0)
    slots.write(2, Target(2, 0, 5), 1, 0)
    assert slots.arrived() == [(Target(2, 0, 5), [2, 0])]


def test_one_that_is_not_complete_when_its_target_is_planned_is_dropped() -> None:
    slots = begun(1, 1)
    slots.write(0, Target(1, 0, 5), 7, 7)
    assert slots.arrived() == []
    slots.book.planned(Target(1, 0, 5))
    slots.write(1, Target(1, 0, 5), 7, 7)
    assert slots.arrived() == []
    for attention in range(2):
        slots.write(attention, Target(2, 0, 5), 1, 0)
    assert slots.arrived() == [(Target(2, 0, 5), [2, 0])]
    # Earlier targets than the one that is awaited change nothing.
    slots.book.planned(Target(1, 0, 5))
    for attention in range(2):
        slots.write(attention, Target(3, 0, 5), 0, 1)
    assert slots.arrived() == [(Target(3, 0, 5), [0, 2])]


def test_one_that_comes_early_is_found_when_its_turn_comes() -> None:
    """Worker 0 is a layer ahead, and has overwritten what nobody had read: layer 1 is lost, layer 2 is not."""
    slots = begun(1, 1)
    slots.write(1, Target(1, 0, 5), 1, 0)
    slots.write(0, Target(2, 0, 5), 1, 0)
    assert slots.arrived() == []
    slots.write(1, Target(2, 0, 5), 0, 1)
    slots.book.planned(Target(1, 0, 5))
    assert slots.arrived() == [(Target(2, 0, 5), [1, 1])]


def test_there_is_none_beyond_the_last_layer_nor_outside_of_steps() -> None:
    slots = begun(1)
    slots.book.planned(Target(L - 1, 0, 5))
    slots.write(0, Target(L - 1, 0, 5), 1, 1)
    assert slots.arrived() == []
    assert slots.arrived(1) == []


def test_steps_come_and_go() -> None:
    slots = begun(1)
    slots.write(0, Target(1, 0, 6), 1, 1)
    assert slots.arrived() == []
    slots.book.drop(0, 4)
    slots.book.begin(0, 6, (1,))
    slots.book.planned(Target(3, 0, 5))  # of a step that is over
    assert slots.arrived() == [(Target(1, 0, 6), [1, 1])]
    slots.book.drop(0, 6)
    slots.write(0, Target(2, 0, 6), 1, 1)
    assert slots.arrived() == []
