"""What roles say while a part runs: passed on as it comes, and kept, so that a report can name what they have really used."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterator

SAID = {
    "group_wanted": re.compile(r": group (\w+), because (.+)"),
    "group": re.compile(r" has its rows by (\w+)"),
    "partition": re.compile(r": partition by ([\w-]+), experts by "),
    "experts": re.compile(r": partition by [\w-]+, experts by (.+)"),
    "attention": re.compile(r"attention runs (?:modules on GPU \d+, with )?(.+)"),
    "did_not_work": re.compile(r"(kernels [\w-]+ do not work here.*)"),
    "rows_copied_once_more": re.compile(r"(inputs cannot be pinned where they lie.*)"),
}
"""Of lines that workers log: ``workers/ffn_cuda.py``, ``workers/checkpoint_models.py``, ``workers/device/cuda/choice.py``."""
END_S = 2.0


class Heard:
    """What was said so far."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def add(self, piece: bytes) -> None:
        """More of it."""
        self._pieces.append(piece)

    @property
    def text(self) -> str:
        """All of it."""
        return b"".join(self._pieces).decode(errors="replace")


@contextlib.contextmanager
def overhearing() -> Iterator[Heard]:
    """What this process and those that it starts write to standard error in the block is kept, and passed on."""
    heard = Heard()
    read, write = os.pipe()
    sys.stderr.flush()
    own = os.dup(2)
    os.dup2(write, 2)
    os.close(write)

    def pass_on() -> None:
        while piece := os.read(read, 1 << 16):
            heard.add(piece)
            with contextlib.suppress(OSError):
                os.write(own, piece)

    # It ends when all that were started have: one that is left behind must not hold up the end.
    thread = threading.Thread(target=pass_on, name="heard", daemon=True)
    thread.start()
    try:
        yield heard
    finally:
        sys.stderr.flush()
        os.dup2(own, 2)
        thread.join(END_S)
        if not thread.is_alive():
            os.close(read)
            os.close(own)


def used_of(text: str) -> dict[str, list[str]]:
    """What workers have said that they use, each different answer once; a question that nobody answered is left out."""
    found: dict[str, list[str]] = {}
    for name, pattern in SAID.items():
        answers = [", because ".join(match.groups()) for match in pattern.finditer(text)]
        if answers:
            found[name] = list(dict.fromkeys(answers))
    return found
