"""Traces of any shape, for tests."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from hypothesis import strategies as st

from afore.core.target import Phase, Target
from afore.scheduler.costs import Costs
from afore.scheduler.traces import Answer, Event, TraceHeader, TraceTarget


@st.composite
def headers(draw: st.DrawFn) -> TraceHeader:
    """Small ones of every kind."""
    return TraceHeader(
        experts=draw(st.integers(1, 40) | st.just(300)),
        layers=draw(st.integers(1, 4)),
        top_k=draw(st.integers(1, 4)),
        tile_tokens=draw(st.integers(0, 64)),
        workers=draw(st.integers(0, 5)),
        slots=draw(st.integers(0, 5)),
        microbatches=draw(st.integers(1, 3)),
        policy=draw(st.sampled_from(["", "afore"])),
        source=draw(st.text(max_size=9)),
        sources=tuple(draw(st.lists(st.text(max_size=4), max_size=3))),
        planner=draw(st.just({}) | st.just({"tile_tokens": 8, "worker_speed": [1.0, 0.5]})),
    )


def rows_of(header: TraceHeader, count: int, seed: int) -> list[TraceTarget]:
    """``count`` rows, with and without everything that a row may have."""
    rng = np.random.default_rng(seed)
    return [_row(header, rng) for _ in range(count)]


def _row(header: TraceHeader, rng: np.random.Generator) -> TraceTarget:
    E, N, R = header.experts, header.workers, header.slots
    event = Event(int(rng.integers(0, len(Event))))
    ids_TK = rng.integers(0, E, (rng.integers(0, 4), header.top_k)).astype(np.int32) if rng.random() < 0.5 else None
    demand_E = None
    if ids_TK is not None:
        demand_E = np.bincount(ids_TK.reshape(-1), minlength=E).astype(np.int32)
    elif event in (Event.DEMAND, Event.PREDICTION):
        demand_E = rng.integers(0, 1000, E).astype(np.int32)
    answer = None
    if N and R and rng.random() < 0.6:
        X, Y = rng.integers(0, 4, 2)
        answer = Answer(
            assigned=bool(rng.integers(2)),
            shares_X4=rng.integers(0, [E, N, R, 99], (X, 4)).astype(np.int32),
            copies_X5=rng.integers(0, [header.layers, E, N, R, 2], (Y, 5)).astype(np.int32),
        )
    times = rng.exponential(100, 3)
    return TraceTarget(
        target=Target(
            int(rng.integers(header.layers)), int(rng.integers(header.microbatches)), int(rng.integers(0, 1 << 38))
        ),
        demand_E=demand_E,
        event=event,
        phase=Phase(int(rng.integers(0, 2))),
        source=int(rng.integers(0, max(1, len(header.sources)))),
        tokens=int(rng.integers(0, 5)),
        now_ns=int(rng.integers(0, 1 << 60)),
        ids_TK=ids_TK,
        answer=answer,
        protected_NR=rng.random((N, R)) < 0.5 if rng.random() < 0.5 else None,
        costs=Costs(tile_us=times[0], copy_us=times[1], window_us=times[2]) if rng.random() < 0.5 else None,
    )


def plain(row: TraceTarget) -> dict[str, Any]:
    """A row as something that ``==`` compares."""
    fields: dict[str, Any] = {}
    for one in dataclasses.fields(row):
        value = getattr(row, one.name)
        if isinstance(value, np.ndarray):
            value = (value.shape, value.tolist())
        elif isinstance(value, Answer):
            value = (value.assigned, value.shares_X4.tolist(), value.copies_X5.tolist())
        fields[one.name] = value
    return fields
