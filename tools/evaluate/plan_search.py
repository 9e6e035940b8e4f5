"""What to buy: shapes that fit N devices, tried in virtual time from coarse to fine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from afore.core.errors import ConfigError
from afore.tools.evaluate.cell import Cell
from afore.tools.evaluate.fig_compare import BASELINES, BEYOND
from afore.tools.evaluate.figure import available, vary
from afore.tools.evaluate.model_shape import Memory, memory_of
from afore.workers.device.hardware import HardwareProfile

Run = Callable[[Sequence[Cell]], Mapping[Cell, Mapping[str, Any]]]
PARTS = (1 / 8, 1 / 4, 1 / 3, 1 / 2, 2 / 3)
"""Parts of all devices that attention may have."""
MICROBATCHES, SLOTS = (2, 3, 4), (2, 4, 8)
FIRST_M, FIRST_R = 3, 4
TRIED_ON = ("static", "eplb-redistribute", "libra", "afore", *BEYOND)
LIBRA_US = 100.0
"""What redistributing on true demand costs `libra` on the path of each target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is asked for."""

    gpus: int
    requests: int
    """Decoding at the same time."""
    output_tokens: int
    """Mean answer, for the cache's size."""
    prompt_tokens: float
    """Mean prompt."""
    itl_ms: float = float("inf")
    """P95 that must be kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One shape under one policy, with what it would give for the whole model."""

    cell: Cell
    tokens_per_s: float
    itl_p95_ms: float
    memory: Memory
    copies: float
    """A target."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        cell = self.cell
        return {
            "attention": cell.attention,
            "ffn": cell.ffn,
            "microbatches": cell.microbatches,
            "slots": cell.slots,
            "policy": cell.policy,
            "on_path_us": cell.redistribute_us,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_per_gpu": self.tokens_per_s / (cell.attention + cell.ffn),
            "itl_p95_ms": self.itl_p95_ms,
            "attention_gb": self.memory.attention,
            "ffn_gb": self.memory.ffn,
            "memory_gb": self.memory.each,
            "copies_a_target": self.copies,
        }


def search(base: Cell, profile: HardwareProfile, wish: Wish, run: Run) -> list[Offer]:
    """Offers, best first: ratios under ``afore``; then M and R at the best ratio; then policies at the best shape.

    Raises ``ConfigError`` where no shape has room for the model and its requests.
    """
    ratios = sorted({min(wish.gpus - 1, max(1, round(wish.gpus * part))) for part in PARTS})
    cells = [_shape(base, wish, A, FIRST_M, FIRST_R) for A in ratios]
    roomy = [cell for cell in cells if _memory(cell, profile, wish).fits]
    if not roomy:
        least = min((_memory(cell, profile, wish) for cell in cells), key=lambda m: max(m.attention, m.ffn))
        raise ConfigError(
            "--gpus",
            f"{wish.gpus} devices have no room: of {least.each:.0f} GB each, attention needs {least.attention:.0f}, FFN "
            f"{least.ffn:.0f} at the best ratio with {FIRST_R} redundant slots",
            "give more, fewer --requests, or another --profile",
        )
    offers = _offers(roomy, profile, wish, run)
    best = _best(offers, wish).cell
    finer = [
        cell
        for M in MICROBATCHES
        for R in SLOTS
        if _memory(cell := _shape(base, wish, best.attention, M, R), profile, wish).fits
    ]
    offers += _offers([cell for cell in finer if cell not in roomy], profile, wish, run)
    best = _best(offers, wish).cell
    others = [
        vary(best, policy=policy, redistribute_us=LIBRA_US if policy == "libra" else 0.0)
        for policy in available(TRIED_ON)
        if policy != "afore"
    ]
    offers += _offers(others, profile, wish, run)
    return sorted(offers, key=lambda offer: (offer.itl_p95_ms > wish.itl_ms, -offer.tokens_per_s))


def winner(offers: Sequence[Offer]) -> str:
    """The policy that wins, and by how much over the best that is not ours."""
    first = offers[0]
    theirs = [offer for offer in offers if offer.cell.policy in BASELINES]
    if not theirs or first.cell.policy in BASELINES:
        return first.cell.policy
    lead = first.tokens_per_s / max(offer.tokens_per_s for offer in theirs) - 1
    return f"{first.cell.policy}, {lead:+.1%} over the best of {', '.join(sorted({o.cell.policy for o in theirs}))}"


def _shape(base: Cell, wish: Wish, attention: int, microbatches: int, slots: int) -> Cell:
    return vary(
        base,
        policy="afore",
        attention=attention,
        ffn=wish.gpus - attention,
        microbatches=microbatches,
        slots=slots,
        rows=max(1, -(-wish.requests // (attention * microbatches))),
    )


def _memory(cell: Cell, profile: HardwareProfile, wish: Wish) -> Memory:
    return memory_of(
        profile,
        ffn=cell.ffn,
        slots=cell.slots,
        rows=cell.rows,
        microbatches=cell.microbatches,
        context_tokens=wish.prompt_tokens + wish.output_tokens,
    )


def _offers(cells: Sequence[Cell], profile: HardwareProfile, wish: Wish, run: Run) -> list[Offer]:
    found = run(cells)
    all_layers = profile.shape.layers.value - profile.shape.dense_layers.value
    offers = []
    for cell in cells:
        result = found[cell]
        part = result["layers"] / all_layers  # a step is layers in a row
        offers.append(
            Offer(
                cell=cell,
                tokens_per_s=result["tokens_per_s"] * part,
                itl_p95_ms=result["itl_p95_ms"] / part,
                memory=_memory(cell, profile, wish),
                copies=(result["copies"]["copies"] + result["counters"].get("copies_ahead", 0))
                / max(1, result["targets"]),
            )
        )
    return offers


def _best(offers: Sequence[Offer], wish: Wish) -> Offer:
    return max(offers, key=lambda offer: (offer.itl_p95_ms <= wish.itl_ms, offer.tokens_per_s))
