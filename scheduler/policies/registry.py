"""Policies by name, and a user's own by ``package.module:Class``."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, get_args

from afore.core.errors import ConfigError
from afore.scheduler.hot_core import compile_hot_path
from afore.scheduler.loads import compile_loads
from afore.scheduler.planner import compile_planner
from afore.scheduler.policies.afore import Afore
from afore.scheduler.policies.afore_ahead import AforeAhead
from afore.scheduler.policies.afore_no_overlap import AforeNoOverlap
from afore.scheduler.policies.afore_no_prefetch import AforeNoPrefetch
from afore.scheduler.policies.afore_plus import AforePlus
from afore.scheduler.policies.afore_reactive import AforeReactive
from afore.scheduler.policies.base import Policy, PolicyContext, Predictor
from afore.scheduler.policies.eplb import Eplb
from afore.scheduler.policies.eplb_full import EplbFull
from afore.scheduler.policies.eplb_redistribute import EplbRedistribute
from afore.scheduler.policies.harmoeny import Harmoeny
from afore.scheduler.policies.libra import Libra
from afore.scheduler.policies.lina import Lina
from afore.scheduler.policies.static import Static

POLICIES: Mapping[str, Callable[[PolicyContext], Policy]] = MappingProxyType(
    {
        "static": Static,
        "afore": Afore,
        "afore-plus": AforePlus,
        "afore-ahead": AforeAhead,
        "afore-no-prefetch": AforeNoPrefetch,
        "afore-no-overlap": AforeNoOverlap,
        "afore-reactive": AforeReactive,
        "eplb": Eplb,
        "eplb-redistribute": EplbRedistribute,
        "harmoeny": Harmoeny,
        "lina": Lina,
        "libra": Libra,
    }
)


_EVENTS = ("on_demand", "on_prediction", "on_inputs", "on_step_end", "reset_layer")
_KNOWN = f"policies are {', '.join(POLICIES)}, or your own as package.module:Class"


def make_policy(name_or_path: str, context: PolicyContext) -> Policy:
    """Builds the policy of that name, or the user's class of that path. Raises ``ConfigError`` naming the nearest match."""
    make = _find(name_or_path)
    try:
        policy = make(context)
    except (Exception, SystemExit) as error:  # whatever a user's constructor raises
        raise ConfigError(
            "policy",
            f"{name_or_path} cannot be made: its constructor raised {type(error).__name__}: {error}",
            "mend it; it is called with one PolicyContext",
        ) from error
    missing = [name for name in ("name", "wants_inputs") if not hasattr(policy, name)]
    if missing:
        raise ConfigError("policy", f"{name_or_path} has no attribute {' or '.join(missing)}", _remedy(name_or_path))
    return policy


def check_policy(name_or_path: str) -> None:
    """Raises the ``ConfigError`` that ``make_policy`` would raise for a name or path that is no policy; builds nothing."""
    _find(name_or_path)


def policy_wants_inputs(name_or_path: str) -> bool:
    """Whether the policy's class asks for ``on_inputs``: FFN workers report arrivals only then. Raises as ``check_policy``."""
    return bool(getattr(_find(name_or_path), "wants_inputs", False))


def policy_wants_predictions(name_or_path: str) -> Predictor | None:
    """What the policy's class asks attention workers to predict with; none: nothing. Raises as ``check_policy``."""
    found: Predictor | None = getattr(_find(name_or_path), "wants_predictions", None)
    if found not in (None, *get_args(Predictor)):
        raise ConfigError(
            "policy",
            f"{name_or_path} wants predictions by {found!r}",
            f"wants_predictions is {', '.join(get_args(Predictor))} or None",
        )
    return found


def policy_kernels(name_or_path: str) -> tuple[Callable[[], None], ...]:
    """What compiles the calls that a scheduler makes under the policy, or loads them. What is no policy gets ``afore``'s.

    A preload calls them before anything serves: no plan waits for the compiler.
    """
    try:
        planner = getattr(_find(name_or_path), "planner", None)
    except ConfigError:
        planner = None  # refused by name where the configuration is checked
    search = getattr(planner, "searches", False) is True
    return partial(compile_planner, search=search), partial(compile_hot_path, search=search), compile_loads


def _find(name_or_path: str) -> Callable[[PolicyContext], Policy]:
    if name_or_path in POLICIES:
        return POLICIES[name_or_path]
    if name_or_path == EplbFull.name:
        raise ConfigError(
            "policy",
            f"{name_or_path} moves primaries, which a running system does not",
            "give eplb, which moves replicas; eplb-full is for replay and evaluation",
        )
    module_name, colon, class_name = name_or_path.partition(":")
    if not colon or not module_name or not class_name:
        near = difflib.get_close_matches(name_or_path, POLICIES, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError("policy", f"there is no policy {name_or_path!r}", hint + _KNOWN)
    try:
        module = importlib.import_module(module_name)
    except (
        Exception,
        SystemExit,
    ) as error:  # whatever a user's module raises while it is imported: a script ends there
        raise ConfigError(
            "policy",
            f"{module_name} cannot be imported ({type(error).__name__}: {error})",
            "is its folder on PYTHONPATH?" if isinstance(error, ModuleNotFoundError) else "mend that module",
        ) from error
    found: Any = getattr(module, class_name, None)
    if found is None:
        near = difflib.get_close_matches(class_name, vars(module), n=1)
        raise ConfigError(
            "policy", f"{module_name} has no {class_name}", f"did you mean {near[0]}?" if near else "name its class"
        )
    lacks = [event for event in _EVENTS if not callable(getattr(found, event, None))]
    if not callable(found) or lacks:
        raise ConfigError(
            "policy", f"{name_or_path} lacks {', '.join(lacks) or 'a constructor'}", _remedy(name_or_path)
        )
    policy_class: Callable[[PolicyContext], Policy] = found
    return policy_class


def _remedy(path: str) -> str:
    return f"give {path} what afore.scheduler.policies.base.Policy lists"
