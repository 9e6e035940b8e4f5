"""The options of ``bench serve``. What describes a cluster (``--topology.ffn 4``, ``--policy``, ``--model``) is the launcher's."""

from __future__ import annotations

import argparse
import difflib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Final, Literal

from afore.core.config import RunConfig
from afore.core.errors import ConfigError
from afore.core.topology import Topology
from afore.serving.options import LaunchOptions
from afore.serving.options import parse as parse_launch
from afore.tools.bench.latency import Objectives, parse_objectives
from afore.tools.bench.openai_client import check_key
from afore.tools.bench.parser import Parser

EPILOG: Final = """\
Without --url a cluster is started on this machine and ended afterwards; every option of python -m afore.launch that
describes a cluster is taken: --topology.attention 1 --topology.ffn 2 --policy static --model DIR --config FILE

examples:
  python -m afore.tools.bench serve                                       all bundled prompts at once
  python -m afore.tools.bench serve --request-rate 4 --slo ttft=500ms,tpot=50ms --plot latency.svg
  python -m afore.tools.bench serve --url http://127.0.0.1:8000 --concurrency 8 --num-prompts 64 --json
  python -m afore.tools.bench serve --arrivals azure2023_conv.csv --num-prompts 32 --time-scale 0.1
  python -m afore.tools.bench serve --spans --topology.attention 1 --topology.ffn 2
  python -m afore.tools.bench serve --against transformers --compare 1/2/2,2/4/2

exit status: 0 measured (Ctrl-C too: what was measured so far), 1 the server died or nothing was answered,
2 the request could not be carried out as given
"""
ONLY_LOAD: Final = (
    "url", "request_rate", "burstiness", "concurrency", "arrivals", "time_scale", "slo", "warmup", "out", "plot", "spans",
    "endpoint", "api_key",
)  # fmt: skip
MOST_REQUESTS: Final = 1_000_000
ONLY_AGAINST: Final = ("compare", "rounds", "cores")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeBenchOptions:
    """One invocation."""

    url: str | None
    api_key: str | None
    endpoint: Literal["completions", "chat"]
    request_rate: float
    burstiness: float
    concurrency: int | None
    num_prompts: int
    prompts: str | None
    arrivals: str | None
    time_scale: float
    max_tokens: int | None
    ignore_eos: bool
    seed: int
    warmup: int
    objectives: Objectives | None
    json: bool
    out: str | None
    plot: str | None
    spans: bool
    against: bool
    compare: tuple[Topology, ...]
    """Only the numbers of attention and FFN workers and microbatches count."""
    rounds: int
    cores: int


def parse(argv: Sequence[str]) -> tuple[ServeBenchOptions, RunConfig]:
    """Options, and the cluster to start. Raises ``ConfigError`` naming the option."""
    parser = _parser()
    given, rest = parser.parse_known_args(argv)
    values = vars(given)
    launch, config = _cluster(rest, sorted(values))
    changed = [
        field.name
        for field in fields(LaunchOptions)
        if field.name != "log" and getattr(launch, field.name) != field.default
    ]
    if changed:
        raise ConfigError(changed[0], "it is not for a benchmark", "leave it out")
    against = values.pop("against") is not None
    for name in ONLY_LOAD if against else ONLY_AGAINST:
        if values[name] != parser.get_default(name):
            problem = "it is not for --against transformers" if against else "it is only for --against transformers"
            raise ConfigError(name.replace("_", "-"), problem, "leave it out")
    if values["url"] is not None and rest:
        raise ConfigError(rest[0].lstrip("-"), "it describes a cluster to start, and --url names one", "leave one out")
    if values["url"] is not None and values["spans"]:
        raise ConfigError("spans", "they are files of a cluster that is started here", "leave out --url")
    if values["arrivals"] is not None and values["request_rate"] != math.inf:
        raise ConfigError("request-rate", "--arrivals has its own times", "leave it out; --time-scale stretches them")
    if values["arrivals"] is not None and values["endpoint"] == "chat":
        raise ConfigError("endpoint", "a trace's prompt lengths need completions", "leave it out")
    if values["api_key"] is not None:
        check_key(values["api_key"])
    slo, compare = values.pop("slo"), values.pop("compare")
    return ServeBenchOptions(
        **values,
        objectives=None if slo is None else parse_objectives(slo),
        against=against,
        compare=(config.topology,) if compare is None else _topologies(compare),
    ), config


def _cluster(rest: list[str], names: Sequence[str]) -> tuple[LaunchOptions, RunConfig]:
    try:
        return parse_launch(rest)
    except ConfigError as error:
        near = difflib.get_close_matches(error.field.replace("-", "_"), names, n=1, cutoff=0.7)
        if error.problem == "no such option" and near:
            raise ConfigError(error.field, error.problem, f"did you mean {near[0].replace('_', '-')}?") from None
        raise


def _topologies(text: str) -> tuple[Topology, ...]:
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)/(\d+)/(\d+)\s*", part)
        if match is None:
            raise ConfigError("compare", f"{part.strip()!r} is no topology", "write A/N/M, such as 1/2/2,2/4/2")
        found.append(Topology(attention=int(match[1]), ffn=int(match[2]), microbatches=int(match[3])))
    if len(set(found)) < len(found):
        raise ConfigError("compare", f"{text!r} names a topology twice", "give each once")
    return tuple(found)


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _within(least: float, most: float, *, or_infinite: bool = False) -> Callable[[str], float]:
    """A number that times can be computed with."""

    def number(text: str) -> float:
        value = _positive(text)
        if not (least <= value <= most or (or_infinite and math.isinf(value))):
            raise argparse.ArgumentTypeError(f"{text} is not within {least:g} … {most:g}")
        return value

    return number


def _requests(text: str) -> int:
    value = _count(text)
    if value > MOST_REQUESTS:
        raise argparse.ArgumentTypeError(f"{text} is above {MOST_REQUESTS}")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


def _whole(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value


def _rounds(text: str) -> int:
    value = int(text)
    if value < 5:
        raise argparse.ArgumentTypeError(f"{text} is below 5, too few for a median")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m afore.tools.bench serve",
        description="Puts load on an OpenAI-compatible server and reports latencies, throughput and goodput.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    server = parser.add_argument_group("server")
    server.add_argument("--url", help="a running server, such as http://127.0.0.1:8000 (default: start a cluster)")
    server.add_argument("--api-key", metavar="KEY", help="its key")
    server.add_argument("--endpoint", choices=("completions", "chat"), default="completions")
    load = parser.add_argument_group("load")
    load.add_argument(
        "--request-rate",
        type=_within(1e-6, 1e6, or_infinite=True),
        default=math.inf,
        metavar="R",
        help="requests/s; inf: all at once (default)",
    )
    load.add_argument(
        "--burstiness", type=_within(1e-3, 1e6), default=1.0, metavar="B",
        help="shape of the gamma distributed gaps: 1 is Poisson (default), below 1 burstier, above 1 evener",
    )  # fmt: skip
    load.add_argument("--concurrency", type=_count, metavar="C", help="most requests in flight (default: no limit)")
    load.add_argument("--num-prompts", type=_requests, default=32, metavar="N", help="how many requests (default: 32)")
    load.add_argument("--prompts", metavar="FILE", help="JSONL or text, one prompt a line (default: the bundled ones)")
    load.add_argument(
        "--arrivals", metavar="CSV", help="times and lengths from a trace: TIMESTAMP, ContextTokens, GeneratedTokens"
    )
    load.add_argument(
        "--time-scale", type=_within(1e-9, 1e9), default=1.0, metavar="X", help="stretch the trace's gaps (default: 1)"
    )
    load.add_argument(
        "--max-tokens",
        type=_count,
        metavar="N",
        help="most tokens of every answer, whatever prompts say (default: what they say)",
    )
    load.add_argument("--ignore-eos", action="store_true", help="go on after the model's end token")
    load.add_argument("--seed", type=_whole, default=0, help="of the drawn arrivals (default: 0)")
    load.add_argument("--warmup", type=_whole, default=2, metavar="N", help="requests before, not counted (default: 2)")
    report = parser.add_argument_group("report")
    report.add_argument("--slo", metavar="LIST", help="objectives for goodput: ttft=500ms,tpot=50ms,e2e=5s")
    report.add_argument(
        "--json", action="store_true", help="print one JSON object, with versions, machine and configuration"
    )
    report.add_argument("--out", metavar="FILE", help="write every request as a line of JSON")
    report.add_argument("--plot", metavar="FILE", help="write a picture of TTFT and ITL (png, svg, pdf)")
    report.add_argument(
        "--spans", action="store_true", help="also record spans, and show where the time of a target goes"
    )
    against = parser.add_argument_group("against transformers")
    against.add_argument(
        "--against", choices=("transformers",), help="compare throughput on the same prompts, interleaved"
    )
    against.add_argument("--compare", metavar="LIST", help="topologies A/N/M: 1/2/2,2/4/2 (default: the one given)")
    against.add_argument(
        "--rounds", type=_rounds, default=5, metavar="N", help="interleaved rounds, 5 or more (default: 5)"
    )
    against.add_argument(
        "--cores", type=_count, default=2, metavar="N", help="cores that both sides share (default: 2)"
    )
    return parser


def effective(options: ServeBenchOptions) -> dict[str, object]:
    """The options as they were used, for the result."""
    found: dict[str, object] = asdict(options)
    found["compare"] = [f"{shape.attention}/{shape.ffn}/{shape.microbatches}" for shape in options.compare]
    found["request_rate"] = "inf" if math.isinf(options.request_rate) else options.request_rate
    return found
