"""An ``Explanation`` as text and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from afore.scheduler.explain import Explanation, Move
from afore.scheduler.plan import Plan


def lines(told: Explanation, plus: Plan) -> Iterator[str]:
    """The explanation for a terminal; ``plus`` is what ``afore-plus`` plans from the same state."""
    plan, costs = told.plan, told.plan.costs
    pairs = int(plan.assign_EN.sum())
    N = len(told.base_N)
    equal = max(told.costs_N) == 1
    unit, by_speed = ("tiles", "") if equal else ("units", " by their speeds")
    yield f"demand: {pairs:,} pairs of {sum(k > 0 for k in told.tiles_E)} experts in {sum(told.tiles_E):,} tiles"
    yield f"bound: {plan.bound_tiles} {unit}, an even share of {N} workers{by_speed}"
    if by_speed:
        yield f"units: a tile counts {', '.join(f'{cost} on ffn-{w}' for w, cost in enumerate(told.costs_N))}"
    yield f"costs: a tile {costs.tile_us:g} µs, a copy {costs.copy_us:g} µs, hidden up to {costs.window_us:g} µs"
    yield ""
    yield f"{'tiles of' if equal else 'load of':<22}" + "".join(f"{f'ffn-{w}':>8}" for w in range(N)) + f"{'most':>8}"
    for name, loads_N in (
        ("everything on primaries", told.base_N),
        ("as carried over", told.start_N),
        ("after moves", told.within_N),
        ("after copies", told.final_N),
    ):
        yield f"{name:<22}" + "".join(f"{load:>8}" for load in loads_N) + f"{max(loads_N):>8}"
    yield ""
    yield f"moves over replicas that are there: {len(told.moves) or 'none'}"
    for number, move in enumerate(told.moves, 1):
        yield f"{number:>4}. {_what(move)}; most loaded {move.max_before} → {move.max_after}"
    yield f"copies: {len(plan.copies) or 'none'}"
    for number, move in enumerate(told.copies, 1):
        into = "empty" if move.replaced < 0 else f"was expert {move.replaced}"
        yield (
            f"{number:>4}. {_what(move)}, copied to slot {move.slot} ({into}); most loaded {move.max_before} → {move.max_after}; "
            f"saves {move.saved_us:.1f} µs, shows {move.exposed_us:.1f} µs, net {move.net_us:.1f} µs"
            f"{'' if move.kept else '; taken back'}"
        )
    if told.rejected:
        yield "not done:"
        yield from (f"      {reason}" for reason in told.rejected)
    yield (
        f"result: most loaded worker {plan.max_tiles} {unit} (bound {plan.bound_tiles}), {_copies(plan)}, "
        f"net gain {plan.gain_us:.1f} µs"
    )
    yield (
        f"afore-plus, from the same state: {plus.max_tiles} {unit}, {_copies(plus)}; existing replicas alone allow "
        f"{plus.within_max_tiles}"
    )


def _copies(plan: Plan) -> str:
    return "1 copy" if len(plan.copies) == 1 else f"{len(plan.copies)} copies"


def _what(move: Move) -> str:
    tiles = "1 tile" if move.tiles == 1 else f"{move.tiles} tiles"
    return f"expert {move.expert}: {tiles} ffn-{move.source} → ffn-{move.destination}"


def to_json(told: Explanation, plus: Plan) -> dict[str, object]:
    """The explanation as plain values."""
    return {
        "tiles_E": told.tiles_E,
        "bound_tiles": told.plan.bound_tiles,
        "load_unit": told.plan.load_unit,
        "tile_costs": list(told.costs_N),
        "costs": dataclasses.asdict(told.plan.costs),
        "loads": {
            "primaries": told.base_N,
            "carried": told.start_N,
            "within": told.within_N,
            "final": told.final_N,
        },
        "moves": [_move(move) for move in told.moves],
        "copies": [_move(move) for move in told.copies],
        "rejected": told.rejected,
        "max_tiles": told.plan.max_tiles,
        "gain_us": told.plan.gain_us,
        "skipped": told.plan.skipped,
        "shares": told.plan.shares(),
        "afore_plus": {
            "max_tiles": plus.max_tiles,
            "within_max_tiles": plus.within_max_tiles,
            "copies": plus.copies,
            "gain_us": plus.gain_us,
        },
    }


def _move(move: Move) -> dict[str, object]:
    return {**dataclasses.asdict(move), "net_us": move.net_us}


def svg(told: Explanation) -> str:
    """Figure 1's bars: tiles by worker on primaries and as planned, with the bound."""
    panels: Sequence[tuple[str, list[int], str]] = (
        ("before: everything on primaries", told.base_N, "#b0563b"),
        (f"after: {_copies(told.plan)}", told.final_N, "#3b6fb0"),
    )
    N = len(told.base_N)
    bar, gap, height, left, top = max(6, min(36, 320 // N)), 4, 200, 44, 34
    width = N * (bar + gap) + gap
    unit = "tiles" if max(told.costs_N) == 1 else "units"
    most = max(*told.base_N, *told.final_N, told.plan.bound_tiles, 1)
    total = 2 * (left + width) + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="{top + height + 44}" '
        f'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for panel, (title, loads_N, colour) in enumerate(panels):
        x0 = left + panel * (left + width)
        parts.append(f'<text x="{x0}" y="{top - 16}" font-size="12">{title}</text>')
        for w, load in enumerate(loads_N):
            x, h = x0 + gap + w * (bar + gap), height * load / most
            parts.append(
                f'<rect x="{x}" y="{top + height - h:.1f}" width="{bar}" height="{h:.1f}" fill="{colour}">'
                f"<title>ffn-{w}: {load} {unit}</title></rect>"
            )
            if N <= 16:
                parts.append(
                    f'<text x="{x + bar / 2}" y="{top + height - h - 3:.1f}" text-anchor="middle">{load}</text>'
                )
                parts.append(f'<text x="{x + bar / 2}" y="{top + height + 14}" text-anchor="middle">{w}</text>')
        y = top + height - height * told.plan.bound_tiles / most
        parts.append(
            f'<line x1="{x0}" x2="{x0 + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="black" stroke-dasharray="4 3"/>'
            f'<text x="{x0 - 4}" y="{y + 4:.1f}" text-anchor="end">{told.plan.bound_tiles}</text>'
            f'<line x1="{x0}" x2="{x0 + width}" y1="{top + height}" y2="{top + height}" stroke="black"/>'
            f'<text x="{x0 + width / 2}" y="{top + height + 32}" text-anchor="middle">FFN worker ({unit}; dashed: bound)</text>'
        )
    parts.append("</svg>\n")
    return "\n".join(parts)
