"""What ``top`` shows: figures between two samples, and their tables. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from afore.tools.printable import printable
from afore.tools.top_link_view import link_figures, link_table
from afore.tools.top_sample import Sample

FORMULAS = (
    "token and tile imbalance: the most loaded FFN worker / their mean, of primaries alone (before) and of the plans (after);"
    " exposed: how long targets with copies waited for them; now: the last interval, all: since the epoch began; behind: plan"
    " ring entries that a worker has not moved past; lease: since its last sign of life; CPU: 100 % is one core;"
    " waits: demand without a plan, plans not moved past, replies missing;"
    " writes/s: of a link, in the last interval"
)
BEHIND_SHARE = 0.5
"""Share of the ring's slots from which a reader that is behind is worth a colour."""


def figures(before: Sample, after: Sample, run: str) -> dict[str, Any]:
    """Everything that is shown, as plain JSON; none where it is not known."""
    seconds = max(1e-9, (after.at_ns - before.at_ns) / 1e9)
    counted = {name: _counter(after, name) for name in ("targets", "refusals", "aborts", "plan_errors")}
    targets = counted["targets"] - _counter(before, "targets")
    # The scheduler of a new epoch counts from 0 again.
    same_epoch = targets >= 0 and bool(before.stats)
    return {
        "run": run,
        "serving": after.serving,
        "missing": list(after.missing),
        "lost": after.lost,
        "url": after.url,
        "interval_s": seconds,
        "requests": dict(after.requests) or None,
        "plans": {
            "total": counted["targets"],
            "per_second": targets / seconds if same_epoch else None,
            **{name: counted[name] for name in ("refusals", "aborts", "plan_errors")},
        },
        "imbalance": _imbalance(before if same_epoch else None, after),
        "migration": _migration(before if same_epoch else None, after, seconds),
        "ring": _ring(after),
        "links": link_figures(before, after),
        "processes": _processes(before, after, seconds),
    }


def _counter(sample: Sample, name: str) -> int:
    return int(sample.stats.get("counters", {}).get(name, 0))


def _window(mean: float | None, count: int, mean_before: float | None, count_before: int) -> float | None:
    """The mean of what came between two readings of a running mean."""
    if mean is None or count <= count_before:
        return None
    return (mean * count - (mean_before or 0.0) * count_before) / (count - count_before)


def _imbalance(before: Sample | None, after: Sample) -> dict[str, Any]:
    def counted(sample: Sample | None) -> int:
        return 0 if sample is None else sum(layer["targets"] for layer in sample.stats.get("layers", ()))

    found: dict[str, Any] = {}
    for kind, moments in (("token", ("before", "after")), ("tile", ("before", "after", "bound"))):
        whole = after.stats.get("imbalance", {}).get(kind, {})
        earlier = {} if before is None else before.stats.get("imbalance", {}).get(kind, {})
        found[kind] = {
            "all": {moment: whole.get(moment) for moment in moments},
            "now": {
                moment: None
                if before is None
                else _window(whole.get(moment), counted(after), earlier.get(moment), counted(before))
                for moment in moments
            },
        }
    return found


def _migration(before: Sample | None, after: Sample, seconds: float) -> dict[str, Any]:
    whole = after.stats.get("migration", {})
    earlier: Mapping[str, Any] = {} if before is None else before.stats.get("migration", {})
    count, count_before = whole.get("targets", 0), earlier.get("targets", 0)
    exposed, exposed_before = whole.get("exposed_ms_mean"), earlier.get("exposed_ms_mean")
    return {
        "copies": whole.get("copies", 0),
        "copies_per_second": None if before is None else (whole.get("copies", 0) - earlier.get("copies", 0)) / seconds,
        "targets": count,
        "exposed_targets": whole.get("exposed_targets"),
        "exposed_ms_mean": {
            "all": exposed,
            "now": None if before is None else _window(exposed, count, exposed_before, count_before),
        },
    }


def _ring(after: Sample) -> dict[str, Any] | None:
    if after.seen.ring is None:
        return None
    return {
        "epoch": after.seen.ring.header.epoch,
        "slots": after.seen.ring.header.layout.num_slots,
        "last_sequence": after.seen.ring.last_sequence,
        "readers": [
            {
                "worker": f"ffn-{reader.rank}",
                "behind": reader.behind,
                "lease_ms": max(0.0, (after.looked_ns - reader.seen_ns) / 1e6) if reader.seen_ns else None,
            }
            for reader in after.seen.ring.readers
        ],
    }


def _processes(before: Sample, after: Sample, seconds: float) -> list[dict[str, Any]]:
    earlier = {process.pid: process.cpu_s for process in before.processes}
    return [
        {
            "name": process.name,
            "pid": process.pid,
            "cpu_percent": 100 * (process.cpu_s - earlier[process.pid]) / seconds if process.pid in earlier else None,
            "cpu_s": process.cpu_s,
            "rss_mib": process.rss_bytes / 2**20,
        }
        for process in after.processes
    ]


# Tables


def render(found: Mapping[str, Any]) -> RenderableType:
    """One screen."""
    return Group(_head(found), _work(found), _roles(found), link_table(found["links"]), Text(FORMULAS, style="dim"))


def _head(found: Mapping[str, Any]) -> Text:
    if found["lost"]:
        state, style = f"lost: {printable(found['lost'])}", "bold red"
    elif found["serving"]:
        state, style = "serving", "green"
    else:
        state, style = f"not serving; missing: {', '.join(found['missing']) or 'nobody'}", "yellow"
    text = Text(f"cluster {printable(found['run'])}: ").append(state, style=style)
    if found["url"]:
        text.append(f"   {printable(found['url'])}")
    return text.append(f"   every {found['interval_s']:.1f} s")


def _work(found: Mapping[str, Any]) -> Table:
    table = Table("", title_justify="left")
    for heading in ("now", "all"):
        table.add_column(heading, justify="right")
    if (requests := found["requests"]) is not None:
        table.add_row("requests running", f"{requests.get('running', 0):,.0f}", "")
        table.add_row("requests waiting", f"{requests.get('waiting', 0):,.0f}", "")
        table.add_row("KV cache in use", f"{requests.get('kv_usage', 0):.0%}", "")
    plans, migration, exposed = found["plans"], found["migration"], found["migration"]["exposed_ms_mean"]
    table.add_row("plans", _number(plans["per_second"], 1, "/s"), f"{plans['total']:,}")
    for kind in ("token", "tile"):
        one = found["imbalance"][kind]
        table.add_row(f"{kind} imbalance, before → after", _arrow(one["now"]), _arrow(one["all"]))
    bound = found["imbalance"]["tile"]
    table.add_row("tile imbalance, bound", _number(bound["now"]["bound"], 3), _number(bound["all"]["bound"], 3))
    table.add_row("copies", _number(migration["copies_per_second"], 1, "/s"), f"{migration['copies']:,}")
    table.add_row("exposed wait, mean", _number(exposed["now"], 3, " ms"), _number(exposed["all"], 3, " ms"))
    for name, shown in (("refusals", "plans refused"), ("aborts", "targets aborted"), ("plan_errors", "plan errors")):
        if plans[name]:
            table.add_row(Text(shown, style="yellow"), "", f"{plans[name]:,}")
    return table


def _roles(found: Mapping[str, Any]) -> Table:
    ring = found["ring"]
    readers = {} if ring is None else {reader["worker"]: reader for reader in ring["readers"]}
    table = Table("role")
    for heading in ("pid", "CPU", "memory", "behind", "lease"):
        table.add_column(heading, justify="right")
    for process in found["processes"]:
        mine = [readers[name] for name in process["name"].split(", ") if name in readers]
        behind = max((reader["behind"] for reader in mine), default=None)
        leases = [reader["lease_ms"] for reader in mine if reader["lease_ms"] is not None]
        late = behind is not None and ring is not None and behind > BEHIND_SHARE * ring["slots"]
        table.add_row(
            printable(process["name"]),
            str(process["pid"]),
            _number(process["cpu_percent"], 0, " %"),
            f"{process['rss_mib']:,.0f} MiB",
            "" if behind is None else Text(f"{behind:,}", style="yellow" if late else ""),
            _number(max(leases), 0, " ms") if leases else "",
        )
    return table


def _arrow(moments: Mapping[str, float | None]) -> str:
    if moments["before"] is None or moments["after"] is None:
        return "-"
    return f"{moments['before']:.3f} → {moments['after']:.3f}"


def _number(value: float | None, digits: int, unit: str = "") -> str:
    return "-" if value is None else f"{value:z,.{digits}f}{unit}"
