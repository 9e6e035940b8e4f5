"""Writes on the hot path: at once and without a coroutine where the fabric can (``write_now`` of its links), else as any other."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from afore.transport.api import Link, RegionKey

_WriteNow = Callable[[RegionKey, int, bytes | memoryview, int | None], bool]


def write_now_of(link: Link) -> _WriteNow:
    """The link's ``write_now``, or one that does nothing where it has none: then ``write`` has to."""
    write_now: _WriteNow = getattr(link, "write_now", _not_now)
    return write_now


def _not_now(key: RegionKey, offset: int, data: bytes | memoryview, bell: int | None) -> bool:
    return False


async def ring_all(doors: Iterable[tuple[Link, RegionKey]], bell: int, *, timeout_us: float) -> None:
    """Rings ``bell`` at every region, in order. Raises as ``Link.write`` does, at the first that cannot be rung."""
    for link, key in doors:
        write_now: _WriteNow | None = getattr(link, "write_now", None)
        if write_now is None or not write_now(key, 0, b"", bell):
            await link.write(key, 0, b"", notify=bell, timeout_us=timeout_us)
