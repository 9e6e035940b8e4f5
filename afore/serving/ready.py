"""What the launcher says while a topology comes up: a line for each role that is ready, and where the door is."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Callable, Mapping
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.status import Status as Spinner

from afore.core.config import RunConfig
from afore.core.control import Status
from afore.core.topology import DOOR, Topology, member_name
from afore.serving.preload import KERNELS
from afore.serving.spec import model_name

EXAMPLE_PROMPT = "Question: What is 3 * 4?\nAnswer:"


class ReadyLines:
    """Prints each role once, as it links; roles that link between two statuses come together, in the topology's order."""

    def __init__(
        self,
        topology: Topology,
        pids: Mapping[str, int],
        console: Console | None,
        on_status: Callable[[Status | None], None],
    ) -> None:
        """``console`` none prints nothing; ``on_status`` hears of each status too."""
        self._waiting = [member_name(role, rank) for role, rank in topology.members() if role != DOOR]
        self._pids = pids
        self._console = console
        self._on_status = on_status

    def see(self, status: Status) -> None:
        """Prints who is not missing any more."""
        self._on_status(status)
        self._print([name for name in self._waiting if name not in status.missing])

    def all(self) -> None:
        """Everybody is ready, the door with them."""
        self._print([*self._waiting, member_name(DOOR, 0)])

    def _print(self, names: list[str]) -> None:
        self._waiting = [name for name in self._waiting if name not in names]
        if self._console is not None:
            for name in names:
                self._console.print(f"{name} is ready (pid {self._pids.get(name, '?')})")


class StatusLine:
    """One quiet line on standard error that says what is awaited: rewritten in place on a terminal, else printed as it changes."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, markup=False)
        self._spinner = Spinner("", console=self._console) if self._console.is_terminal else None
        self._shown = ""
        self._spinning = False

    @property
    def in_place(self) -> bool:
        """Whether there is a terminal, so that a line leaves nothing behind."""
        return self._spinner is not None

    def __enter__(self) -> StatusLine:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.clear()

    def say(self, text: str) -> None:
        """Shows what is awaited now."""
        if text == self._shown:
            return
        self._shown = text
        if self._spinner is None:
            self._console.print(text, soft_wrap=True)
            return
        self._spinner.update(escape(text))
        if not self._spinning:
            self._spinner.start()
            self._spinning = True

    def clear(self) -> None:
        """Nothing is awaited any more."""
        self._shown = ""
        if self._spinner is not None and self._spinning:
            self._spinner.stop()
            self._spinning = False

    def over(self, text: str, console: Console) -> None:
        """A lasting line on ``console``, above what is awaited."""
        self.clear()
        console.print(text, markup=False, soft_wrap=True)


class StartProgress:
    """What the fork server does: on a terminal as it happens, else one line, and only where it takes so long that one wonders."""

    WONDER_S = 10.0

    def __init__(self, line: StatusLine) -> None:
        self._line = line
        self._timer: asyncio.TimerHandle | None = None

    def see(self, what: str) -> None:
        """``what`` it does now; empty when it is ready."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        text = f"{what} …"
        if not what:
            self._line.clear()
        elif self._line.in_place:
            self._line.say(text)
        if what.startswith(KERNELS):
            long = f"compiling kernels{what.removeprefix(KERNELS)}; first start only, a minute or more …"
            self._timer = asyncio.get_running_loop().call_later(self.WONDER_S, self._line.say, long)


def waiting_for(counts: Mapping[str, int], status: Status) -> str:
    """``waiting for: ffn 1/2, prefill 0/1``: of each role that is not complete, how many are there of how many."""
    absent = [name.rpartition("-")[0] for name in status.absent]
    parts = [
        f"{role} {count - absent.count(role)}/{count}" for role, count in counts.items() if absent.count(role) and count
    ]
    if parts:
        return f"waiting for: {', '.join(parts)}"
    return "everybody is here; loading weights"


def print_address(url: str, config: RunConfig, console: Console) -> None:
    """Where the door listens, and a command that asks it something."""
    console.print(f"serving {model_name(config)} at {url}; Ctrl-C ends it. Try:", markup=False, soft_wrap=True)
    console.print(curl_line(url, config), markup=False, highlight=False, soft_wrap=True)


def curl_line(url: str, config: RunConfig) -> str:
    """One shell line with a completion request. A key is not printed: the line reads it from a variable."""
    body = {"model": model_name(config), "prompt": EXAMPLE_PROMPT, "max_tokens": 32, "temperature": 0}
    key = "" if config.serve.api_key is None else ' -H "Authorization: Bearer $AFORE_KEY"'
    return (
        f"curl {url}/v1/completions -H {shlex.quote('Content-Type: application/json')}{key}"
        f" -d {shlex.quote(json.dumps(body))}"
    )
