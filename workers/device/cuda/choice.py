"""Which kernels compute a target's experts, by measurement: on this GPU, for this model's shapes, for targets of each size.

Measured once when a worker starts, over its own weights, and kept in a file, so that the next start only reads it. Workers that
share a GPU take turns: who comes second finds what the first has measured. A way that fails to compile or to run is left out, and
said.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afore.core.errors import HostError
from afore.workers.device.cuda.kernels import Implementation

_log = logging.getLogger(__name__)

FILE = "gpu-kernels.json"
_FORMAT = 1
REPEATS = 5
STEP = 4
"""Each size of a target that is measured has so many times the pairs of the one before."""
Measure = Callable[[Implementation, int], float]
"""Microseconds of one way for a target of so many pairs. Raises what it raises."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Names of ways, by the most pairs of a target that each is for, ascending; the last is for all that are larger."""

    steps: tuple[tuple[int, str], ...]
    why: str

    def name(self, pairs: int) -> str:
        """The way for a target of so many pairs."""
        for most, name in self.steps:
            if pairs <= most:
                return name
        return self.steps[-1][1]

    def describe(self) -> str:
        """One phrase for logs."""
        names = list(dict.fromkeys(name for _, name in self.steps))
        if len(names) == 1:
            return f"{names[0]} ({self.why})"
        return ", ".join(f"{name} up to {most} pairs" for most, name in self.steps) + f" ({self.why})"


def sizes(most_pairs: int) -> list[int]:
    """Numbers of pairs that are measured: a few, up to the most."""
    found, pairs = [], 16
    while pairs < most_pairs:
        found.append(pairs)
        pairs *= STEP
    return [*found, max(1, most_pairs)]


def choose(
    ways: Sequence[Implementation], key: Mapping[str, Any], most_pairs: int, measure: Measure, kept: Path | None
) -> Choice:
    """The choice that ``kept`` has for ``key``, or what is measured now, and then kept. Raises ``HostError`` where no way works.

    ``key``: everything that the times depend on: GPU, versions, shapes.
    """
    if len(ways) == 1:
        return Choice(((most_pairs, ways[0].name),), "the only way that applies")
    text = json.dumps({**key, "ways": [way.name for way in ways], "pairs": most_pairs}, sort_keys=True)
    with _locked(kept) as file:
        names = {way.name for way in ways}
        known = _read(file).get(text)
        known = known if known and {name for _, name in known} <= names else None
        if known is not None:
            return Choice(known, f"measured before, kept in {file}")
        chosen = _measured(ways, most_pairs, measure)
        if file is not None:
            _keep(file, text, chosen)
    return Choice(chosen, "measured now")


def _measured(ways: Sequence[Implementation], most_pairs: int, measure: Measure) -> tuple[tuple[int, str], ...]:
    steps: list[tuple[int, str]] = []
    left = list(ways)
    for pairs in sizes(most_pairs):
        times: dict[str, float] = {}
        for way in tuple(left):
            try:
                times[way.name] = measure(way, pairs)
            except Exception as error:
                first_line = (str(error).splitlines() or [""])[0]
                _log.warning("kernels %s do not work here: %s: %s", way.name, type(error).__name__, first_line)
                left.remove(way)
        if not times:
            raise HostError("GPU", "no kernels work here", "see the warnings above; try --device.kernels torch")
        best = min(times, key=lambda name: times[name])
        _log.info("%d pairs: %s", pairs, ", ".join(f"{name} {us:.1f} us" for name, us in times.items()))
        steps.append((pairs, best))
    gone = {name for _, name in steps} - {way.name for way in left}
    # One that fails at a large target is trusted with none.
    return tuple((most, left[0].name if name in gone and left else name) for most, name in steps)


def median_us(measure_once: Callable[[], float], repeats: int = REPEATS) -> float:
    """Of several; the first is for warming up."""
    measure_once()
    return statistics.median(measure_once() for _ in range(repeats))


def default_file() -> Path | None:
    """Where choices are kept; none where this user has no home."""
    try:
        return Path.home() / ".cache" / "afore" / FILE
    except RuntimeError:
        return None


@contextlib.contextmanager
def _locked(file: Path | None) -> Iterator[Path | None]:
    """The file, with nobody else measuring; none where it cannot be written, which is said."""
    if file is None:
        yield None
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(file.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        _log.warning("which kernels are fastest is measured at every start: %s", error)
        yield None
        return
    try:
        with contextlib.suppress(OSError):  # some file systems have no locks: then workers measure side by side
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield file
    finally:
        os.close(lock)


def _read(file: Path | None) -> dict[str, tuple[tuple[int, str], ...]]:
    """What is kept; nothing where the file is damaged, or of another format."""
    if file is None:
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            return {}
        return {key: tuple((int(most), str(name)) for most, name in steps) for key, steps in content["kept"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _keep(file: Path, key: str, steps: tuple[tuple[int, str], ...]) -> None:
    kept = {**_read(file), key: steps}
    beside = file.with_suffix(f".{os.getpid()}")
    try:
        beside.write_text(json.dumps({"format": _FORMAT, "kept": kept}, indent=1) + "\n", encoding="utf-8")
        beside.replace(file)
    except OSError as error:
        _log.warning("which kernels are fastest cannot be kept: %s", error)
