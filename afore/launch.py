"""The command: ``python -m afore.launch``. Starts a whole topology on this machine, or one role of it.

Exit status: 0 after an orderly end (Ctrl-C and SIGTERM included), 2 when the request could not be carried out as given (one line
says why), 1 when something failed on the way (one line names it).
"""

from __future__ import annotations

if __name__ == "__main__":
    # Until the loop takes signals, Ctrl-C ends this process as it ends any other, without a word: nothing is started yet.
    import signal

    signal.signal(signal.SIGINT, signal.SIG_DFL)

import asyncio
import dataclasses
import os
import signal
import sys
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from afore.core.config import RunConfig
    from afore.models.bundle import Prompt
    from afore.serving.options import LaunchOptions
    from afore.serving.supervisor import Supervisor

EXIT_FAILED = 1
EXIT_USAGE = 2
NOT_INSTALLED = (
    "{python} has no module {missing}; in a checkout run `make run` once and `. .venv/bin/activate` in each shell; elsewhere"
    " `pip install afore`"
)
MOST_SHOWN = 4000
"""Characters of an error."""
LOADING = "loading torch …"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    from afore.core.descriptors import fill_standard_descriptors

    fill_standard_descriptors()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # torch's store tells each retry with a stack
    from afore.core.environment import take_secret
    from afore.core.errors import AforeError, CheckpointError, ConfigError, HostError, RequestError, RoleLost

    def say(error: AforeError) -> None:
        from afore.tools.printable import printable

        # What it names may come out of a file or from another machine.
        print(f"afore: {printable(str(error), MOST_SHOWN)}", file=sys.stderr)

    try:
        return _run(argv, take_secret())
    except (ConfigError, CheckpointError, HostError, RequestError) as error:
        say(error)
        return EXIT_USAGE
    except AforeError as error:
        say(error)
        usage = (ConfigError.__name__, CheckpointError.__name__, HostError.__name__)
        # A role can meet what the checks beforehand could not see (memory that somebody else took in between).
        return EXIT_USAGE if isinstance(error, RoleLost) and error.reason.startswith(usage) else EXIT_FAILED
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "afore"):
            raise
        print(f"afore: {NOT_INSTALLED.format(python=sys.executable, missing=missing)}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:
        return EXIT_FAILED


def _run(argv: Sequence[str] | None, secret: str | None) -> int:
    from afore.core.clock import WallClock
    from afore.serving.options import given_keys, parse, prepared

    started_ns = WallClock().now_ns()
    arguments = prepared(argv)
    options, config = parse(arguments)
    from afore.core.topology import ATTENTION, FFN, PREFILL
    from afore.workers.device.cuda.probe import require_gpus

    if options.role is None or {ATTENTION, FFN, PREFILL} & set(options.roles):
        require_gpus(config)  # before anything is compiled, which takes minutes on a fresh machine
    if options.role is not None:
        return _run_roles(options, config, given_keys(arguments), secret)
    prompts: tuple[Prompt, ...] = ()
    if options.prompts is not None:
        from afore.serving.demo import read_prompts

        # Before the loop: what reads from a pipe may wait for long, and Ctrl-C works as it does anywhere.
        prompts = read_prompts(options.prompts, options.max_new_tokens)
    return asyncio.run(_until_signalled(_supervise(options, config, prompts, started_ns)))


def _run_roles(options: LaunchOptions, config: RunConfig, given: frozenset[str], secret: str | None) -> int:
    """One process of a cluster that is started by hand."""
    from afore.serving.ready import StatusLine

    with StatusLine() as line:
        line.say("loading torch")
        from afore.serving.by_hand import run_by_hand

        return run_by_hand(
            options.roles,
            options.rank,
            cluster=options.cluster,
            config=dataclasses.replace(config, serve=dataclasses.replace(config.serve, http=True)),
            given=given,
            secret=secret,
            log_level=options.log,
            line=line,
        )


async def _until_signalled(work: Coroutine[Any, Any, int]) -> int:
    """Runs ``work`` until it ends, or until Ctrl-C or SIGTERM cancels it: then its clean-up runs and the status is 0."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    signalled = False

    def stop() -> None:
        # Once: a second Ctrl-C must not break off the clean-up that the first one began.
        nonlocal signalled
        if not signalled:
            signalled = True
            task.cancel()

    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, stop)
    try:
        return await task
    except asyncio.CancelledError:
        if not signalled:
            raise
        return 0


async def _supervise(options: LaunchOptions, config: RunConfig, prompts: tuple[Prompt, ...], started_ns: int) -> int:
    """Starts the topology, does what was asked, ends it."""
    from afore.serving.ready import StartProgress, StatusLine
    from afore.serving.supervisor import Supervisor

    # The fork server imports on one core while this process imports on another.
    with StatusLine() as line:
        async with Supervisor(config.policy, StartProgress(line).see) as supervisor:
            return await _serve(options, config, prompts, supervisor, started_ns)


async def _serve(
    options: LaunchOptions, config: RunConfig, prompts: tuple[Prompt, ...], supervisor: Supervisor, started_ns: int
) -> int:
    from rich.console import Console

    from afore.cluster import Cluster
    from afore.core.clock import WallClock
    from afore.core.errors import ConfigError, RoleLost
    from afore.models.bundle import Prompt
    from afore.serving import demo
    from afore.serving.http.listen import check_listen
    from afore.serving.ready import ReadyLines, print_address
    from afore.serving.start import running_processes

    console = Console(stderr=options.json == "-", highlight=False, markup=False, emoji=False)
    clock = WallClock()
    if options.prompt is not None:
        prompts = (Prompt(id="prompt", domain="", prompt=options.prompt, max_new_tokens=options.max_new_tokens),)
    elif options.demo and not prompts:
        prompts = demo.read_prompts(None, options.max_new_tokens)
    if options.json is not None and not prompts:
        raise ConfigError("json", "there is no result to write", "add --demo, --prompts or --prompt")
    if options.json not in (None, "-"):
        demo.check_writable(options.json)
    if not prompts:
        check_listen(config.serve)
        config = dataclasses.replace(config, serve=dataclasses.replace(config.serve, http=True))
    if options.demo and not sys.stderr.isatty():
        print(LOADING, file=sys.stderr, flush=True)  # a terminal has a line that changes
    for line in await supervisor.check(config, timeout_s=config.times.join_s):
        console.print(line)
    with demo.loading(console) as on_status:
        ready = ReadyLines(config.topology, supervisor.pids, console if not prompts else None, on_status)
        running = running_processes(
            config, clock, name=options.cluster, log_level=options.log, on_status=ready.see, supervisor=supervisor
        )
        async with Cluster.over(running, config, clock) as cluster:
            ready.all()
            on_status(None)
            ready_s = (clock.now_ns() - started_ns) / 1e9
            count = len(config.topology.members())
            console.print(
                f"ready after {ready_s:.1f} s: {count} processes, {config.topology.describe()}, policy {config.policy}"
            )
            if not prompts:
                print_address(cluster.url, config, console)
                try:
                    lost = await cluster.lost()
                except asyncio.CancelledError:
                    console.print("the cluster ended")
                    raise
                raise RoleLost(*lost.split(": ", 1))
            if options.prompt is not None:
                answers = [await demo.answer_one(cluster, prompts[0])]
            else:
                answers = await demo.answer_all(cluster, prompts, console)
            result = demo.summarise(answers, await cluster.stats(), config.policy, config.topology.describe())
    if options.prompt is not None and options.json != "-":
        console.print(answers[0].text, markup=False, highlight=False, soft_wrap=True)
        if note := demo.limit_note(answers[0]):
            print(note, file=sys.stderr)
    elif options.prompt is None:
        demo.print_summary(result, console)
    if options.json is not None:
        demo.write_json(options.json, result)
    failed = [answer for answer in answers if answer.error]
    for answer in failed:
        print(f"afore: prompt {answer.prompt.id}: {answer.error}", file=sys.stderr)
    return EXIT_FAILED if failed else 0


if __name__ == "__main__":
    status = main()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done: a late Ctrl-C changes no status
    from afore.core.ending import end_process

    end_process(status)
