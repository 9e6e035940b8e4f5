"""What a policy answers to an event, checked: a mistake of a user's policy costs balance, never an answer."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence

from afore.core.target import Target
from afore.scheduler.demand_book import Complete
from afore.scheduler.policies.base import Action, Assign, Copies, Policy
from afore.scheduler.stats import RunStats

_log = logging.getLogger(__name__)
_MOST_ACTIONS = 1 << 12
"""Of an answer: a generator may never end."""
_AHEAD = ("on_prediction", "on_step_end")
"""Events that may only be answered with copies."""


class Answers:
    """One policy's."""

    def __init__(self, policy: Policy, *, num_layers: int, stats: RunStats) -> None:
        self._policy = policy
        self._num_layers = num_layers
        self._stats = stats

    def to(self, event: str, complete: Complete, *arguments: object) -> list[Action]:
        """The policy's answer to ``event``; where that is none, it is counted, and the target runs on primaries."""
        must_assign = event == "on_inputs" or (event == "on_demand" and not self._policy.wants_inputs)
        try:
            answer = getattr(self._policy, event)(*arguments)
            actions: list[Action] = list(itertools.islice(answer, _MOST_ACTIONS + 1))
            problem = self._problem(actions, complete.target, event, must_assign)
        except (Exception, SystemExit) as error:  # whatever a user's policy raises: no call of it ends the process
            actions, problem = [], f"{type(error).__name__}: {error}"
        if not problem:
            return actions
        if not self._stats.counters["policy_errors"]:
            _log.error(
                "policy %s, %s of %s: %s; such targets run on primaries",
                self._policy.name,
                event,
                complete.target,
                problem,
            )
        self._stats.counters["policy_errors"] += 1
        return [] if event in _AHEAD else [Assign(complete.target, (), skipped=f"policy error: {problem}")]

    def _problem(self, actions: Sequence[object], target: Target, event: str, must_assign: bool) -> str:
        if len(actions) > _MOST_ACTIONS:
            return f"it answered more than {_MOST_ACTIONS} actions"
        assigned = 0
        for action in actions:
            if isinstance(action, Assign):
                assigned += 1
                if action.target != target or event in _AHEAD:
                    return f"it assigned {action.target}"
            elif not isinstance(action, Copies):
                return f"it answered {type(action).__name__}, which is no action"
            elif not 0 <= action.layer < self._num_layers:
                return f"it copies in layer {action.layer}, of {self._num_layers}"
        if assigned > 1 or (must_assign and not assigned):
            return f"it assigned the target {assigned} times"
        return ""
