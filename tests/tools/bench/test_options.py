"""The command line of ``bench serve``: what is taken, and that what does not fit together is refused by name."""

from __future__ import annotations

import math

import pytest

from afore.core.config import RunConfig
from afore.core.errors import ConfigError
from afore.tools.bench import main
from afore.tools.bench.latency import Objectives
from afore.tools.bench.options import ServeBenchOptions, parse


def parsed(line: str) -> tuple[ServeBenchOptions, RunConfig]:
    return parse(line.split())


def test_options_of_the_launcher_describe_the_cluster() -> None:
    options, config = parsed("--topology.ffn 3 --policy static --request-rate 2.5 --slo e2e=1s --max-num-seqs 8")
    assert (config.topology.ffn, config.policy, config.batch.max_num_seqs) == (3, "static", 8)
    assert (options.request_rate, options.objectives) == (2.5, Objectives(e2e_ms=1000))


def test_defaults() -> None:
    options, config = parse([])
    assert math.isinf(options.request_rate)
    assert (options.num_prompts, options.warmup, options.rounds, options.concurrency) == (32, 2, 5, None)
    assert options.compare == (config.topology,)


def test_topologies_are_written_with_slashes() -> None:
    options, _ = parsed("--against transformers --compare 1/2/2,2/4/3")
    assert [(t.attention, t.ffn, t.microbatches) for t in options.compare] == [(1, 2, 2), (2, 4, 3)]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("--request-rte 4", "did you mean request-rate"),
        ("--topolgy.ffn 4", "did you mean topology.ffn"),
        ("--demo", "demo: it is not for a benchmark"),
        ("--role ffn", "role: it is not for a benchmark"),
        ("--compare 1/2/2", "only for --against"),
        ("--against transformers --request-rate 3", "not for --against"),
        ("--against transformers --compare 1/2", "write A/N/M"),
        ("--against transformers --compare 1/2/2,1/2/2", "twice"),
        ("--against transformers --compare 0/2/2", "topology.attention"),
        ("--url http://x --topology.ffn 2", "--url names one"),
        ("--url http://x --spans", "leave out --url"),
        ("--arrivals a.csv --request-rate 3", "has its own times"),
        ("--arrivals a.csv --endpoint chat", "need completions"),
        ("--slo fast", "is no objective"),
        (f"--slo ttft={'9' * 400}ms", "more than a year"),
        ("--url http://x --api-key schlüssel", "api-key: it is empty or has a space"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(line: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse(line.split())


@pytest.mark.parametrize(
    "line",
    [
        "--rounds 4",
        "--request-rate 0",
        "--num-prompts 0",
        "--time-scale inf",
        "--warmup -1",
        "--time-scale 1e307",
        "--time-scale 1e-307",
        "--time-scale nan",
        "--request-rate 1e-308",
        "--request-rate 1e300",
        "--request-rate nan",
        "--burstiness 1e-300",
        "--burstiness 1e308",
        "--num-prompts 1000000000",
    ],
)
def test_numbers_out_of_range_are_usage_errors(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *line.split()]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"bench: {line.split()[0][2:]}: ")


def test_no_benchmark_at_all_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert (
        capsys.readouterr().err
        == "bench: benchmark: none is named; give one of: serve, path, transport, virtual, planner\n"
    )


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"]])
def test_help_has_examples(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 0
    assert "python -m afore.tools.bench serve" in capsys.readouterr().out


def test_requests_that_nobody_will_see_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--url", "http://127.0.0.1:1", "--request-rate", "1e-6", "--num-prompts", "9999"]) == 2
    assert "request-rate: the last request would be due after" in capsys.readouterr().err


def test_mistakes_are_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serv"]) == 2
    assert capsys.readouterr().err == "bench: serv: no such benchmark; did you mean serve?\n"
    assert main(["serve", "--prompts", "no-such-file"]) == 2
    assert capsys.readouterr().err.startswith(
        "bench: prompts: no-such-file cannot be read: No such file or directory; give"
    )
