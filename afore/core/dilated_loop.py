"""A wall-clock event loop whose second is longer: what virtual time promises can be held against real interleavings.

Under a factor of 10 an emulated millisecond takes ten, in which the host really computes: what the host costs counts a tenth.
Nothing but the loop knows: clocks, timers and deadlines are all in its own seconds.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Patient(selectors.DefaultSelector):
    """Waits ``factor`` times as long as it is asked to."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self._factor = factor

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return super().select(None if timeout is None else timeout * self._factor)


class DilatedLoop(asyncio.SelectorEventLoop):
    """An ordinary loop whose time runs ``factor`` times slower than the wall's. Raises ``ValueError`` for a factor below 1."""

    def __init__(self, factor: float) -> None:
        super().__init__(_Patient(factor))
        if not factor >= 1:
            self.close()
            raise ValueError(f"a factor of {factor} would need a host that is faster than it is; give 1 or more")
        self._factor = factor
        self._began_s = super().time()

    def time(self) -> float:
        """Dilated seconds since the loop was made."""
        began_s = getattr(self, "_began_s", None)
        return 0.0 if began_s is None else (super().time() - began_s) / self._factor


def run_dilated(main: Callable[[], Coroutine[Any, Any, T]], factor: float) -> T:
    """Runs ``main()`` on a ``DilatedLoop``, and returns what it returns."""
    with asyncio.Runner(loop_factory=lambda: DilatedLoop(factor)) as runner:
        return runner.run(main())
