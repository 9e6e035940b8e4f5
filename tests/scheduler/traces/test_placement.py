"""Placements for other systems: every form comes back as it went, and one that cannot be is refused."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from afore.core.errors import ConfigError
from afore.core.slots import contiguous_primaries
from afore.scheduler.traces import TraceError
from afore.scheduler.traces.placement import Placement, System, placement_of, read_placement, written

SUFFIX = {"sglang": ".json", "tensorrt-llm": ".yaml", "vllm-ascend": ".json"}


@settings(max_examples=40, deadline=None)
@given(
    layers=st.integers(1, 3), workers=st.sampled_from([1, 2, 4]), slots=st.integers(0, 3), fixed=st.booleans(),
    dense=st.integers(0, 2), seed=st.integers(0, 99),
)  # fmt: skip
def test_every_form_comes_back(layers: int, workers: int, slots: int, fixed: bool, dense: int, seed: int) -> None:
    counts_LE = np.random.default_rng(seed).integers(0, 1000, (layers, 8))
    placement = placement_of(counts_LE, workers, slots, fixed=fixed, first_layer=dense)
    assert placement.workers == workers
    assert {len(held) for layer in placement.experts_LNS for held in layer} == {8 // workers + slots}
    if fixed:
        primaries_E = contiguous_primaries(8, workers)
        for layer in placement.experts_LNS:
            for w, held in enumerate(layer):
                assert list(held[: 8 // workers]) == np.flatnonzero(primaries_E == w).tolist()
    with tempfile.TemporaryDirectory() as folder:
        for system in get_args(System):
            path = Path(folder) / f"p{SUFFIX[system]}"
            path.write_bytes(written(placement, system))
            assert read_placement(path, experts=8, workers=workers, first_layer=dense) == placement


def test_what_the_systems_find_in_them() -> None:
    counts_LE = np.array([[90, 10, 10, 10], [1, 1, 1, 80]])
    placement = placement_of(counts_LE, 2, 1, first_layer=1)
    sglang = json.loads(written(placement, "sglang"))["physical_to_logical_map"]
    assert sglang[0] == [0, 1, 2, 3, 0, 1], "a dense layer has a row too"
    assert [sorted(row) for row in sglang[1:]] == [[0, 0, 0, 1, 2, 3], [0, 1, 2, 3, 3, 3]]
    trtllm = yaml.safe_load(written(placement, "tensorrt-llm"))
    assert trtllm["num_slots"] == 6
    assert trtllm["initial_global_assignments"] == {1: sglang[1], 2: sglang[2]}
    assert trtllm["layer_updates_per_iter"] == 0
    ascend = json.loads(written(placement, "vllm-ascend"))
    assert ascend["moe_layer_count"] == 2
    first = ascend["layer_list"][0]
    assert (first["layer_id"], first["device_count"]) == (1, 2)
    assert first["device_list"][1] == {"device_id": 1, "device_expert": sglang[1][3:]}


def test_workers_must_divide_experts() -> None:
    with pytest.raises(ConfigError, match="3 do not divide 8 experts"):
        placement_of(np.ones((1, 8), int), 3, 1)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"physical_to_logical_map": [[0, 1, 2]]}, "layer 0 has 3 slots, which 2 workers do not share"),
        ({"physical_to_logical_map": [[0, 1, 2, 9]]}, "layer 0 has an expert that is none of 0 to 3"),
        ({"physical_to_logical_map": [[0, 1, 2, -1]]}, "none of 0 to 3"),
        ({"physical_to_logical_map": [[0, 1, 2, 2]]}, "layer 0 has expert 3 nowhere"),
        ({"physical_to_logical_map": [[0, 1, 2, 3.5]]}, "layer 0 is no list of experts"),
        ({"physical_to_logical_map": [[0, 1, 2, True]]}, "layer 0 is no list of experts"),
        ({"physical_to_logical_map": 7}, "its layers are no list"),
        ({"initial_global_assignments": {"a": [1]}}, "no table of layers"),
        ({"moe_layer_count": 2, "layer_list": []}, "its moe_layer_count is not"),
        ({"moe_layer_count": 1, "layer_list": [{"layer_id": 0, "device_count": 1, "device_list": [{"device_id": 1}]}]}, "not 0"),
        ({"moe_layer_count": 1, "layer_list": [{"layer_id": 0, "device_count": 1}]}, "it lacks 'device_list'"),
        ({"logical_count": [[1]]}, "none of these systems"),
        ([1], "it is no table"),
    ],
)  # fmt: skip
def test_a_placement_that_cannot_be(tmp_path: Path, value: Any, why: str) -> None:
    (tmp_path / "p.json").write_text(json.dumps(value))
    with pytest.raises(TraceError, match=rf"p\.json: .*{why}"):
        read_placement(tmp_path / "p.json", experts=4, workers=2)


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("a: [1\n b: !!python/object/apply:os.system ['true']")
    (tmp_path / "q.yaml").write_text("!!python/object/apply:os.system ['true']")
    for name, why in (("p.yaml", "cannot be read"), ("q.yaml", "cannot be read"), ("r.yaml", "No such file")):
        with pytest.raises(TraceError, match=rf"{name}: .*{why}"):
            read_placement(tmp_path / name, experts=4, workers=2)
    with pytest.raises(ConfigError, match="it has no slots"):
        Placement(experts=4, experts_LNS=())
