"""Sentences on top of the page, each read off the rows: how ours compares with the paper, and where a baseline comes closer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from afore.tools.evaluate.fig_compare import PUBLISHED
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
            _published,
            _closest,
            _traffic,
            _hiding,
            _hiding_by_m,
            _ablation,
            _beyond,
            _grid,
            _sensitivity,
            _prediction,
            _profiles,
            _host,
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


def _published(figures: Found) -> str:
    """Against the paper's own baselines, as it compares: without ours, and in their published form."""
    rows = {row.label: row for row in figures.get("fig8", ())}
    texts = []
    for path_us in (0, 100):
        leads: list[float] = []
        for label, row in rows.items():
            workload, _, policy = label.partition(": ")
            theirs = [
                other.ours["tokens/s"]
                for name in PUBLISHED
                for shown in (name, f"{name} +{path_us} µs")
                if (other := rows.get(f"{workload}: {shown}")) is not None
            ]
            if policy == "afore" and theirs:
                leads.append(row.ours["tokens/s"] / max(theirs) - 1)
        if leads:
            texts.append(f"{spread(leads)} where moving pairs costs {path_us} µs on the path")
    if not texts:
        return ""
    return (
        "Over the best of the paper's own baselines (EPLB, HarMoEny, Lina, Libra, as published), which is what its 10.1 to 17.6 % "
        f"are over: {', '.join(texts)}."
    )


def _traffic(figures: Found) -> str:
    rows = {row.label: row.ours for row in figures.get("traffic", ())}
    texts = []
    for motion in dict.fromkeys(label.partition(": ")[0] for label in rows):
        first, eplb, best, ours = (
            rows.get(f"{motion}: {policy}")
            for policy in ("Approach 1 (the step before)", "eplb", "eplb-redistribute", "afore")
        )
        if first is None or eplb is None or best is None or ours is None:
            return ""
        texts.append(
            f"{motion}: {first['over static']:+.1%} ({first['token imbalance']:.2f}), `eplb` {eplb['over static']:+.1%}, "
            f"`eplb-redistribute` {best['over static']:+.1%}, `afore` {ours['over static']:+.1%}"
        )
    if not texts:
        return ""
    return (
        "Traffic that moves on, over static: Approach 1 (and the token imbalance that its history leaves, 1.42 in the paper) "
        f"{'; '.join(texts)}. The more demand differs from what was counted, the less plans from history bring; moving pairs by "
        "true demand over many replicas makes up for nearly all of it, where it costs nothing on the path."
    )


def _closest(figures: Found) -> str:
    rows = list(figures.get("fig8", ()))
    names: dict[str, list[tuple[float, float, float, float]]] = {}
    own: dict[str, tuple[float, float]] = {}
    for row in rows:
        workload, _, label = row.label.partition(": ")
        full = next((other for other in rows if other.label == f"{workload}: afore"), None)
        if full is not None and not label.startswith(("afore", "static")):
            lead = full.ours["tokens/s"] / row.ours["tokens/s"] - 1
            theirs = (lead, row.ours["tile imbalance"], row.ours["token imbalance"], row.ours["on the path"])
            names.setdefault(label, []).append(theirs)
            own[workload] = full.ours["tile imbalance"], full.ours["token imbalance"]
    means = {label: [_mean(values) for values in zip(*found, strict=True)] for label, found in names.items()}
    close = {label: found for label, found in means.items() if found[0] < 0.10}
    if not close:
        return ""
    tiles_own, tokens_own = (_mean(values) for values in zip(*own.values(), strict=True))
    listed = ", ".join(
        f"`{label}` ({lead:+.1%}: {tiles:.3f}, {tokens:.3f}" + (f", {path_ms:g} ms on the path)" if path_ms else ")")
        for label, (lead, tiles, tokens, path_ms) in close.items()
    )
    text = (
        f"Closer to `afore` than the paper's 10 %: {listed}; in brackets `afore`'s mean lead and their imbalance of tiles and of "
        f"tokens, where `afore`'s are {tiles_own:.3f} and {tokens_own:.3f}. They move pairs by true demand over the replicas that "
        "they have, and what that costs on the critical path decides; the paper does not say what its baselines paid there."
    )
    halves = [
        label for label, (_, tiles, tokens, _) in close.items() if tokens < tokens_own and tiles > tiles_own + 0.02
    ]
    if halves:
        text += (
            f" {_listed(halves)} evened out tokens better than `afore` and tiles worse: an expert's tokens that are shared out "
            "leave more tiles half full, and those take as long as full ones."
        )
    return text


def _listed(labels: Sequence[str]) -> str:
    *first, last = [f"`{label}`" for label in labels]
    return f"{', '.join(first)} and {last}" if first else last


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
        f"{least.ours['least']:+.2%} ({least.label}, M = {least.ours['least at M']:.0f}, R = {least.ours['least at R']:.0f}, "
        f"seed {least.ours['least at seed']:.0f})."
    )


def _prediction(figures: Found) -> str:
    rows = figures.get("prediction", ())
    if not rows:
        return ""
    gains: dict[str, list[float]] = {}
    for row in rows:
        gains.setdefault(row.label.partition(",")[0], []).append(row.ours["over afore"])
    listed = "; ".join(f"`{policy}` {spread(found)}" for policy, found in gains.items())
    return f"However often the next layer's gate is right, over `afore`: {listed}."


def _profiles(figures: Found) -> str:
    rows = [row for row in figures.get("profiles", ()) if row.label.endswith((": afore", " + both"))]
    if not rows:
        return ""
    listed = "; ".join(
        f"{row.label} {row.ours['over static']:+.1%} and {row.ours['over eplb-redistribute']:+.1%}" for row in rows
    )
    return f"Other hardware, over static and over `eplb-redistribute` at 0 µs: {listed}."


def _host(figures: Found) -> str:
    rows = [row for row in figures.get("host", ()) if row.label.endswith(": afore-ahead + both")]
    if not rows:
        return ""
    listed = "; ".join(f"{row.label.partition(':')[0]} {row.ours['over afore']:+.1%}" for row in rows)
    return (
        f"The host's part: `afore-ahead` with own-stream collectives and fewer microbatches over `afore` at {listed}."
    )
