"""``top``: figures between two samples as laws, what it says where nothing runs, and a look at a real cluster."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from afore.core import control
from afore.core.clock import WallClock
from afore.core.config import RunConfig
from afore.core.metrics import ImbalanceStats
from afore.core.topology import Topology
from afore.serving.start import running_processes
from afore.tools import top
from afore.tools.top_links import LinkReader, Seen
from afore.tools.top_sample import Process, Sample, find_run, read_gauges, read_processes
from afore.tools.top_view import figures, render
from afore.transport.shm_segments import ROOT


def sample(at_ns: int = 0, **changes: Any) -> Sample:
    fields: dict[str, Any] = {
        "at_ns": at_ns,
        "looked_ns": at_ns,
        "serving": True,
        "missing": (),
        "lost": "",
        "url": "",
        "stats": {},
        "requests": {},
        "seen": Seen(None, ()),
        "processes": (),
    }
    return Sample(**{**fields, **changes})


def stats(targets: int, copies: int = 0, **means: float | None) -> dict[str, Any]:
    token = {"before": means.get("before"), "after": means.get("after")}
    return {
        "counters": {"targets": targets, "refusals": 1},
        "layers": [{"layer": 0, "targets": targets}],
        "imbalance": {"token": token, "tile": {**token, "bound": means.get("bound")}},
        "migration": {
            "targets": copies,
            "copies": copies,
            "exposed_ms_mean": means.get("exposed"),
            "exposed_targets": 0,
        },
    }


def text_of(found: dict[str, Any]) -> str:
    console = Console(record=True, width=110, highlight=False)
    console.print(render(found))
    return console.export_text()


def test_rates_are_of_the_interval_and_totals_of_the_epoch() -> None:
    before = sample(10**9, stats=stats(10, 4, before=2.0, after=1.0, exposed=1.0))
    after = sample(3 * 10**9, stats=stats(30, 6, before=3.0, after=1.5, exposed=2.0))
    found = figures(before, after, "demo")
    assert found["plans"]["per_second"] == 10.0
    assert found["plans"]["total"] == 30
    assert found["imbalance"]["token"]["now"]["before"] == pytest.approx((3.0 * 30 - 2.0 * 10) / 20)
    assert found["imbalance"]["token"]["all"] == {"before": 3.0, "after": 1.5}
    assert found["migration"]["copies_per_second"] == 1.0
    assert found["migration"]["exposed_ms_mean"] == {"all": 2.0, "now": pytest.approx((2.0 * 6 - 1.0 * 4) / 2)}
    shown = text_of(found)
    assert "10.0/s" in shown
    assert "plans refused" in shown


@given(st.lists(st.integers(0, 50), min_size=2, max_size=2), st.integers(1, 30), st.integers(1, 30))
def test_now_is_what_the_interval_alone_would_have_given(demand: list[int], early: int, late: int) -> None:
    demand_E = np.array([demand[0] + 1, demand[1]])
    at_home_EN, all_on_one_EN = np.diag(demand_E), np.stack([demand_E, np.zeros(2, np.int64)], axis=1)

    def counted(into: ImbalanceStats, times: int, assign_EN: npt.NDArray[np.int64]) -> None:
        for _ in range(times):
            into.add(0, demand_E, assign_EN)

    whole, alone = (ImbalanceStats([np.array([0, 1])], 2, 4) for _ in range(2))
    ways = []
    for times, assign_EN in ((early, at_home_EN), (late, all_on_one_EN)):
        counted(whole, times, assign_EN)
        ways.append({**stats(0), "imbalance": whole.to_json(), "layers": whole.layers_to_json()})
    counted(alone, late, all_on_one_EN)
    found = figures(sample(0, stats=ways[0]), sample(10**9, stats=ways[1]), "demo")
    for kind, moments in alone.to_json().items():
        for moment, value in moments.items():
            assert found["imbalance"][kind]["now"][moment] == pytest.approx(value)


def test_a_new_epoch_has_no_rates_yet() -> None:
    found = figures(sample(0, stats=stats(100)), sample(10**9, stats=stats(3)), "demo")
    assert found["plans"] == {"total": 3, "per_second": None, "refusals": 1, "aborts": 0, "plan_errors": 0}
    assert found["migration"]["copies_per_second"] is None


def test_a_cluster_that_comes_up_and_one_that_was_lost_are_shown() -> None:
    coming = figures(sample(0), sample(1, serving=False, missing=("ffn-1",)), "demo")
    assert "missing: ffn-1" in text_of(coming)
    lost = figures(sample(0), sample(1, serving=False, lost="ffn-1: [red]gone[/red]\x1b[2J"), "demo")
    shown = text_of(lost)
    assert "[red]gone[/red]" in shown, "markup of others is text"
    assert "\x1b" not in shown


def test_cpu_is_of_the_interval_and_unknown_for_a_process_that_is_new() -> None:
    def one(cpu_s: float) -> Process:
        return Process(name="ffn-0", pid=7, cpu_s=cpu_s, rss_bytes=3 << 20)

    new = Process(name="ffn-1", pid=8, cpu_s=9.0, rss_bytes=0)
    found = figures(sample(0, processes=(one(1.0),)), sample(2 * 10**9, processes=(one(2.0), new)), "demo")
    assert [process["cpu_percent"] for process in found["processes"]] == [50.0, None]


def test_nothing_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert top.main(["--once"], root=str(tmp_path)) == 2
    assert "no cluster runs on this machine" in capsys.readouterr().err
    for name in ("afore-one", "afore-two", "afore-of-a-benchmark"):
        (tmp_path / name).mkdir()
    for name in ("one", "two"):
        (tmp_path / f"afore-{name}" / "hub").touch()
    assert top.main([], root=str(tmp_path)) == 2
    assert "2 clusters run on this machine: one, two; choose with --run" in capsys.readouterr().err
    assert top.main(["--run", "three"], root=str(tmp_path)) == 2
    assert "there are: one, two" in capsys.readouterr().err
    assert find_run("one", str(tmp_path)) == tmp_path / "afore-one"


def test_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    assert LinkReader(tmp_path / "afore-one").look(serving=True, here=()) == Seen(None, ())
    assert read_processes(tmp_path / "afore-one") == ()
    assert read_gauges("http://127.0.0.1:1") == {}
    (tmp_path / f"ffn-0-{os.getpid()}-0").touch()
    (tmp_path / f"ffn-1-{os.getpid()}-1").touch()
    (tmp_path / f"top-{os.getpid()}-0").touch()
    (tmp_path / "hub").touch()
    (process,) = read_processes(tmp_path)
    assert (process.name, process.pid) == ("ffn-0, ffn-1", os.getpid())


@pytest.mark.parametrize("given", [["--interval", "0"], ["--interval", "x"], ["--runs", "a"]])
def test_bad_options_are_one_line(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert top.main(given) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.processes
async def test_beside_a_real_cluster() -> None:
    name = f"top{os.getpid()}"
    config = RunConfig(topology=Topology(attention=1, ffn=2, microbatches=1), kernels="modules")
    async with running_processes(config, WallClock(), name=name) as client:
        tokens = [one async for one in client.submit("The sea", max_new_tokens=4, ignore_eos=True)]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "afore.tools.top", "--run", name, "--once", "--json", "--interval", "0.05",
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )  # fmt: skip
        said, _ = await process.communicate()
        again = [one async for one in client.submit("The sea", max_new_tokens=4, ignore_eos=True)]
    assert process.returncode == 0
    assert [_token(event) for _, event in again] == [_token(event) for _, event in tokens], (
        "watched, it answers the same"
    )
    found = json.loads(said)
    assert found["serving"]
    assert found["plans"]["total"] > 0
    assert found["imbalance"]["tile"]["all"]["after"] >= 1
    assert {process["name"] for process in found["processes"]} >= {"scheduler-0", "attention-0", "ffn-0", "ffn-1"}
    assert [reader["worker"] for reader in found["ring"]["readers"]] == ["ffn-0", "ffn-1"]
    links = {(link["from"], link["to"]): link for link in found["links"]}
    attention, ffn = "attention-0", ("ffn-0", "ffn-1")
    expected = [(attention, "scheduler"), *(("scheduler", one) for one in ffn), (attention, "ffn")]
    assert list(links) == [*expected, *((one, attention) for one in ffn)]
    # Nothing is under way any more: the same last target is everywhere, and nothing waits.
    (last,) = {link["last"] for link in links.values()}
    assert last is not None
    assert {link["waits"] for link in links.values()} == {0}
    assert {link["writes_per_second"] for link in links.values()} == {0}
    states = [links[one]["state"] for one in ((attention, "scheduler"), (attention, "ffn"), ("ffn-1", attention))]
    assert states == ["taken", "complete", "written"]
    assert not (Path(ROOT) / f"afore-{name}").exists()


def _token(event: control.TokenOut | control.Finished) -> int | None:
    return event.token if isinstance(event, control.TokenOut) else None
