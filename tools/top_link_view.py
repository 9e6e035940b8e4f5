"""The links that ``top`` shows: figures between two samples, and their table. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from rich.table import Table
from rich.text import Text

from afore.core.target import Target
from afore.tools.inspect_views import ago
from afore.tools.top_links import Link
from afore.tools.top_sample import Sample

MOST_REPLIES: Final = 16
"""Rows of reply links; where there are more, those of a worker are one row."""
ELSEWHERE: Final = "on another node"
_STATES: Final = {
    "demand": ("waiting", "taken"),
    "inputs": ("incomplete", "complete"),
    "replies": ("missing", "written"),
}


def link_figures(before: Sample, after: Sample) -> list[dict[str, Any]]:
    """Every link as plain JSON; none where it is not known."""
    seconds = max(1e-9, (after.looked_ns - before.looked_ns) / 1e9)
    same_epoch = (
        before.seen.ring is not None
        and after.seen.ring is not None
        and before.seen.ring.header.epoch == after.seen.ring.header.epoch
    )
    earlier = {_name(link): link for link in before.seen.links} if same_epoch else {}
    num_layers = len(after.stats.get("layers", ()))
    found = []
    for link in after.seen.links:
        writes = _writes(earlier.get(_name(link)), link, num_layers)
        found.append(
            {
                "carries": link.carries,
                "from": link.source,
                "to": link.sink,
                "elsewhere": link.elsewhere or None,
                "last": _text(_last(link)),
                "targets": None if link.targets is None else [_text(target) for target in link.targets],
                "state": _state(link, after.looked_ns),
                "waits": link.waits,
                "writes_per_second": None if writes is None else writes / seconds,
            }
        )
    return found


def _name(link: Link) -> tuple[str, str, str]:
    return link.carries, link.source, link.sink


def _writes(before: Link | None, after: Link, num_layers: int) -> int | None:
    """Between two looks: numbered, or as many targets as lie between, which a microbatch goes through one after another."""
    if before is None:
        return None
    if before.written is not None and after.written is not None:
        return max(0, after.written - before.written)
    if before.targets is None or after.targets is None or not num_layers:
        return None
    total = 0
    for earlier, later in zip(before.targets, after.targets, strict=True):
        if earlier != later:
            if earlier is None or later is None:
                return None
            total += (later.step - earlier.step) * num_layers + later.layer - earlier.layer
    return total if total >= 0 else None


def _last(link: Link) -> Target | None:
    """The one to look at: what waits goes first."""
    known = link.waiting or [target for target in link.targets or () if target is not None]
    return max(known, key=lambda target: (target.step, target.layer), default=None)


def _text(target: Target | None) -> str | None:
    return None if target is None else str(target)


def _state(link: Link, now_ns: int) -> str | None:
    if link.carries == "plans":
        return f"{ago(now_ns, link.seen_ns)} ago" if link.seen_ns else None
    if link.waits is None or _last(link) is None:
        return None
    return _STATES[link.carries][0 if link.waits else 1]


# Table


def link_table(links: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each link; 80 columns are enough, and where they are not it is names that are folded, never a number."""
    table = Table()
    table.add_column("link", overflow="fold")
    table.add_column("last target", overflow="fold", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for heading in ("waits", "writes/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for link in _few(links):
        waits = link["waits"]
        table.add_row(
            f"{link['from']} → {link['to']}",
            link["last"] or (ELSEWHERE if link["elsewhere"] else "-"),
            link["state"] or "-",
            "-" if waits is None else Text(f"{waits:,}", style="yellow" if waits else ""),
            "-" if link["writes_per_second"] is None else f"{link['writes_per_second']:,.1f}",
        )
    return table


def _few(links: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    replies = [link for link in links if link["carries"] == "replies"]
    if len(replies) <= MOST_REPLIES:
        return list(links)
    merged = []
    for worker in dict.fromkeys(link["from"] for link in replies):
        mine = [link for link in replies if link["from"] == worker]
        worst = max(mine, key=lambda link: link["waits"] or 0)
        merged.append(
            {
                **worst,
                "to": "attention",
                "elsewhere": all(link["elsewhere"] for link in mine),
                **{key: _sum(link[key] for link in mine) for key in ("waits", "writes_per_second")},
            }
        )
    return [link for link in links if link["carries"] != "replies"] + merged


def _sum(values: Iterable[float | None]) -> float | None:
    """Of those that are known."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None
