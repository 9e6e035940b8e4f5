"""Placements of experts that other systems start with: made from a trace's counts, written and read as they have them.

    sglang        JSON for ``--init-expert-location``: ``physical_to_logical_map`` [layers, physical experts]
    tensorrt-llm  YAML of ``moe_load_balancer``: ``num_slots``, ``initial_global_assignments`` {layer: [expert of each slot]}
    vllm-ascend   JSON expert map: ``layer_list`` of ``device_list`` of ``device_expert``

Slots go by worker: the first worker's, then the next one's. Letters: L layers, N workers, S slots of a worker, E experts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

import numpy as np
import yaml
from numpy.typing import NDArray

from afore.core.errors import ConfigError
from afore.core.slots import contiguous_primaries
from afore.scheduler.eplb import full_layout, redundant_layout
from afore.scheduler.traces.import_files import MOST_JSON, read_json
from afore.scheduler.traces.records import MOST_EXPERTS, MOST_LAYERS, MOST_WORKERS, TraceError

System = Literal["sglang", "tensorrt-llm", "vllm-ascend"]
SYSTEMS: Final[tuple[str, ...]] = get_args(System)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Experts of every slot."""

    experts: int
    """E."""
    experts_LNS: tuple[tuple[tuple[int, ...], ...], ...]
    """As many slots on every worker of a layer."""
    first_layer: int = 0
    """What the other system calls the first of them: its number of dense layers before it."""

    def __post_init__(self) -> None:
        layers = self.experts_LNS
        if not layers or not layers[0] or not layers[0][0]:
            raise ConfigError("placement", "it has no slots", "give some")
        shape = (len(layers[0]), len(layers[0][0]))
        for layer, experts_NS in enumerate(layers):
            if any((len(experts_NS), len(experts_S)) != shape for experts_S in experts_NS):
                raise ConfigError("placement", f"layer {layer} has not {shape[1]} slots on each of {shape[0]} workers")
            held = np.array(experts_NS).reshape(-1)
            if held.min() < 0 or held.max() >= self.experts:
                raise ConfigError("placement", f"layer {layer} has an expert that is none of 0 to {self.experts - 1}")
            missing = np.flatnonzero(np.bincount(held, minlength=self.experts) == 0)
            if missing.size:
                raise ConfigError("placement", f"layer {layer} has expert {missing[0]} nowhere")

    @property
    def workers(self) -> int:
        """N."""
        return len(self.experts_LNS[0])


def placement_of(
    counts_LE: NDArray[np.int64], workers: int, slots: int, *, fixed: bool = False, first_layer: int = 0
) -> Placement:
    """EPLB's placement for these counts: N · (E/N + ``slots``) slots. ``fixed``: primaries stay where this runtime has them.

    Raises ``ConfigError`` where the other systems have no form for it: workers that do not divide the experts.
    """
    E = counts_LE.shape[1]
    if E % workers:
        raise ConfigError(
            "workers", f"{workers} do not divide {E} experts", "these systems give each worker as many slots"
        )
    primaries_E = contiguous_primaries(E, workers)
    layers = []
    for load_E in counts_LE:
        if fixed:
            redundant = redundant_layout(load_E, primaries_E, np.full(workers, slots))
            held = [
                np.flatnonzero(primaries_E == w).tolist() + _filled(redundant[w], slots, w, E) for w in range(workers)
            ]
        else:
            held = full_layout(load_E, np.full(workers, E // workers + slots))
        layers.append(tuple(tuple(experts) for experts in held))
    return Placement(experts=E, experts_LNS=tuple(layers), first_layer=first_layer)


def _filled(held: list[int], slots: int, worker: int, experts: int) -> list[int]:
    """A slot that nothing can use holds some expert all the same: these systems have no empty ones."""
    return held + [(worker * slots + at) % experts for at in range(len(held), slots)]


def written(placement: Placement, system: System) -> bytes:
    """The file's content."""
    layers = placement.experts_LNS
    flat = [[e for experts_S in experts_NS for e in experts_S] for experts_NS in layers]
    if system == "sglang":
        # It counts all decoder layers: dense ones have a row too.
        plain = [slot % placement.experts for slot in range(len(flat[0]))]
        return (json.dumps({"physical_to_logical_map": [plain] * placement.first_layer + flat}) + "\n").encode()
    if system == "tensorrt-llm":
        assignments = {placement.first_layer + layer: slots for layer, slots in enumerate(flat)}
        value = {"num_slots": len(flat[0]), "initial_global_assignments": assignments, "layer_updates_per_iter": 0}
        return yaml.safe_dump(value, default_flow_style=None, sort_keys=False, width=1 << 20).encode()
    layer_list = [
        {
            "layer_id": placement.first_layer + layer,
            "device_count": len(experts_NS),
            "device_list": [{"device_id": w, "device_expert": list(held)} for w, held in enumerate(experts_NS)],
        }
        for layer, experts_NS in enumerate(layers)
    ]
    return (json.dumps({"moe_layer_count": len(layers), "layer_list": layer_list}) + "\n").encode()


def read_placement(path: Path, *, experts: int, workers: int | None = None, first_layer: int = 0) -> Placement:
    """A placement of any of these systems. ``workers``: N, where the file does not say it. Raises ``TraceError``.

    ``first_layer``: dense layers, whose rows an SGLang file has too, and which are not read.
    """
    if not 1 <= experts <= MOST_EXPERTS:
        raise ConfigError("experts", f"{experts} is none of 1 to {MOST_EXPERTS}")
    try:
        value = _yaml(path) if path.suffix in (".yaml", ".yml") else read_json(path)
        if not isinstance(value, dict):
            raise ValueError("it is no table")
        if "layer_list" in value:
            layers, first_layer = _ascend(value)
        elif "physical_to_logical_map" in value:
            layers = _by_worker(_rows(value["physical_to_logical_map"])[first_layer:], workers)
        elif "initial_global_assignments" in value:
            table = value["initial_global_assignments"]
            if not isinstance(table, dict) or not table or not all(type(key) is int for key in table):
                raise ValueError("its initial_global_assignments are no table of layers")
            first_layer = min(table)
            layers = _by_worker(_rows([table[key] for key in sorted(table)]), workers)
        else:
            raise ValueError("it is a placement of none of these systems")
        return Placement(experts=experts, experts_LNS=layers, first_layer=first_layer)
    except TraceError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise TraceError(path, what, f"give a placement of {', '.join(SYSTEMS)}") from error


def _yaml(path: Path) -> Any:
    try:
        if path.stat().st_size > MOST_JSON:
            raise TraceError(path, f"it has {path.stat().st_size:,} bytes", f"this reads at most {MOST_JSON:,}")
        return yaml.safe_load(path.read_bytes())
    except OSError as error:
        raise TraceError(path, f"cannot be read: {error.strerror}", "name a file that is there") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise TraceError(path, f"cannot be read: {str(error).splitlines()[0]}", "give YAML") from error


def _rows(value: Any) -> list[list[int]]:
    if not isinstance(value, list) or not 0 < len(value) <= MOST_LAYERS:
        raise ValueError("its layers are no list")
    for layer, row in enumerate(value):
        if not isinstance(row, list) or not row or not all(type(expert) is int for expert in row):
            raise ValueError(f"layer {layer} is no list of experts")
    return value


def _by_worker(rows: list[list[int]], workers: int | None) -> tuple[tuple[tuple[int, ...], ...], ...]:
    if workers is None or not 1 <= workers <= MOST_WORKERS:
        raise ValueError("it does not say how many workers there are: give their number")
    layers = []
    for layer, row in enumerate(rows):
        if len(row) % workers:
            raise ValueError(f"layer {layer} has {len(row)} slots, which {workers} workers do not share evenly")
        each = len(row) // workers
        layers.append(tuple(tuple(row[w * each : (w + 1) * each]) for w in range(workers)))
    return tuple(layers)


def _ascend(value: dict[str, Any]) -> tuple[tuple[tuple[tuple[int, ...], ...], ...], int]:
    listed = value["layer_list"]
    if not isinstance(listed, list) or value.get("moe_layer_count") != len(listed):
        raise ValueError("its moe_layer_count is not the length of its layer_list")
    layers = []
    for one in listed:
        devices = one["device_list"]
        if [device["device_id"] for device in devices] != list(range(one["device_count"])):
            raise ValueError(f"the devices of layer {one['layer_id']} are not 0 to {one['device_count']} - 1, in order")
        layers.append(tuple(tuple(row) for row in _rows([device["device_expert"] for device in devices])))
    first = listed[0]["layer_id"] if listed else 0
    if type(first) is not int or first < 0:
        raise ValueError(f"its first layer is {first!r}")
    return tuple(layers), first
