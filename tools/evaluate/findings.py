"""Sentences on top of the page, each read off the rows: how ours compares with the paper, and where a baseline comes closer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from afore.tools.evaluate.figure import Row

Found = Mapping[str, Sequence[Row]]
_NOISE = 0.005
"""What gains differ by from seed to seed."""


def findings(figures: Found) -> list[str]:
    """What can be said from the figures that are there."""
    texts = [
        say(figures)
        for say in (
            _order,
            _approaches,
            _baselines,
            _closest,
            _hiding,
            _hiding_by_m,
            _ablation,
            _beyond,
            _grid,
            _sensitivity,
        )
    ]
    return [text for text in texts if text]


def _order(figures: Found) -> str:
    rows = {row.label: row for row in figures.get("fig2", ())}
    if not rows:
        return ""
    apart = rows.pop("AFD").ours["loss by skew"]
    parts = []
    for label, row in rows.items():
        loss = row.ours["loss by skew"]
        parts.append(f"{loss:.1%} {label} ({'less, as in the paper' if loss < apart else 'more, unlike the paper'})")
    return f"Figure 2: skew costs {apart:.1%} disaggregated; {'; '.join(parts)} (paper: 20.1 % and 11.9 %)."


def _approaches(figures: Found) -> str:
    gains = {row.label: row.ours["over static"] for row in figures.get("fig3", ())}
    if len(gains) < 4:
        return ""
    ours = [gains[f"Approach {number}"] for number in (1, 2, 3)]
    listed = ", ".join(f"{gain:+.1%}" for gain in ours)
    return f"Figure 3: Approaches 1, 2, 3 over static {listed}, {_ranked(ours)} (+4.5, +11.9, +30.3 %)."


def _ranked(gains: Sequence[float]) -> str:
    """Whether gains rise as the paper's do. Two within ``_NOISE`` of each other say nothing about order."""
    steps = [later - earlier for earlier, later in pairwise(gains)]
    if any(abs(step) <= _NOISE for step in steps):
        return "too close together for an order"
    return "in the paper's order" if min(steps) > 0 else "in another order than the paper's"


def spread(values: Sequence[float], spec: str = "+.1%") -> str:
    """The least and the most of them, one where both read alike."""
    least, most = format(min(values), spec), format(max(values), spec)
    return least if least == most else f"{least} to {most}"


def _afore(figures: Found, name: str = "fig8") -> list[Row]:
    return [row for row in figures.get(name, ()) if row.label.endswith(": afore")]


def _baselines(figures: Found) -> str:
    rows = _afore(figures)
    if not rows:
        return ""
    over = [row.ours["over the best baseline"] for row in rows]
    static = [row.ours["over static"] for row in rows]
    return (
        f"Figure 8: `afore` is {spread(static)} over static (paper: 26.0 to 34.1 %), and "
        f"{spread(over)} over the best baseline, ours among them (paper: 10.1 to 17.6 % over its own)."
    )


def _closest(figures: Found) -> str:
    rows = list(figures.get("fig8", ()))
    names: dict[str, list[tuple[float, float, float]]] = {}
    own: dict[str, float] = {}
    for row in rows:
        workload, _, label = row.label.partition(": ")
        full = next((other for other in rows if other.label == f"{workload}: afore"), None)
        if full is not None and not label.startswith(("afore", "static")):
            lead = full.ours["tokens/s"] / row.ours["tokens/s"] - 1
            names.setdefault(label, []).append((lead, row.ours["tile imbalance"], row.ours["on the path"]))
            own[workload] = full.ours["tile imbalance"]
    means = {label: [_mean(values) for values in zip(*found, strict=True)] for label, found in names.items()}
    close = {label: found for label, found in means.items() if found[0] < 0.10}
    if not close:
        return ""
    listed = ", ".join(
        f"`{label}` ({lead:+.1%}: {tiles:.3f}" + (f" and {path_ms:g} ms on the path)" if path_ms else ")")
        for label, (lead, tiles, path_ms) in close.items()
    )
    return (
        f"Closer to `afore` than the paper's 10 %: {listed}; in brackets `afore`'s mean lead and their tile imbalance, where "
        f"`afore`'s is {_mean(list(own.values())):.3f}. They move pairs by true demand over the replicas that they have, and so "
        "keep only the tiles that history or a prediction did not foresee. With that many slots, and traffic that stays as it was "
        "counted, replicas by history leave little for copies of each target's own; what such a redistribution costs on the "
        "critical path decides, and the paper does not say what its baselines paid there."
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _hiding(figures: Found) -> str:
    rows = figures.get("fig11", ())
    if not rows:
        return ""
    listed = "; ".join(
        f"{row.label} {row.ours['exposed']:.0f} of {row.ours['targets']:.0f}"
        + (f" ({row.ours['of the first layer']:.0f} of the first layer)" if row.ours["exposed"] else "")
        for row in rows
    )
    return f"Figure 11: of the targets that copied, waited: {listed} (paper: none of 324)."


def _hiding_by_m(figures: Found) -> str:
    rows = [row for row in figures.get("hiding", ()) if row.label.startswith("as the profile is")]
    if not rows:
        return ""
    listed = "; ".join(
        f"{row.label.split(', ')[1]} {row.ours['exposed targets']:.0f} of {row.ours['sampled']:.0f}" for row in rows
    )
    return f"By microbatches in flight, waited: {listed}."


def _ablation(figures: Found) -> str:
    texts = []
    for label, low, high in (("w/o Prefetch", 12.4, 17.9), ("w/o Overlap", 15.2, 21.3)):
        below = [row.ours["below AFORE"] for row in figures.get("fig10", ()) if row.label.endswith(label)]
        if below:
            texts.append(f"{label} {spread(below, '.1%')} below AFORE (paper: {low} to {high} %)")
    if not texts:
        return ""
    found = [row.ours["copies a target"] for row in figures["fig10"] if row.label.endswith(": AFORE")]
    return (
        f"Figure 10: {'; '.join(texts)}. `afore` makes {spread(found, '.2f')} copies a target here, and the paper's "
        "makes some for every target that it sampled: the fewer are needed, the less their waiting costs."
    )


def _beyond(figures: Found) -> str:
    ours: dict[str, Row] = {}
    theirs: dict[str, Row] = {}
    for row in figures.get("beyond", ()):
        workload, _, label = row.label.partition(": ")
        best = ours if label.startswith("afore") else theirs
        if workload not in best or row.ours["tokens/s"] > best[workload].ours["tokens/s"]:
            best[workload] = row
    if not ours:
        return ""
    over = ", ".join(f"{row.ours['over the best baseline']:+.1%} ({row.label})" for row in ours.values())
    text = f"Beyond the paper, over the best baseline: {over}."
    if theirs:
        leads = [ours[name].ours["tokens/s"] / row.ours["tokens/s"] - 1 for name, row in theirs.items()]
        text += (
            " Over baselines that are given the same runtime, own-stream collectives and fewer microbatches: "
            f"{spread(leads)}."
        )
    return text


def _sensitivity(figures: Found) -> str:
    rows = [row for row in figures.get("sensitivity", ()) if "over eplb-redistribute" in row.ours]
    if not rows:
        return ""
    static = [row.ours["over static"] for row in rows]
    history = [row.ours["over eplb-redistribute"] for row in rows]
    return (
        f"Sensitivity: over all settings `afore` is {spread(static)} over static, and {spread(history)} "
        f"over `eplb-redistribute` at 0 µs."
    )


def _grid(figures: Found) -> str:
    rows = figures.get("grid", ())
    if not rows:
        return ""
    lost = sum(row.ours["losing more than 0.5 %"] for row in rows)
    least = min(rows, key=lambda row: row.ours["least"])
    return (
        f"Grid: {lost:.0f} of {sum(row.ours['of'] for row in rows):.0f} cells lose more than 0.5 % against `afore`; the least is "
        f"{least.ours['least']:+.1%} ({least.label}, M = {least.ours['least at M']:.0f}, R = {least.ours['least at R']:.0f})."
    )
