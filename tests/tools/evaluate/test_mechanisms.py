"""The table of mechanisms: its cells, its profile, and what one of them is for."""

from __future__ import annotations

from pathlib import Path

import pytest

from afore.core.config import RunConfig
from afore.core.errors import ConfigError
from afore.tools.evaluate.cell import Cell, run_cell
from afore.tools.evaluate.mechanisms import FEWER, VARIANTS, cells, main, table
from afore.tools.evaluate.profiles import cut_to
from afore.tools.evaluate.run_options import with_options
from afore.workers.device.hardware import read_profile


def test_options_are_those_of_the_command_line() -> None:
    config = with_options(RunConfig(), (("batch.least_microbatches", 2), ("policy_options.eplb.window_steps", 7)))
    assert (config.batch.least_microbatches, config.policy_options.eplb.window_steps) == (2, 7)
    assert with_options(config, ()) == config
    for name in ("batch.most", "policy.x", "nothing"):
        with pytest.raises(ConfigError, match="there is no such option"):
            with_options(config, ((name, 1),))
    with pytest.raises(ConfigError, match=r"batch\.least_microbatches"):
        with_options(config, (("batch.least_microbatches", 3),))


def test_every_variant_is_a_cell_that_can_be() -> None:
    for microbatches in (1, 2, 3):
        found = cells(Cell(policy="static", microbatches=microbatches), list(VARIANTS))
        assert len(set(found.values())) >= len(found) - 4, "fewer than two cannot run: those are others' cells then"
        for cell in found.values():
            assert (FEWER in cell.options) <= (microbatches > 2)
            with_options(RunConfig(policy=cell.policy), [option for option in cell.options if option != FEWER])


def test_a_short_model_has_as_short_a_head() -> None:
    whole = read_profile("a100-glm45air")
    short = cut_to(whole, 9)
    assert short.shape.vocabulary.value == round(whole.shape.vocabulary.value / 5)
    assert (short.shape.layers.value, short.shape.dense_layers.value) == (9, 0)
    assert short.chip == whole.chip
    assert cut_to(whole, 45) is cut_to(whole, 0) is whole
    with pytest.raises(ConfigError, match="--layers"):
        cut_to(whole, 46)


@pytest.mark.slow
def test_a_single_microbatch_hides_its_copies_ahead_of_it() -> None:
    """Its own demand comes too late for that: nothing computes before it."""
    template = Cell(
        policy="static", layers=3, microbatches=1, rows=80,
        prefill=1, warm=3, steps=6,
    )  # fmt: skip
    found = {name: run_cell(cell) for name, cell in cells(template, ["afore-plus", "afore-ahead"]).items()}
    plus, ahead = found.values()
    assert ahead["demand"] == plus["demand"]
    assert ahead["counters"]["copies_ahead"] > 0
    assert ahead["imbalance"]["tile"]["after"] < plus["imbalance"]["tile"]["after"]
    exposed = [one["copies"]["exposed_us"]["mean"] * one["copies"]["targets"] for one in (plus, ahead)]
    assert exposed[1] < exposed[0]
    assert ahead["tokens_per_s"] > plus["tokens_per_s"]
    lines = table(found)
    assert len(lines) == 4
    assert lines[2].startswith("| afore-plus |")
    assert "+0.0%" in lines[2]


def test_a_name_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "magic", "--out", str(tmp_path)]) == 2
    assert "there is no magic" in capsys.readouterr().err
