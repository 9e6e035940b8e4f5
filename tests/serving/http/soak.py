"""A crowd of streaming clients on a served topology of real processes, for as long as one likes:

    python -m tests.serving.http.soak --clients 200 --minutes 10

At every moment so many clients stream answers of mixed lengths; a third of them leave at random. Whoever stays must get the text
that the same prompt gets when it is alone. At the end no request is left, no KV block is held, and no process holds more memory of
its own than it held once it had warmed up. Exit status 1 where one of these does not hold. It says how far it is once a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import statistics
import sys
import time
from dataclasses import dataclass, field

import httpx
import psutil

from afore.models.bundle import bundled_prompts
from tests.serving.http.served import metric
from tests.serving.launcher import Launcher

PATIENCE_S = 300.0
SAMPLE_S = 5.0
LONGEST = 48
MIB = 1 << 20


@dataclass
class Tally:
    """What the clients have seen."""

    exact: int = 0
    left: int = 0
    wrong: list[str] = field(default_factory=list)
    tokens: int = 0
    own_mib: dict[str, list[float]] = field(default_factory=dict)
    """Memory that belongs to one process alone, sample by sample, by process."""


class Crowd:
    """Clients of one door."""

    def __init__(self, http: httpx.AsyncClient, expected: dict[str, list[str]], until_s: float, tally: Tally) -> None:
        self._http = http
        self._expected = expected
        self._until_s = until_s
        self._tally = tally

    async def client(self, dice: random.Random) -> None:
        """One request after another until the time is over."""
        prompts = sorted(self._expected)
        while time.monotonic() < self._until_s:
            prompt, most = dice.choice(prompts), dice.randint(2, LONGEST)
            leaves = dice.randrange(1, most) if dice.random() < 1 / 3 else None
            chunks = await stream(self._http, prompt, most, leaves)
            self._tally.tokens += len(chunks)
            if leaves is not None:
                self._tally.left += 1
            # A last token within a character comes as U+FFFD; the tokens before it are as they were.
            elif "".join(chunks).rstrip("\ufffd") == "".join(self._expected[prompt][:most]).rstrip("\ufffd"):
                self._tally.exact += 1
            else:
                self._tally.wrong.append(f"{prompt[-30:]!r} of {most}: {''.join(chunks)!r}")


def say(line: str) -> None:
    """One line of the report, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def stream(http: httpx.AsyncClient, prompt: str, most: int, leaves: int | None = None) -> list[str]:
    """The texts of an answer's chunks; the connection is dropped after ``leaves`` of them."""
    body = {"prompt": prompt, "max_tokens": most, "temperature": 0, "ignore_eos": True, "stream": True}
    chunks: list[str] = []
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code}: {(await answer.aread())[:500]!r}")
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                chunks.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
                if len(chunks) == leaves:
                    return chunks
    if len(chunks) != most:
        raise RuntimeError(f"{len(chunks)} of {most} chunks for {prompt!r}")
    return chunks


async def watch(launcher: Launcher, http: httpx.AsyncClient, begun_s: float, tally: Tally) -> None:
    """Samples memory; says once a minute how far the run is. Ends when cancelled."""
    said = 0
    roles = {process.name(): process for process in launcher.roles()}
    while True:
        for name, process in roles.items():
            tally.own_mib.setdefault(name, []).append(process.memory_full_info().uss / MIB)
        minutes = int((time.monotonic() - begun_s) / 60)
        if minutes > said:
            said = minutes
            text = (await http.get("/metrics")).text
            say(
                f"minute {minutes}: {tally.exact} exact, {tally.left} left, {len(tally.wrong)} wrong, "
                f"{tally.tokens} tokens; running {metric(text, 'afore_num_requests_running'):.0f}, "
                f"waiting {metric(text, 'afore_num_requests_waiting'):.0f}, "
                f"preemptions {metric(text, 'afore_num_preemptions_total'):.0f}; own MiB "
                + ", ".join(f"{name} {samples[-1]:.1f}" for name, samples in tally.own_mib.items())
            )
        await asyncio.sleep(SAMPLE_S)


async def idle(http: httpx.AsyncClient) -> str:
    """The metrics once nothing runs, nothing waits and no block is held."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            text = (await http.get("/metrics")).text
            names = ("afore_num_requests_running", "afore_num_requests_waiting", "afore_kv_cache_usage_perc")
            if not any(metric(text, name) for name in names):
                return text


async def soak(launcher: Launcher, url: str, *, clients: int, minutes: float, seed: int) -> Tally:
    """Runs the crowd."""
    tally = Tally()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits) as http:
        expected = {p.prompt: await stream(http, p.prompt, LONGEST) for p in bundled_prompts()}
        begun_s = time.monotonic()
        crowd = Crowd(http, expected, begun_s + minutes * 60, tally)
        watching = asyncio.create_task(watch(launcher, http, begun_s, tally))
        async with asyncio.TaskGroup() as group:
            for number in range(clients):
                group.create_task(crowd.client(random.Random(seed * 1_000_003 + number)))
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        text = await idle(http)
        say(f"idle: no request, no KV block; {metric(text, 'afore_num_preemptions_total'):.0f} preemptions")
    return tally


def verdict(tally: Tally, growth_mib: float) -> int:
    """Prints what came out; the exit status."""
    say(f"{tally.exact} exact, {tally.left} left, {len(tally.wrong)} wrong; {tally.tokens} tokens")
    for wrong in tally.wrong[:5]:
        say(f"wrong: {wrong}")
    failed = bool(tally.wrong)
    for name, samples in tally.own_mib.items():
        third = max(1, len(samples) // 3)
        middle, last = statistics.median(samples[third : 2 * third] or samples), statistics.median(samples[-third:])
        grown = last - middle
        failed |= grown > growth_mib
        say(
            f"{name}: own memory {samples[0]:.1f} MiB at first, {middle:.1f} in the middle third, {last:.1f} in the "
            f"last: {'GREW' if grown > growth_mib else 'flat'}"
        )
    return int(failed)


def main() -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--growth-mib", type=float, default=3.0, help="most growth of one process (default 3)")
    parser.add_argument("options", nargs="*", help="for the launcher, behind --")
    asked = parser.parse_args()
    launcher = Launcher(*asked.options)
    try:
        url = launcher.wait_for("serving ").split(" at ")[1].split(";")[0]
        tally = asyncio.run(soak(launcher, url, clients=asked.clients, minutes=asked.minutes, seed=asked.seed))
        status = verdict(tally, asked.growth_mib)
        launcher.signal(signal.SIGINT)
        ended, _, errors = launcher.end()
        say(
            f"the launcher ended with {ended}; left behind: {launcher.leftovers() or 'nothing'}{errors and ': ' + errors}"
        )
        return status or ended
    finally:
        for process in launcher.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


if __name__ == "__main__":
    sys.exit(main())
