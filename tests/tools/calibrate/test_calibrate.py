"""Profiles from spans and from this machine: a run of a known profile gives that profile back."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afore.core.clock import Clock
from afore.core.config import BatchOptions, PlannerOptions, RunConfig
from afore.core.errors import ConfigError
from afore.core.topology import Topology
from afore.core.trace import Tracer
from afore.models.counted import counted_spec
from afore.serving.virtual import Ask, Emulation, run_emulated
from afore.tools.calibrate.command import main
from afore.tools.calibrate.fit import fit
from afore.tools.calibrate.spans import Sample, read_samples
from afore.tools.evaluate.demand import DemandKey, demand_of
from afore.workers.device.hardware import HardwareProfile, Number, read_profile

ROWS = 24


def tracers(directory: Path) -> Callable[[str, Clock], Tracer]:
    return lambda name, clock: Tracer(name, clock, directory)


def record(directory: Path, profile: HardwareProfile) -> None:
    """A short virtual run of the profile, with span files."""
    shape = profile.shape
    layers, dense = 3, 1
    key = DemandKey(
        workload="chat", layers=layers, experts=128, top_k=8, microbatches=2, tokens=2 * ROWS, steps=12, seed=5
    )
    demand = demand_of(key)
    costs = profile.costs(workers=4)
    config = RunConfig(
        topology=Topology(attention=2, ffn=4, microbatches=2, redundant_slots=4),
        planner=PlannerOptions(tile_tokens=costs.tile_tokens, charge_us=costs.planner_us),
        batch=BatchOptions(max_num_seqs=4 * ROWS, block_tokens=64, kv_blocks=8 * ROWS),
    )
    spec = counted_spec(
        num_experts=int(shape.experts.value),
        experts_per_token=int(shape.top_k.value),
        moe_layers=layers,
        dense_layers=dense,
    )
    # Requests of different lengths: steps of different sizes, as a line needs them.
    asks = [Ask(prompt=(0,) * 3, max_new_tokens=4 + number % 7) for number in range(4 * ROWS)]
    emulation = Emulation(
        spec=spec, demand=demand, profile=costs, make_tracer=tracers(directory), free_prefill=True, record=False
    )
    run_emulated(config, asks, emulation)


@pytest.mark.slow
def test_a_run_of_a_profile_gives_that_profile_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = read_profile("a100-glm45air")
    true = replace(
        base,
        chip=replace(base.chip, gemm_efficiency=known(0.31), layer_host_us=known(210), partition_us=known(33)),
        wires=replace(base.wires, link_efficiency=known(0.42)),
    )
    record(tmp_path, true)
    assert main([str(tmp_path), "--base", "a100-glm45air", "--out", str(tmp_path / "found.yaml")]) == 0
    found = read_profile(str(tmp_path / "found.yaml"))
    for name in ("gemm_efficiency", "layer_host_us", "partition_us", "dense_efficiency"):
        number = getattr(found.chip, name)
        assert number.value == pytest.approx(getattr(true.chip, name).value, rel=0.02), name
        assert number.kind == "measured"
        assert "error on others" in number.source
    assert found.wires.link_efficiency.value == pytest.approx(0.42, rel=0.02)
    assert found.chip.tflops == base.chip.tflops
    assert found.plan_us(4) == pytest.approx(true.plan_us(4), rel=0.05)
    assert "experts" in capsys.readouterr().out
    # A line that fits one half of the steps must tell the other half.
    samples = read_samples(tmp_path, 64).samples["experts"]
    assert fit(samples, slope=True).error < 0.02


def written(directory: Path, planned: dict[str, Any], experts: dict[str, Any], attention: dict[str, Any]) -> None:
    """Span files of one target, each record with these arguments."""
    records = {
        "scheduler": [{"instant": "planned", "at_ns": 1, "args": planned}],
        "ffn": [{"name": "experts", "start_ns": 2, "end_ns": 3, "args": experts}],
        "attention": [{"name": "attention", "start_ns": 0, "end_ns": 1, "args": attention}],
    }
    for role, lines in records.items():
        name = f"{role}-0"
        header = {"afore_trace": 1, "process": name, "role": role, "rank": 0, "clock": "virtual", "clock_base_ns": 0}
        header |= {"unix_base_ns": None, "host": "", "version": "0.1.0"}
        whole = [header, *({"layer": 0, "microbatch": 0, "step": 0, **line} for line in lines)]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in whole))


PLANNED = {"sequence": 0, "workers": 1, "demand": [9, 0], "shares": [[0, 0, 0, 4, 1]]}


@pytest.mark.parametrize(
    ("role", "name", "wrong"),
    [
        ("scheduler", "sequence", ["", None, "x", -1, [], 1.5, 10**30]),
        ("scheduler", "workers", [None, "x", -1, 0, [1], 10**30]),
        ("ffn", "demand", [None, "x", 1, [], [-1], [1.5], [[1]], [10**30], {"a": 1}]),
        ("ffn", "shares", [None, "x", 1, [1], [[1]], [[9, 0, 0, 1, 1]], [[0, 0, 0, 1e300, 1]], {"a": 1}]),
        ("ffn", "sequence", ["", None, [1], "x"]),
        ("attention", "tokens", [None, "x", [1], float("nan"), 1e308]),
    ],
)
def test_a_record_that_no_run_writes_is_refused_by_its_file(
    role: str, name: str, wrong: list[Any], tmp_path: Path
) -> None:
    written(tmp_path, PLANNED, {"sequence": 0}, {"tokens": 8})
    assert {name: [one.size for one in found] for name, found in read_samples(tmp_path, 4).samples.items()} == {
        "attention": [8],
        "experts": [3],  # of 5 and of 4 pairs
    }
    for value in wrong:
        arguments: dict[str, dict[str, Any]] = {"scheduler": {**PLANNED}, "ffn": {"sequence": 0}, "attention": {}}
        there = arguments["scheduler" if name in PLANNED and (role, name) != ("ffn", "sequence") else role]
        there[name] = value
        if value == "":
            del there[name]
        written(tmp_path, *arguments.values())
        with pytest.raises(ConfigError, match=rf"{role}-0\.jsonl: the record .* is damaged: .*; record the run again"):
            read_samples(tmp_path, 4)


def known(value: float) -> Number:
    return Number(value=value, kind="given", source="the test")


@given(st.floats(0, 1000), st.floats(0.1, 100), st.lists(st.integers(1, 50), min_size=2, max_size=40, unique=True))
def test_a_line_is_found(fixed_us: float, each_us: float, sizes: list[int]) -> None:
    samples = [Sample(size, fixed_us + each_us * size, step) for step, size in enumerate(sizes) for _ in range(3)]
    samples += [Sample(s.size, s.took_us, s.step + 1) for s in samples]
    found = fit(samples, slope=True)
    assert found.line.at(25) == pytest.approx(fixed_us + each_us * 25, rel=1e-6, abs=1e-6)
    assert found.error < 1e-6


def test_neither_part_of_a_line_is_negative() -> None:
    falling = fit([Sample(1, 10, 0), Sample(2, 5, 0)], slope=True).line
    assert falling.each_us == 0
    assert falling.fixed_us == 7.5
    steep = fit([Sample(1, 1, 0), Sample(2, 10, 0)], slope=True).line
    assert steep.fixed_us == 0
    assert steep.each_us > 0


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ([], "nothing to fit"),
        (["DIR"], "--base: span files show no peaks"),
        (["DIR", "--base", "a100-glm45air"], "holds no span file"),
        (["DIR", "--base", "nothing"], "there is no 'nothing'"),
        (["DIR", "--measure"], "--measure and DIR: each makes a profile of its own"),
        (["--measure", "--from-raw", "x.json"], "--measure and --from-raw: each"),
        (["--measure", "--base", "h200"], "--base: it has no meaning with --measure; leave it out; it is for --gpu"),
        (["--measure", "--raw", "x.json"], "--raw: it has no meaning with --measure"),
        (["--measure", "--repeats", "3"], "--repeats: it has no meaning with --measure"),
        (["--from-raw", "x.json", "--raw", "y.json"], "--raw: it has no meaning with --from-raw"),
        (["--from-raw", "x.json", "--model", "y"], "--model: it has no meaning with --from-raw"),
        (["DIR", "--base", "h200", "--raw", "y.json"], "--raw: it has no meaning with DIR"),
        (["DIR", "--base", "h200", "--name", "two\nlines"], "--name: 'two\\nlines' is no name"),
        (["--gpu", "--repeats", "few"], "calibrate: repeats: invalid int value: 'few'; see python"),
        (["--from-raw", "PIPE"], "cannot be read: it is no file"),
        (["--from-raw", "/dev/zero"], "/dev/zero cannot be read: it is no file"),
    ],
)
def test_mistakes_are_named(
    arguments: list[str], names: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    places = {"DIR": str(tmp_path), "PIPE": str(tmp_path / "pipe")}
    given_ = [places.get(argument, argument) for argument in arguments]
    assert main([*given_, "--out", str(tmp_path / "x.yaml")]) == 2
    assert names in capsys.readouterr().err
    assert not (tmp_path / "x.yaml").exists()


@pytest.mark.parametrize("out", ["", ".", "nowhere/x.yaml"])
def test_a_file_that_could_not_be_written_is_refused_before_anything_is_measured(
    out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--measure", "--model", "no model, which would be said first", "--out", out]) == 2
    assert "calibrate: --out: " in capsys.readouterr().err


@pytest.mark.slow
def test_this_cpu_can_be_measured(tmp_path: Path) -> None:
    path = tmp_path / "cpu.yaml"
    assert main(["--measure", "--out", str(path)]) == 0
    profile = read_profile(str(path))
    assert profile.name == "cpu"
    assert profile.shape.experts.value == 128
    costs = profile.costs(workers=2)
    assert 0 < costs.tile_us < 1000
    assert costs.attention_us > costs.tile_us
    measured = (profile.chip.tflops, profile.chip.gemm_efficiency, profile.wires.link_gb_per_s)
    assert all(number.kind == "measured" and number.value > 0 for number in measured)
