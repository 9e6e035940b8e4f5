"""What the baselines' publications leave open, or give as a default of their own systems: part of the run's configuration.

A *step* is one forward pass of one microbatch, what serving engines call a step or a pass. No slots: jsonargparse reads defaults
through ``vars``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from afore.core.limits import at_least


@dataclass(frozen=True, kw_only=True)
class EplbOptions:
    """``eplb``, ``eplb-redistribute`` and ``eplb-full``."""

    mode: Literal["stop", "async"] = "async"
    """stop: all layers are rebalanced at once, and targets wait for the copies (SGLang). async: one layer a step, and replicas are
    used once the copies are behind them (vLLM; the stronger)."""
    window_steps: int = 1000
    """Steps whose demand is summed: vLLM's and SGLang's default, which is meant for hours of traffic; scale it to shorter runs."""
    interval_steps: int = 3000
    """Steps from one rebalancing to the next: vLLM's default (SGLang rebalances every 1000); scale it likewise."""
    most_rebalances: int | None = None
    """Layers are rebalanced so many times and no more; none: as long as the run lasts. For runs shorter than intervals are."""
    groups: int = 1
    """eplb-full: groups of experts that stay on one node (DeepSeek's hierarchical variant); used where nodes divides them."""
    nodes: int = 1
    """eplb-full: nodes that groups are packed onto; 1 balances globally, as the published code does where they do not divide."""

    def __post_init__(self) -> None:
        at_least("policy_options.eplb", 1, window_steps=self.window_steps, interval_steps=self.interval_steps)
        at_least("policy_options.eplb", 1, groups=self.groups, nodes=self.nodes, most_rebalances=self.most_rebalances)

    def due(self, completed: int) -> bool:
        """Whether layers are rebalanced now that so many steps are completed."""
        times, left = divmod(completed, self.interval_steps)
        return left == 0 and times >= 1 and (self.most_rebalances is None or times <= self.most_rebalances)

    def scaled(self, steps: int, rebalances: int = 10) -> EplbOptions:
        """For a trace of so many steps: ``rebalances`` of them, window and interval in the same proportion as here."""
        interval = max(1, steps // (rebalances + 1))
        window = max(1, round(interval * self.window_steps / self.interval_steps))
        return dataclasses.replace(self, window_steps=window, interval_steps=interval)


@dataclass(frozen=True, kw_only=True)
class HarmoenyOptions:
    """``harmoeny``."""

    min_tokens: int | None = None
    """q: fewest tokens worth moving, at least M_tile. None: the published rule, the tokens that compute for as long as a copy takes
    (M_tile · copy_us / tile_us). The published default is 150, for its authors' machine."""
    reuse: bool = False
    """Keep copies for later targets; the published system drops them."""
    start: Literal["arrival", "now"] = "arrival"
    """When copies begin: as the target is about to execute, where the published system begins; or as soon as its inputs are there,
    under whatever targets still compute before it."""

    def __post_init__(self) -> None:
        at_least("policy_options.harmoeny", 1, min_tokens=self.min_tokens)


@dataclass(frozen=True, kw_only=True)
class LinaOptions:
    """``lina``."""

    replan: bool = False
    """Phase 2: where the predicted top-2K experts were not the true ones, place again on true demand, with exposed copies."""


@dataclass(frozen=True, kw_only=True)
class LibraOptions:
    """``libra``."""

    buffers: int = 2
    """Parts that R is divided into, one for each target in the making: the published double buffer. At least M are used."""
    reuse: bool = False
    """Use a replica that an earlier target's copy left behind; the published system fetches each anew."""

    def __post_init__(self) -> None:
        at_least("policy_options.libra", 1, buffers=self.buffers)


@dataclass(frozen=True, kw_only=True)
class AforePlusOptions:
    """``afore-plus``, and ``afore-ahead``, which is built on it."""

    protected_plans: int | None = 1
    """So many last plans of a layer keep their slots from being rebound; none, or more than M - 1: M - 1. A copy into a slot that
    an older target still uses waits for that use. 1 is the paper's U_t: slots of the preceding microbatch."""

    def __post_init__(self) -> None:
        at_least("policy_options.afore_plus", 0, protected_plans=self.protected_plans)

    def depth(self, num_microbatches: int) -> int:
        """Plans that are protected with M microbatches in flight."""
        most = num_microbatches - 1
        return most if self.protected_plans is None else min(self.protected_plans, most)


@dataclass(frozen=True, kw_only=True)
class AforeAheadOptions(AforePlusOptions):
    """``afore-ahead``."""

    window_copies: float = 4.0
    """Copies go ahead for a layer only while its window hides fewer than so many of them one after another; 0: never."""
    first_layer: bool = True
    """Also for the first layer, by the demand of the same microbatch's step before: no gate predicts it."""

    def __post_init__(self) -> None:
        at_least(
            "policy_options.afore_ahead", 0, protected_plans=self.protected_plans, window_copies=self.window_copies
        )


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """Options of the policies that have some, by policy."""

    afore_plus: AforePlusOptions = field(default_factory=AforePlusOptions)
    """AFORE with a search behind Algorithm 1."""
    afore_ahead: AforeAheadOptions = field(default_factory=AforeAheadOptions)
    """That, with copies ahead of their targets."""
    eplb: EplbOptions = field(default_factory=EplbOptions)
    """EPLB."""
    harmoeny: HarmoenyOptions = field(default_factory=HarmoenyOptions)
    """HarMoEny."""
    lina: LinaOptions = field(default_factory=LinaOptions)
    """Lina."""
    libra: LibraOptions = field(default_factory=LibraOptions)
    """Libra."""

    @staticmethod
    def section(policy: str) -> str:
        """The field that the policy of that name would have here."""
        return "eplb" if policy.startswith("eplb-") else policy.replace("-", "_")

    def of(self, policy: str) -> dict[str, Any]:
        """The options of the policy of that name, as printed with its results; empty for one that has none."""
        section = getattr(self, self.section(policy), None)
        return (
            dataclasses.asdict(section) if dataclasses.is_dataclass(section) and not isinstance(section, type) else {}
        )
