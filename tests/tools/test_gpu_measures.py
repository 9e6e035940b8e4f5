"""What the GPU check and the calibration measure, before a GPU has seen it: all of it runs over the strict driver, small."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator

import pytest
import torch

from afore.core.clock import WallClock
from afore.tools.calibrate.gpu import calibrate
from afore.tools.gpu_bench import Bench, ExpertSize, Layer
from afore.tools.gpu_exact import check_experts, check_partition
from afore.tools.gpu_lines import line_of
from afore.tools.gpu_measure import copy_times, host_times, overlap, tile_times
from afore.workers.device.cuda.device import CompletionName, CudaDevice
from afore.workers.device.cuda.driver import Driver
from afore.workers.device.cuda.kernels import Implementation, torch_implementation
from tests.workers.device.cuda.fake_driver import FakeCalls
from tests.workers.device.cuda.fake_machine import Machine

TINY = ExpertSize(name="tiny", hidden_size=16, expert_size=8, rows=8, dtype=torch.float32)
HOST_US = 700.0
"""What the host takes to enqueue a target here: more than any GPU's time for it."""
STEPS_US = 2
"""What the stand-in takes for an operation and for the event behind it."""


class Timed:
    """An implementation whose targets take the GPU so long, and the host ``HOST_US``; it computes nothing."""

    def __init__(self, calls: FakeCalls, row_us: float, tile_us: float, fixed_us: float = 5.0) -> None:
        self._calls = calls
        self._driver = Driver(calls)
        self._costs = fixed_us, row_us, tile_us
        self.stream = 0
        self.experts_run = 0

    def experts(self, *arguments: object) -> None:
        machine = self._calls.machine
        start_S1, tile_tokens = arguments[4], arguments[-1]
        assert isinstance(start_S1, torch.Tensor)
        assert isinstance(tile_tokens, int)
        each_S = torch.diff(start_S1)
        fixed, row, tile = self._costs
        rows, tiles = int((each_S > 0).sum()), int((-(-each_S // tile_tokens)).sum())
        took_us = fixed + row * rows + tile * (tiles - rows)
        machine.now_us += HOST_US
        machine.run_us.append(took_us)
        self._driver.call(self.stream, self._calls.NOTHING, 0)
        self.experts_run += 1


@pytest.fixture
def calls() -> FakeCalls:
    return FakeCalls(Machine())


@pytest.fixture
def bench(calls: FakeCalls) -> Iterator[Bench]:
    one = Bench(Driver(calls), torch_implementation(), on_gpu=False, sleep=calls.sleep)
    yield one
    one.close()
    assert calls.mistakes == []
    assert set(calls.live.values()) == {0}


@pytest.fixture
def timed(bench: Bench, calls: FakeCalls) -> Timed:
    one = Timed(calls, row_us=9.0, tile_us=2.0)
    one.stream = bench.compute
    bench.implementation = Implementation("timed", lambda *arguments: None, one.experts)
    return one


def test_a_targets_time_is_the_gpus_alone(bench: Bench, timed: Timed) -> None:
    """Eight tiles of eight rows, behind a host that is far slower than the GPU."""
    layer = Layer(bench, TINY, most_pairs=16 * 32)
    took_us = bench.time_us(layer.experts(8, 16), bench.compute, repeats=3)
    assert took_us == pytest.approx(5 + 8 * 9 + STEPS_US), "the host's time is not in it"
    assert bench.late == 0


def test_tiles_of_the_same_rows_and_rows_of_one_tile_are_lines_of_their_own(bench: Bench, timed: Timed) -> None:
    (one,) = tile_times(Layer(bench, TINY, most_pairs=16 * 32), [16], repeats=2)
    assert one["tile_us"] == pytest.approx(2.0)
    assert one["row_us"] == pytest.approx(9.0)
    assert one["experts_us"] == pytest.approx(5 + STEPS_US)
    assert one["tile_fit_error"] < 1e-9
    assert {(point["rows"], point["tiles"]) for point in one["points"]} >= {(8, 8), (8, 32), (2, 2)}


def test_a_copy_under_compute_is_under_compute_all_along(bench: Bench, calls: FakeCalls, timed: Timed) -> None:
    calls.machine.copy_us = 300.0
    layer = Layer(bench, TINY, most_pairs=64)
    (one,) = copy_times(layer, (1,), layer.experts(4, 16), repeats=2)
    assert one["under_compute_all_along"]
    assert one["targets_beside"] * (5 + 8 * 9) > 300
    assert one["alone_us"] == pytest.approx(300 + STEPS_US)
    assert bench.late == 0


def test_copies_and_compute_together_and_alone(bench: Bench, calls: FakeCalls) -> None:
    found = overlap(Layer(bench, TINY, most_pairs=64), 4, 16, 2, targets=3)
    assert found["copies"] == 2
    assert len(found["spans"]) == 4
    assert found["times_with_host_in_them"] == 0
    waits = [arguments[0] for _, arguments in calls.named("cuStreamWaitEvent")]
    assert set(waits) == {bench.copies}, "copies begin with the targets, and wait for nothing else"


def test_the_hosts_times_are_those_of_a_warm_host(bench: Bench) -> None:
    """The first launches compile: they take seconds, and are not counted."""
    turns: list[int] = []

    def enqueue() -> None:
        turns.append(0)

    found = host_times(bench, enqueue, repeats=2)
    assert len(turns) > 2
    assert set(found) == {"enqueue_experts_us", "record_event_us"}


def test_a_line_through_points() -> None:
    line = line_of([(4, 14.0), (8, 22.0), (16, 38.0)])
    assert (line.fixed_us, line.each_us, line.error) == pytest.approx((6.0, 2.0, 0.0))
    bent = line_of([(1, 10.0), (2, 20.0), (3, 10.0)])
    assert bent.error == pytest.approx(1 / 3, rel=0.01)
    with pytest.raises(ValueError, match="no line goes through"):
        line_of([(4, 14.0), (4, 15.0)])


@pytest.mark.slow
def test_everything_is_calibrated(bench: Bench) -> None:
    def make(completion: CompletionName) -> CudaDevice:
        return CudaDevice(
            Driver(FakeCalls()),
            WallClock(),
            asyncio.get_running_loop(),
            completion=completion,
            current=lambda handle: contextlib.nullcontext(),
        )

    found = calibrate(bench, TINY, make, tiles=(16, 32), counts=(1, 2, 4, 8), repeats=2)
    assert [one["tile_tokens"] for one in found["tiles"]] == [16, 32]
    assert set(found["fastest"]) == {"16", "32"}
    assert [copy["experts"] for copy in found["copies"]] == [1, 2, 4], "a worker's rows bound the copies"
    assert found["copies"][1]["mib"] == 2 * TINY.nbytes / 2**20
    assert found["copy"]["copy_gb_per_s"] >= 0
    assert set(found["completion"]) == {"bell", "query"}
    assert set(found["costs"]["tile_us"]) == {"16", "32"}
    assert found["partition"]["partition_us"] >= 0
    json.dumps(found)


@pytest.mark.slow
def test_partition_and_experts_are_held_against_the_cpu(bench: Bench) -> None:
    assert check_partition(bench, cases=3, tokens=9, experts=16, top_k=3)["cases"] == 3
    found = check_experts(bench, hidden=32, expert=16, rows=4, tokens=8)
    assert {one["form"] for one in found} == {"silu", "clamped, biases"}
    assert all(one["largest_difference"] <= one["tolerance"] for one in found)


def test_kernels_that_do_not_run_here_are_left_out_and_why_is_kept(bench: Bench) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("Failed to find C compiler\nsecond line")

    bench.implementation = Implementation("triton", fail, fail)
    bench.try_out()
    assert bench.implementation.name == "torch"
    assert bench.without_triton == "our kernels do not work here: RuntimeError: Failed to find C compiler"
    bench.on_gpu = True
    assert [way.name for way in bench.ways(torch.bfloat16, (64, 32))] == ["torch"]
    bench.on_gpu = False
