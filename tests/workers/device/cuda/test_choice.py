"""Which kernels compute targets of which size: measured once, kept, and never a reason not to start."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from afore.core.clock import WallClock
from afore.core.errors import HostError
from afore.core.slots import StoreLayout, contiguous_primaries
from afore.workers.cuda_store import CudaStore, region_nbytes
from afore.workers.device.cuda.choice import STEP, Choice, choose, default_file, sizes
from afore.workers.device.cuda.device import CudaDevice
from afore.workers.device.cuda.driver import Driver
from afore.workers.device.cuda.kernels import Implementation, torch_implementation, ways_of
from afore.workers.device.cuda.memory import DeviceMemory
from afore.workers.device.cuda.trial import Trial
from afore.workers.store_shape import StoreShape
from tests.workers.device.cuda.fake_driver import FakeCalls

ONE, TWO = (Implementation(name, lambda *_: None, lambda *_: None) for name in ("one", "two"))
KEY = {"gpu": "Fake GPU", "hidden": 8}


def small_is_ones(way: Implementation, pairs: int) -> float:
    """One way is faster for few pairs, the other for many."""
    return 10.0 + pairs if way is ONE else 60.0 + pairs / 10


def test_each_size_has_its_fastest(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "kernels.json"
    choice = choose([ONE, TWO], KEY, 300, small_is_ones, file)
    assert choice.steps == ((16, "one"), (64, "two"), (256, "two"), (300, "two"))
    assert [choice.name(pairs) for pairs in (1, 16, 17, 10_000)] == ["one", "one", "two", "two"]
    assert "one up to 16 pairs" in choice.describe()

    def again(way: Implementation, pairs: int) -> float:
        raise AssertionError("it was measured before")

    assert choose([ONE, TWO], KEY, 300, again, file).steps == choice.steps
    # Another shape, or another set of ways, is another measurement; both are kept.
    other = choose([ONE, TWO], {**KEY, "hidden": 9}, 300, small_is_ones, file)
    assert "measured now" in other.why
    assert len(json.loads(file.read_text())["kept"]) == 2
    assert choose([ONE, TWO], KEY, 300, again, file).steps == choice.steps


@pytest.mark.parametrize(
    "content", ["", "[]", '{"format": 0, "kept": {}}', '{"format": 1, "kept": {"x": [[1]]}}', "\x00"]
)
def test_a_damaged_file_is_written_anew(tmp_path: Path, content: str) -> None:
    file = tmp_path / "kernels.json"
    file.write_text(content)
    assert choose([ONE, TWO], KEY, 16, small_is_ones, file).steps == ((16, "one"),)
    assert json.loads(file.read_text())["format"] == 1


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    choice = choose([ONE, TWO], KEY, 16, small_is_ones, tmp_path / "file" / "kernels.json")
    assert choice.steps == ((16, "one"),)
    assert "measured at every start" in caplog.text
    assert choose([ONE, TWO], KEY, 16, small_is_ones, None).steps == ((16, "one"),)


def test_a_way_that_fails_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    def fails_when_large(way: Implementation, pairs: int) -> float:
        if way is ONE and pairs > 100:
            raise RuntimeError("out of resource: shared memory")
        return small_is_ones(way, pairs)

    with caplog.at_level(logging.WARNING):
        choice = choose([ONE, TWO], KEY, 300, fails_when_large, None)
    assert {name for _, name in choice.steps} == {"two"}
    assert "kernels one do not work here: RuntimeError: out of resource" in caplog.text

    def fails(way: Implementation, pairs: int) -> float:
        raise RuntimeError

    with pytest.raises(HostError, match=r"no kernels work here; .*--device\.kernels torch"):
        choose([ONE, TWO], KEY, 300, fails, None)


def test_a_single_way_is_not_measured() -> None:
    def measure(way: Implementation, pairs: int) -> float:
        raise AssertionError

    assert choose([TWO], KEY, 300, measure, None) == Choice(((300, "two"),), "the only way that applies")
    assert [way.name for way in ways_of("torch", torch.float32, (9, 0), (8, 8))] == ["torch"]


@given(st.integers(1, 10**6))
def test_sizes_grow_to_the_largest(most: int) -> None:
    found = sizes(most)
    assert found[-1] == most
    assert found == sorted(set(found))
    assert all(later <= STEP * earlier for earlier, later in itertools.pairwise(found))


def test_there_may_be_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("no home")

    assert default_file() is not None
    monkeypatch.setattr(Path, "home", no_home)
    assert default_file() is None


async def test_a_trial_runs_every_way_over_the_workers_own_weights() -> None:
    calls = FakeCalls()
    driver = Driver(calls)
    current: Callable[[int], contextlib.AbstractContextManager[object]] = lambda handle: contextlib.nullcontext()  # noqa: E731
    device = CudaDevice(driver, WallClock(), asyncio.get_running_loop(), current=current)
    memory = DeviceMemory(driver, None)
    device.on_close(memory.close)
    layout = StoreLayout(contiguous_primaries(4, 2), 0, 1)
    shape = StoreShape.of(layout, num_layers=1, hidden_size=16, expert_size=8)
    buffer = memoryview(bytearray(region_nbytes(shape)))
    store = CudaStore(buffer, shape, layout, driver, memory, b"g" * 16, device.model_stream.handles.stream)
    trial = Trial(driver, memory, device, store, top_k=2, tile_tokens=16)
    assert trial.measure_us(torch_implementation(), 40) > 0
    key = trial.key(0)
    assert (key["gpu"], key["hidden"], key["dtype"]) == ("Fake GPU", 16, "torch.float32")
    json.dumps(key)
    store.close()
    device.close()
    assert calls.mistakes == []
    assert set(calls.live.values()) == {0}
