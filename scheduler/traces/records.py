"""What a trace says: a header, and rows, each an event that a policy was told of, with what it answered where that is known.

Letters: E experts, K experts per token, L layers, N FFN workers, R redundant slots of the worker that has most, T tokens.
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from afore.core.errors import ConfigError
from afore.core.record import record
from afore.core.target import LAYER_BITS, MICROBATCH_BITS, Phase, Target
from afore.core.version import VERSION
from afore.scheduler.costs import Costs

FORMAT: Final = 1
"""Of the internal form; readers refuse others."""
MOST_EXPERTS: Final = 1 << 14
MOST_TOP_K: Final = 256
MOST_LAYERS: Final = 1 << LAYER_BITS
MOST_WORKERS: Final = 1 << 12
MOST_SLOTS: Final = 1 << 10
MOST_PAIRS: Final = 1 << 30
"""Of a target: what planners count with."""


class TraceError(ConfigError):
    """A trace cannot be read: ``path`` is the file, ``row`` the row in it (none: the file as such)."""

    def __init__(self, path: str | Path, problem: str, remedy: str = "", *, row: int | None = None) -> None:
        self.path = str(path)
        self.row = row
        super().__init__(self.path, problem if row is None else f"row {row}: {problem}", remedy)


class Event(enum.IntEnum):
    """What a row is. Only DEMAND rows are targets; the others are what else a policy was told, in order."""

    DEMAND = 0
    """The target's true demand became complete (``on_demand``)."""
    INPUTS = 1
    """Its inputs reached the FFN workers (``on_inputs``)."""
    STEP_END = 2
    """The step's last layer was assigned (``on_step_end``)."""
    PREDICTION = 3
    """Its demand was predicted (``on_prediction``): the counts are the prediction."""
    RESET = 4
    """The layer's redundant replicas became void (``reset_layer``)."""
    COSTS = 5
    """The layer's estimates, read by the policy while another layer's target was planned."""
    ABORT = 6
    """The published target was cancelled. No policy is told."""
    WITHDRAWN = 7
    """What was answered to the target's row before was not published; a RESET of its layer follows. No policy is told of this."""
    ADOPT = 8
    """The layer's slots were filled before the first target, as the answer's copies say (``adopt_layer``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceHeader:
    """What all rows share. Raises ``ConfigError`` for what cannot be."""

    experts: int
    """E."""
    layers: int
    """L: MoE layers."""
    top_k: int = 0
    """K; 0: unknown."""
    tile_tokens: int = 0
    """M_tile of the run; 0: none was given."""
    workers: int = 0
    """N of the run; 0: the trace is not of a run."""
    slots: int = 0
    """R of the run."""
    microbatches: int = 1
    """M: how many microbatches its targets belong to, and how many of them were in flight."""
    policy: str = ""
    """Of the run."""
    model: str = ""
    source: str = ""
    """Where the demand comes from, in words."""
    sources: tuple[str, ...] = ()
    """What ``TraceTarget.source`` counts: names of domains, files or documents."""
    planner: dict[str, Any] = field(default_factory=dict)
    """The run's ``PlannerConfig``, field by field, and ``primaries``; empty: the trace is not of a run."""
    options: dict[str, Any] = field(default_factory=dict)
    """What else the run's policy was configured with."""
    ids_files: int = 0
    """So many attention workers wrote their tokens' experts beside it (``beside``); 0: what is known stands in the rows."""
    version: str = VERSION
    """AFORE's, that wrote it."""

    def __post_init__(self) -> None:
        for name, least, most in (
            ("experts", 1, MOST_EXPERTS),
            ("layers", 1, MOST_LAYERS),
            ("top_k", 0, MOST_TOP_K),
            ("tile_tokens", 0, 1 << 20),
            ("workers", 0, MOST_WORKERS),
            ("slots", 0, MOST_SLOTS),
            ("microbatches", 1, 1 << MICROBATCH_BITS),
            ("ids_files", 0, MOST_WORKERS),
        ):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise ConfigError(f"trace.{name}", f"{value!r} is no whole number from {least} to {most:,}")
        for name in ("policy", "model", "source", "version"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"trace.{name}", f"{getattr(self, name)!r} is no text")
        if not all(isinstance(name, str) for name in self.sources) or len(self.sources) >= 1 << 16:
            raise ConfigError("trace.sources", "they are no list of fewer than 65,536 names")
        for name in ("planner", "options"):
            if not isinstance(getattr(self, name), dict):
                raise ConfigError(f"trace.{name}", "it is no table")

    def to_json(self) -> dict[str, Any]:
        """For the file, and for ``--json``."""
        return {"afore_targets": FORMAT, **dataclasses.asdict(self), "sources": list(self.sources)}

    @classmethod
    def from_json(cls, fields: Any) -> TraceHeader:
        """The inverse. Raises ``ValueError`` saying what is wrong."""
        if not isinstance(fields, dict) or "afore_targets" not in fields:
            raise ValueError("its header is none of a trace of targets")
        if fields["afore_targets"] != FORMAT:
            raise ValueError(
                f"format {str(fields['afore_targets'])[:20]} of AFORE {str(fields.get('version'))[:20]};"
                f" this is AFORE {VERSION}, which reads format {FORMAT}"
            )
        names = {one.name for one in dataclasses.fields(cls)}
        unknown = fields.keys() - names - {"afore_targets"}
        if unknown:
            raise ValueError(f"its header has an unknown field {min(unknown)[:40]!r}")
        known = {name: fields[name] for name in names & fields.keys()}
        if not isinstance(known.get("sources", []), list):
            raise ValueError("its header's sources are no list")
        try:
            return cls(**{**known, "sources": tuple(known.get("sources", ()))})
        except TypeError as error:
            raise ValueError(f"its header: {error}") from error


@record(kw_only=True)
class Answer:
    """What the policy answered to the event."""

    assigned: bool = False
    """Whether it assigned the target."""
    shares_X4: NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, 4), np.int32))
    """(expert, worker, slot, count) of redundant replicas with work, by expert, then rank."""
    copies_X5: NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, 5), np.int32))
    """(layer, expert, worker, slot, start), in order; start 0: now, 1: on arrival."""


@record(kw_only=True)
class TraceTarget:
    """One row. What is not known is none."""

    target: Target
    demand_E: NDArray[np.int32] | None = None
    """Pairs of each expert; of DEMAND rows always, of PREDICTION rows what was predicted, else none."""
    event: Event = Event.DEMAND
    phase: Phase = Phase.DECODE
    source: int = 0
    """In ``TraceHeader.sources``."""
    tokens: int = 0
    """T; 0: unknown."""
    now_ns: int = 0
    """The scheduler's clock; 0 where there was none."""
    ids_TK: NDArray[np.int32] | None = None
    """Experts of each token."""
    answer: Answer | None = None
    protected_NR: NDArray[np.bool_] | None = None
    """U_t: slots that the plan could not rebind."""
    costs: Costs | None = None
    """The layer's estimates that the policy was given."""
