"""Parts of the GPU check that serve: run on CPUs and over the strict driver, they show what they claim, or say that they do not."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import pytest
from torch import distributed

from afore.core.config import CostOptions
from afore.tools.gpu_claims import ClaimFailed
from afore.tools.gpu_heard import overhearing, used_of
from afore.tools.gpu_ipc import ipc_missing, sum_of
from afore.tools.gpu_serving import _group_of_one, check_claims, decode_with_attention, serve
from afore.workers.device.cuda.driver import Driver
from tests.workers.device.cuda.fake_driver import FakeCalls
from tests.workers.device.cuda.fake_machine import Machine
from tests.workers.device.cuda.fake_types import CUresult
from tests.workers.random_plans import PlannerPlans
from tests.workers.test_ffn_cuda import SHAPE, served

DEAR = CostOptions(tile_us=1.0, copy_us=1e6, window_us=1.0, adapt=False)
"""Costs by which no copy ever pays."""


@pytest.mark.slow
async def test_a_group_of_one() -> None:
    """The part of the check, over gloo: what NCCL would be called with."""
    found = await _group_of_one(Driver(FakeCalls()), on_gpu=False)
    assert found["workers"] == 1
    assert not distributed.is_initialized()


@pytest.mark.slow
async def test_attention_of_the_bundled_model(one_thread: None) -> None:
    """The part of the check, over the strict driver: tokens are those of transformers."""
    calls = FakeCalls()
    found = await decode_with_attention(Driver(calls), on_gpu=False, prompts=2)
    assert found["exact"] == 2
    assert found["layer_awaits"] > 0
    assert calls.mistakes == []
    assert set(calls.live.values()) == {0}


@pytest.mark.slow
def test_all_workers_in_one_process_serve_as_well(one_thread: None) -> None:
    """What is done where no process reads another one's GPU memory."""
    found = serve("cpu", "cpu", limit_s=120, inproc=True, prompts=6)
    assert found["exact"] == 6
    assert found["workers_are"] == "tasks of one process"
    assert 0 < found["pairs_on_replicas"] < found["pairs"]


@pytest.mark.slow
@pytest.mark.processes
def test_workers_in_processes_are_heard() -> None:
    found = serve("cpu", "cpu", limit_s=120, prompts=6)
    assert found["exact"] == 6
    assert found["workers_are"] == "processes"
    assert found["used"]["attention"] == ["fused kernels"]


@pytest.mark.slow
def test_a_run_in_which_nothing_moves_is_a_claim_that_failed(one_thread: None) -> None:
    with pytest.raises(ClaimFailed, match=r"no expert was copied.*; none of \d+ pairs ran on a replica") as caught:
        serve("cpu", "cpu", limit_s=120, inproc=True, prompts=2, costs=DEAR)
    assert caught.value.found["exact"] == 2, "what was found is reported all the same"
    assert caught.value.found["pairs_on_replicas"] == 0


def found_of(**other: Any) -> dict[str, Any]:
    return {"experts_copied": 3, "pairs": 90, "pairs_on_replicas": 8, "used": {"group": ["ipc"]}} | other


def test_claims() -> None:
    check_claims(found_of(), "ipc")
    check_claims(found_of(used={}), "")
    with pytest.raises(ClaimFailed, match=r"^none of 90 pairs ran on a replica"):
        check_claims(found_of(pairs_on_replicas=0), "ipc")
    with pytest.raises(ClaimFailed, match=r"^rows came by hosted, ipc, not by ipc"):
        check_claims(found_of(used={"group": ["hosted", "ipc"]}), "ipc")
    with pytest.raises(ClaimFailed, match=r"^rows came by a group that nobody named, not by hosted"):
        check_claims(found_of(used={}), "hosted")


@pytest.mark.slow
@pytest.mark.parametrize(("on_gpu", "group"), [(True, "ipc"), (False, "hosted")])
async def test_what_workers_really_use_is_read_off_their_own_words(
    on_gpu: bool, group: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await served(0, PlannerPlans(SHAPE), Machine(), on_gpu=on_gpu)
    used = used_of(caplog.text)
    assert used["group"] == [group]
    assert used["group_wanted"][0].startswith(f"{group}, because ")
    assert used["partition"] == ["torch"]
    assert used["experts"] == ["torch (the only way that applies)"]


def test_other_words_of_workers() -> None:
    said = "a INFO attention runs modules on GPU 0, with sdpa: flash_attn is not installed\nb kernels one do not work here: x"
    assert used_of(said) == {
        "attention": ["sdpa: flash_attn is not installed"],
        "did_not_work": ["kernels one do not work here: x"],
    }


def test_what_is_overheard_is_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    """Also what processes say that are started meanwhile."""
    with overhearing() as heard:
        print("from here", file=sys.__stderr__, flush=True)
        subprocess.run([sys.executable, "-c", "import sys; sys.stderr.write('from there')"], check=True)
    subprocess.run([sys.executable, "-c", "import sys; sys.stderr.write(', afterwards')"], check=True)
    said = capfd.readouterr().err
    assert "from there" in heard.text
    assert "afterwards" not in heard.text
    assert said.endswith("from there, afterwards")


def opened(calls: FakeCalls) -> Driver:
    driver = Driver(calls)
    driver.retain_context(0)
    return driver


def test_another_process_reads_this_ones_memory() -> None:
    machine = Machine()
    mine, theirs = FakeCalls(machine), FakeCalls(machine)
    driver, other = opened(mine), opened(theirs)
    assert ipc_missing(driver, lambda handle: str(sum_of(other, handle))) == ""
    assert ipc_missing(driver, lambda handle: "17").startswith("another process read '17', not ")
    for release in (driver, other):
        release.release_context(0)
    for calls in (mine, theirs):
        assert calls.mistakes == []
        assert set(calls.live.values()) == {0}


def test_why_another_process_does_not_read_it() -> None:
    calls = FakeCalls()
    driver = opened(calls)

    def refused(handle: str) -> str:
        raise RuntimeError("CUDA_ERROR_MAP_FAILED")

    assert ipc_missing(driver, refused) == "CUDA_ERROR_MAP_FAILED"
    calls.failing["cuIpcGetMemHandle"] = CUresult.CUDA_ERROR_NOT_SUPPORTED
    assert "CUDA_ERROR_NOT_SUPPORTED" in ipc_missing(driver, refused)
    assert calls.live["allocations"] == calls.live["events"] == calls.live["streams"] == 0
