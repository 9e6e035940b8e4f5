"""The command line of an evaluation, checked: which figures, which traffic, which shape."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from afore.core.errors import ConfigError
from afore.tools.evaluate.cell import Cell
from afore.tools.evaluate.figure import Figure
from afore.tools.evaluate.figures import FIGURES
from afore.tools.evaluate.history import warm_for
from afore.tools.evaluate.profiles import parse_override
from afore.tools.evaluate.workloads import WORKLOADS
from afore.workers.device.hardware import profile_names

QUICK_LAYERS, QUICK_STEPS, QUICK_WARM, QUICK_ROWS = 6, 8, 15, 80
WARM, STEPS, ROWS = 20, 8, 325

EPILOG = f"""examples:
  python -m afore.tools.evaluate --quick                                   # a first look: small batches, few layers
  python -m afore.tools.evaluate --jobs 2 --out DIR                        # everything, on two cores; goes on where it stopped
  python -m afore.tools.evaluate --only fig3,fig8 --workloads chat,math
  python -m afore.tools.evaluate --only fig9,table2                        # the planner, measured here
  python -m afore.tools.evaluate --set chip.gemm_efficiency=0.5 --only sensitivity
  python -m afore.tools.evaluate --profile h200 --ffn 16 --attention 8     # another kind of GPU, another shape
  python -m afore.tools.evaluate --routing run.trace.npz --only fig3       # a recorded run's demand
  python -m afore.tools.evaluate --jobs 2 --page docs/evaluation.md        # how docs/evaluation.md is made
  python -m afore.tools.evaluate plan --help                               # before you buy: my model, my traffic, N GPUs
  python -m afore.tools.evaluate reality --help                            # predicted against measured on this machine

figures: {", ".join(FIGURES)}

exit status: 0 done, 1 a result cannot be written, 2 the request cannot be carried out as given
"""


def parser() -> argparse.ArgumentParser:
    """Of the evaluation itself; ``plan`` and ``reality`` have their own."""
    made = argparse.ArgumentParser(
        prog="python -m afore.tools.evaluate",
        description="The paper's figures and more in virtual time: the real roles on emulated hardware.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--only", metavar="NAMES", help="some figures and tables, by commas")
    made.add_argument("--workloads", metavar="NAMES", help=f"some of {', '.join(WORKLOADS)}, by commas")
    made.add_argument(
        "--quick",
        action="store_true",
        help=f"{QUICK_WARM + QUICK_STEPS} steps of {QUICK_LAYERS} layers, small batches, fewer points of what is varied",
    )
    made.add_argument(
        "--profile",
        default="a100-glm45air",
        help=f"hardware: {', '.join(profile_names())}, cpu (measured), or FILE.yaml",
    )
    made.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        dest="overrides",
        help="another number in the profile, such as chip.gemm_efficiency=0.5; marked as inferred",
    )
    made.add_argument(
        "--routing",
        default="",
        metavar="FILE,…",
        help="demand of a recorded run (.trace.npz), or of published routing (.npz)",
    )
    made.add_argument("--out", default="evaluation", metavar="DIR", help="where results are kept")
    made.add_argument(
        "--page", metavar="FILE.md", help="write the page there too, and its pictures into the folder FILE beside it"
    )
    made.add_argument("--jobs", type=count, default=1, metavar="J", help="processes that run cells (1)")
    made.add_argument("--attention", type=count, default=4, metavar="A", help="attention workers (4)")
    made.add_argument("--ffn", type=count, default=8, metavar="N", help="FFN workers (8)")
    made.add_argument("--prefill", type=count, default=4, metavar="P", help="prefill workers (4)")
    made.add_argument("--microbatches", type=count, default=3, metavar="M", help="microbatches in flight (3)")
    made.add_argument(
        "--slots", type=count_or_none, default=8, metavar="R", help="redundant slots a worker and layer (8)"
    )
    made.add_argument(
        "--rows", type=count, metavar="T", help=f"requests of an attention worker in a microbatch ({ROWS})"
    )
    made.add_argument("--layers", type=count, metavar="L", help="MoE layers (those of the profile's model)")
    made.add_argument(
        "--sweep-layers",
        type=count,
        metavar="L",
        help="MoE layers of hiding, grid, sensitivity, traffic and arrivals, which are many or long runs (those of --layers)",
    )
    made.add_argument("--steps", type=count, metavar="S", help=f"steps that are measured ({STEPS})")
    made.add_argument(
        "--collectives",
        choices=("model-stream", "own-stream"),
        default="model-stream",
        help="between experts, or beside them",
    )
    made.add_argument("--seed", type=seed, default=0, help="of demand, prompts and arrivals (0)")
    made.add_argument("--json", action="store_true", help="print evaluation.json")
    made.add_argument("--no-pictures", action="store_true", help="no PNG and SVG (they need afore[bench])")
    return made


def template_of(options: argparse.Namespace) -> Cell:
    """The cell that all others vary. Raises ``ConfigError``."""
    quick = bool(options.quick)

    def pick(value: int | None, few: int, otherwise: int) -> int:
        return (few if quick else otherwise) if value is None else int(value)

    steps = pick(options.steps, QUICK_STEPS, STEPS)
    return Cell(
        policy="static",
        profile=options.profile,
        overrides=tuple(map(parse_override, options.overrides)),
        routing=options.routing,
        attention=options.attention,
        ffn=options.ffn,
        prefill=options.prefill,
        microbatches=options.microbatches,
        slots=options.slots,
        layers=pick(options.layers, QUICK_LAYERS, 0),
        rows=pick(options.rows, QUICK_ROWS, ROWS),
        steps=steps,
        warm=max(QUICK_WARM if quick else WARM, warm_for(steps)),
        collectives=options.collectives,
        seed=options.seed,
    )


def chosen_figures(only: str | None) -> list[Figure]:
    """Those that ``--only`` names, in the page's order. Raises ``ConfigError``."""
    return [FIGURES[name] for name in _named("--only", only, FIGURES)]


def chosen_workloads(names: str | None) -> tuple[str, ...]:
    """Those that ``--workloads`` names, as it orders them: the case study takes the first. Raises ``ConfigError``."""
    known = _named("--workloads", names, WORKLOADS)
    return (
        tuple(known)
        if names is None
        else tuple(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    )


def _named(option: str, names: str | None, known: Mapping[str, object]) -> list[str]:
    if names is None:
        return list(known)
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        raise ConfigError(option, f"there is no {', '.join(unknown) or 'name'}", f"of {', '.join(known)}")
    return [name for name in known if name in wanted]


def count(text: str) -> int:
    """A whole number, 1 or more."""
    return _whole(text, 1)


def count_or_none(text: str) -> int:
    """A whole number, 0 or more."""
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    value = int(text)
    if not least <= value < 1 << 31:
        raise argparse.ArgumentTypeError(f"{text} is none of {least} to 2^31 - 1")
    return value


def seed(text: str) -> int:
    """A seed that every generator takes."""
    value = int(text)
    if not 0 <= value < 1 << 55:
        raise argparse.ArgumentTypeError(f"{text} is none of 0 to 2^55 - 1")
    return value
