"""What has no place in virtual time, and the errors that say so."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from afore.core.errors import AforeError
from afore.core.waiting import PendingTask, describe

FENCED = (
    "add_reader",
    "add_writer",
    "add_signal_handler",
    "connect_accepted_socket",
    "connect_read_pipe",
    "connect_write_pipe",
    "create_connection",
    "create_datagram_endpoint",
    "create_server",
    "create_unix_connection",
    "create_unix_server",
    "getaddrinfo",
    "getnameinfo",
    "sendfile",
    "set_default_executor",
    "sock_accept",
    "sock_connect",
    "sock_recv",
    "sock_recv_into",
    "sock_recvfrom",
    "sock_recvfrom_into",
    "sock_sendall",
    "sock_sendfile",
    "sock_sendto",
    "start_tls",
    "subprocess_exec",
    "subprocess_shell",
)
"""Methods of an event loop that reach outside virtual time: each raises ``FencedCallError`` when called."""


class VirtualTimeError(AforeError):
    """Something that cannot be in virtual time. ``time_ns`` is when it happened."""

    def __init__(self, time_ns: int, problem: str, pending: tuple[PendingTask, ...] = ()) -> None:
        self.time_ns = time_ns
        self.pending = pending
        """Tasks that were not done, in order of their creation, and where each waits."""
        super().__init__(f"at {time_ns:,} ns of virtual time: {problem}{describe(pending)}")


class DeadlockError(VirtualTimeError):
    """Nothing is ready, no timer is pending, and what the loop runs for is not done."""


class LivelockError(VirtualTimeError):
    """Callbacks run for ever while time stands still: some task polls instead of waiting."""


class TimeLimitError(VirtualTimeError):
    """The next timer lies beyond the limit that the caller set."""


class FencedCallError(VirtualTimeError, RuntimeError):
    """A call that reaches outside virtual time; ``call`` names it."""

    def __init__(self, time_ns: int, call: str, remedy: str) -> None:
        self.call = call
        super().__init__(time_ns, f"loop.{call}() reaches outside the virtual-clock loop; {remedy}")


class FencedLoop(asyncio.BaseEventLoop):
    """An event loop without the world: every method of ``FENCED`` raises, and other threads are refused."""

    def time_ns(self) -> int:
        """The loop's nanoseconds."""
        raise NotImplementedError

    def _write_to_self(self) -> None:
        """There is no selector to wake."""

    def _refuse_thread(self, call: str) -> NoReturn:
        thread = threading.current_thread().name
        raise FencedCallError(
            self.time_ns(), call, f"it came from thread {thread!r}: use a device without threads, virtual time has one"
        )

    def remove_reader(self, fd: Any) -> bool:
        """False: none can have been added."""
        return False

    def remove_writer(self, fd: Any) -> bool:
        """False: none can have been added."""
        return False

    def remove_signal_handler(self, sig: int) -> bool:
        """False: none can have been added."""
        return False


def _fence(call: str) -> Callable[..., NoReturn]:
    def fenced(self: FencedLoop, *args: Any, **kwargs: Any) -> NoReturn:
        raise FencedCallError(
            self.time_ns(), call, "use the injected Fabric, Device and Clock, with the loopback fabric"
        )

    fenced.__name__ = call
    fenced.__qualname__ = f"FencedLoop.{call}"
    fenced.__doc__ = "Fenced: raises ``FencedCallError`` at the call."
    return fenced


for _call in FENCED:
    setattr(FencedLoop, _call, _fence(_call))
del _call
