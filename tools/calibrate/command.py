"""The command ``python -m afore.tools.calibrate``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from afore.core.errors import AforeError, ConfigError, HostError
from afore.models.bundle import bundled_model_path
from afore.tools.bench.files import check_file, write_whole
from afore.tools.bench.parser import Parser
from afore.tools.calibrate.fit import fit_all, profile_from, to_yaml_fields
from afore.tools.calibrate.gpu_profile import GPU_BASE, profile_of_gpu, yaml_of
from afore.tools.calibrate.raw import read_raw
from afore.tools.calibrate.spans import read_samples
from afore.workers.device.hardware import HardwareProfile, parse_profile, profile_names, read_profile

REPEATS = 20
EPILOG = """examples:
  python -m afore.tools.calibrate --measure --out cpu.yaml
  python -m afore.tools.calibrate --gpu --out gpu.yaml --raw gpu.json
  python -m afore.tools.calibrate --from-raw gpu-check/gpu_check.json --out gpu.yaml
  python -m afore.launch --trace spans/ … ; python -m afore.tools.calibrate spans/ --base cpu.yaml --out here.yaml

With span files, what the run shows takes the place of the base's numbers: times of tiles, rows, plans and copies. The base gives
the model, peaks and what was not recorded. Fitted on even steps, tested on odd ones; the errors are printed and stand in the file.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Writes a profile; 0, or 2 for a mistake of the caller's."""
    try:
        options = _parser().parse_args(argv)
        _check(options)
        if options.from_raw is not None:
            profile = _from_raw(options)
        elif options.gpu:
            profile = _gpu(options)
        else:
            profile = _measured(options) if options.measure else _fitted(options)
        _write(profile, options.out)
    except HostError:
        raise
    except AforeError as error:
        print(f"calibrate: {error}", file=sys.stderr)
        return 2
    print(f"{options.out}: profile {profile.name}, {profile.about}")
    return 0


_ALLOWED: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "--measure": frozenset({"model", "name"}),
        "--gpu": frozenset({"base", "name", "raw", "repeats"}),
        "--from-raw": frozenset({"base", "name"}),
        "DIR": frozenset({"base", "name"}),
    }
)
"""Way to a profile: the options that have a meaning there, beside ``--out``."""


def _check(options: argparse.Namespace) -> None:
    """Raises ``ConfigError`` for an option that would be ignored, and for files that could not be written in the end."""
    ways = {
        "--measure": options.measure,
        "--gpu": options.gpu,
        "--from-raw": options.from_raw is not None,
        "DIR": options.spans is not None,
    }
    chosen = [way for way, asked in ways.items() if asked]
    if not chosen:
        raise ConfigError("calibrate", "nothing to fit", "give a directory of span files and --base, or --measure")
    if len(chosen) > 1:
        raise ConfigError(" and ".join(chosen), "each makes a profile of its own", f"give one of {', '.join(ways)}")
    for name in ("base", "name", "raw", "repeats", "model"):
        if getattr(options, name) is not None and name not in _ALLOWED[chosen[0]]:
            others = ", ".join(way for way, allowed in _ALLOWED.items() if name in allowed)
            raise ConfigError(f"--{name}", f"it has no meaning with {chosen[0]}", f"leave it out; it is for {others}")
    if options.name is not None and not (options.name.strip() and options.name.isprintable()):
        raise ConfigError("--name", f"{options.name!r} is no name of printable letters", "give another")
    check_file("--out", options.out)
    check_file("--raw", options.raw)


def _write(profile: HardwareProfile, path: str) -> None:
    fields = to_yaml_fields(profile)
    parse_profile(fields, path)  # what no command would read again is not written
    write_whole(path, yaml_of(profile).encode())


def _measured(options: argparse.Namespace) -> HardwareProfile:
    # Only here: psutil, which a machine with nothing but a GPU's packages lacks.
    from afore.tools.calibrate.measure import measure_cpu

    profile = measure_cpu(Path(options.model or bundled_model_path()))
    return profile if options.name is None else replace(profile, name=options.name)


def _gpu(options: argparse.Namespace) -> HardwareProfile:
    repeats = REPEATS if options.repeats is None else options.repeats
    if repeats < 1:
        raise ConfigError("--repeats", f"{repeats} measures nothing", "give 1 or more")
    base = read_profile(options.base or GPU_BASE)
    # Only here: kernels and drivers.
    from afore.tools.calibrate.gpu import measure_gpu

    found = measure_gpu(repeats)
    if options.raw is not None:
        write_whole(options.raw, (json.dumps(found, indent=1) + "\n").encode())
    return profile_of_gpu(found, base, name=options.name or Path(options.out).stem)


def _from_raw(options: argparse.Namespace) -> HardwareProfile:
    base = read_profile(options.base or GPU_BASE)
    return profile_of_gpu(read_raw(options.from_raw), base, name=options.name or Path(options.out).stem)


def _fitted(options: argparse.Namespace) -> HardwareProfile:
    if options.base is None:
        raise ConfigError(
            "--base", "span files show no peaks and no model", f"of {', '.join(profile_names())}, or FILE.yaml"
        )
    base = read_profile(options.base)
    recorded = read_samples(Path(options.spans), int(base.chip.tile_tokens.value))
    fits = fit_all(recorded)
    print(f"{'span':10} {'fixed µs':>10} {'each µs':>10} {'fitted':>7} {'tested':>7} {'error':>7}")
    for name, found in fits.items():
        line = found.line
        print(
            f"{name:10} {line.fixed_us:>10.2f} {line.each_us:>10.3f} {found.fitted:>7} {found.tested:>7} {found.error:>7.1%}"
        )
    for problem in recorded.problems:
        print(problem, file=sys.stderr)
    name = options.name or Path(options.out).stem
    about = f"fitted to a run's span files, from the profile {base.name}"
    return profile_from(base, fits, name=name, about=about, workers=recorded.workers)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m afore.tools.calibrate",
        description="A hardware profile for virtual time, from a run or from this machine.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("spans", nargs="?", metavar="DIR", help="span files of a run (--trace)")
    parser.add_argument("--base", help=f"what the run does not show: {', '.join(profile_names())}, or FILE.yaml")
    parser.add_argument("--measure", action="store_true", help="measure this CPU instead")
    parser.add_argument("--gpu", action="store_true", help=f"measure this machine's GPU instead; --base: {GPU_BASE}")
    parser.add_argument("--raw", metavar="FILE", help="where --gpu writes all that it measured, as JSON")
    parser.add_argument(
        "--from-raw", metavar="FILE", help="make the profile of such a file, or of a GPU check's gpu_check.json"
    )
    parser.add_argument("--repeats", type=int, help=f"times that --gpu measures each; medians are kept ({REPEATS})")
    parser.add_argument("--model", help="checkpoint that --measure is for; none takes the bundled model")
    parser.add_argument("--name", help="of the profile; none: the file's, or cpu with --measure")
    parser.add_argument("--out", required=True, metavar="FILE", help="where the profile is written")
    return parser
