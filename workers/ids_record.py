"""``--record_ids``: the experts of this worker's tokens, target by target, into a file of its own beside the recording."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from afore.core.config import RunConfig
from afore.core.demand import DemandVector
from afore.core.target import Target
from afore.core.topology import ATTENTION, member_name
from afore.models.config import ModelSpec
from afore.scheduler.trace_sink import TraceSink
from afore.scheduler.traces import TraceHeader, TraceTarget
from afore.scheduler.traces.beside import ids_path
from afore.scheduler.traces.format import CHUNK_BYTES, MOST_ROWS, ids_dtype, row_dtype


class IdsRecord(TraceSink):
    """One attention worker's; a trace whose targets are its own rows of each target."""

    def __init__(self, path: Path, header: TraceHeader, max_tokens: int) -> None:
        """``max_tokens``: most rows that a target has here."""
        self.lost = asyncio.Event()
        """The disk has refused: nothing more is taken."""
        self._path = path
        ids_bytes = max_tokens * header.top_k * ids_dtype(header).itemsize
        rows = CHUNK_BYTES // (row_dtype(header).itemsize + ids_bytes)
        super().__init__(str(path), header, rows=min(MOST_ROWS, max(1, rows)))

    def take(self, target: Target, ids_TK: NDArray[np.int32], demand_E: DemandVector) -> None:
        """A target's rows: a copy is kept. Once for every target, also where it is aborted afterwards."""
        self.row(TraceTarget(target=target, demand_E=demand_E, tokens=len(ids_TK), ids_TK=ids_TK))

    def _lost(self) -> None:
        self.lost.set()
        with contextlib.suppress(OSError):
            if self._path.is_file():
                self._path.unlink()  # an older run's, which would be taken for this one's


def ids_record(config: RunConfig, spec: ModelSpec, rank: int) -> IdsRecord | None:
    """Attention worker ``rank``'s; None where nothing is asked for."""
    if config.record is None or not config.record_ids:
        return None
    header = TraceHeader(
        experts=spec.num_experts,
        layers=spec.num_moe_layers,
        top_k=spec.experts_per_token,
        microbatches=config.topology.microbatches,
        policy=config.policy,
        model=spec.family if config.model is None else Path(config.model).name,
        source=f"tokens of {member_name(ATTENTION, rank)} of a run",
    )
    return IdsRecord(ids_path(config.record, rank), header, config.max_tokens_per_worker)
