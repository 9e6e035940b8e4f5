"""The command ``python -m afore.tools.evaluate``: the figures, and the way to ``plan`` and ``reality``."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from afore.core.errors import AforeError, HostError
from afore.scheduler.policies.registry import policy_kernels
from afore.tools.bench.files import check_file, write_whole
from afore.tools.evaluate.cell import Cell, demand_key
from afore.tools.evaluate.figure import Figure, Row, Setting
from afore.tools.evaluate.measured import measured
from afore.tools.evaluate.options import chosen_figures, chosen_workloads, parser, template_of
from afore.tools.evaluate.out import out_directory
from afore.tools.evaluate.pictures import draw
from afore.tools.evaluate.profiles import open_profile, profiles_of, with_overrides
from afore.tools.evaluate.progress import ProgressLine
from afore.tools.evaluate.report import page, to_json
from afore.tools.evaluate.store import results_of, to_bytes
from afore.tools.evaluate.world import config_of
from afore.workers.device.hardware import HardwareProfile

JSON, PAGE = "evaluation.json", "evaluation.md"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what is not there yet, writes JSON, the page and pictures; 0, or 2 for a mistake of the caller's."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        # Only where they are asked for: what they import takes seconds.
        if given[:1] == ["plan"]:
            from afore.tools.evaluate.plan_command import plan

            return plan(given[1:])
        if given[:1] == ["reality"]:
            from afore.tools.evaluate.reality_command import reality

            return reality(given[1:])
        return _evaluate(parser().parse_args(given), given)
    except HostError:
        raise
    except AforeError as error:
        print(f"evaluate: {error}", file=sys.stderr)
        return 2


def _evaluate(options: argparse.Namespace, given: Sequence[str]) -> int:
    figures = chosen_figures(options.only)
    workloads = chosen_workloads(options.workloads)
    template = template_of(options)
    check_file("--page", options.page)
    kinds = () if options.no_pictures else ("svg", "png")
    pictures = [f"{figure.name}.{kind}" for figure in figures for kind in kinds]
    with out_directory(Path(options.out), (JSON, PAGE, *pictures)):
        return _carried_out(options, given, figures, workloads, template)


def _carried_out(
    options: argparse.Namespace,
    given: Sequence[str],
    figures: Sequence[Figure],
    workloads: tuple[str, ...],
    template: Cell,
) -> int:
    out = Path(options.out)
    profile = open_profile(options.profile, out, lambda text: print(text, file=sys.stderr, flush=True))
    setting = Setting(
        template=template,
        workloads=workloads,
        profile=with_overrides(profile, template.overrides),
        quick=bool(options.quick),
        sweep_layers=options.sweep_layers,
    )
    cells = [cell for figure in figures if figure.cells is not None for cell in figure.cells(setting)]
    # Cells of other hardware name a profile of the package; the template's name may stand for one that was measured here.
    profiles = profiles_of((cell.profile for cell in cells), {template.profile: profile})
    for cell in cells:
        check(cell, profiles[cell.profile])
    compile_policies(cells)
    line = ProgressLine(sys.stderr, profiles)
    results = results_of(
        cells, out, line.began, profile=profiles, jobs=options.jobs, to_run=line.to_run, finished=line.finished
    )
    found: list[tuple[Figure, Sequence[Row]]] = []
    for figure in figures:
        if figure.rows is not None:
            found.append((figure, figure.rows(setting, results)))
        else:
            line.measuring(figure.name)
            found.append(measured(figure, setting, out))
    whole = to_json(found, template)
    write_whole(str(out / JSON), to_bytes(whole))
    command = shlex.join(["python", "-m", "afore.tools.evaluate", *given])
    pictures = [] if options.no_pictures else _pictures(found, out, ("svg", "png"))
    _page(out / PAGE, found, setting, command, "" if pictures else None, results)
    if options.page is not None:
        target = Path(options.page)
        if pictures:
            beside = target.parent / target.stem
            try:
                beside.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise HostError(str(beside), f"cannot be made: {error.strerror}", "give another --page") from error
            _pictures(found, beside, ("svg",))
        _page(target, found, setting, command, f"{target.stem}/" if pictures else None, results)
    if options.json:
        print(json.dumps(whole))
    else:
        print(f"{out / 'evaluation.md'}, evaluation.json, {len(results)} cells, {len(pictures)} pictures")
    return 0


def check(cell: Cell, profile: HardwareProfile) -> None:
    """Raises ``ConfigError`` for a cell that cannot run, before any does."""
    demand_key(cell, profile)
    config_of(cell, with_overrides(profile, cell.overrides))


def compile_policies(cells: Sequence[Cell]) -> None:
    """What the cells' policies call, so that no process compiles it beside another."""
    for policy in dict.fromkeys(cell.policy for cell in cells):
        for compile_kernel in policy_kernels(policy):
            compile_kernel()


def _page(
    target: Path,
    found: Sequence[tuple[Figure, Sequence[Row]]],
    setting: Setting,
    command: str,
    pictures: str | None,
    results: dict[Cell, Any],
) -> None:
    text = page(found, setting, command, pictures=pictures, demands=_demands(results))
    write_whole(str(target), text.encode())


def _pictures(found: Sequence[tuple[Figure, Sequence[Row]]], out: Path, kinds: Sequence[str]) -> list[Path]:
    """Those that could be drawn: none without matplotlib, which is said."""
    try:
        return [path for figure, rows in found for path in draw(figure, rows, out, kinds)]
    except HostError as error:
        if error.resource != "matplotlib":
            raise
        print(f"evaluate: no pictures: {error}", file=sys.stderr)
        return []


def _demands(results: dict[Cell, Any]) -> dict[str, str]:
    """Of each workload, where the template's demand comes from."""
    found: dict[str, str] = {}
    for cell, result in results.items():
        found.setdefault(cell.workload, f"{result['demand']['source']}; digest {result['demand']['digest']}")
    return found
