"""The scheduler: Algorithm 1 as a planner per layer, policies around it, and the service that publishes their answers."""

from afore.scheduler.costs import CostModel, Costs
from afore.scheduler.plan import Plan, PlannerConfig, ProtectedWindow
from afore.scheduler.planner import Planner, compile_planner
from afore.scheduler.validate import validate

__all__ = [
    "CostModel",
    "Costs",
    "Plan",
    "Planner",
    "PlannerConfig",
    "ProtectedWindow",
    "compile_planner",
    "validate",
]
