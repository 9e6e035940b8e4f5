"""All figures and tables, by name, in the order of the page."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from afore.tools.evaluate.fig_ablation import ABLATION_FIGURES
from afore.tools.evaluate.fig_arrivals import ARRIVING
from afore.tools.evaluate.fig_case import CASE_FIGURES
from afore.tools.evaluate.fig_compare import COMPARE_FIGURES
from afore.tools.evaluate.fig_host import HOST_PART
from afore.tools.evaluate.fig_planner import PLANNER_FIGURES
from afore.tools.evaluate.fig_prediction import PREDICTION
from afore.tools.evaluate.fig_profiles import OTHER_PROFILES
from afore.tools.evaluate.fig_sensitivity import SENSITIVITY
from afore.tools.evaluate.fig_traffic import TRAFFIC
from afore.tools.evaluate.figure import Figure

_COMPARED, *_BEYOND = COMPARE_FIGURES

FIGURES: Mapping[str, Figure] = MappingProxyType(
    {
        figure.name: figure
        for figure in (
            *CASE_FIGURES,
            _COMPARED,
            *PLANNER_FIGURES,
            *ABLATION_FIGURES,
            *_BEYOND,
            SENSITIVITY,
            PREDICTION,
            OTHER_PROFILES,
            HOST_PART,
            TRAFFIC,
            ARRIVING,
        )
    }
)

_SWEPT = ("hiding", "grid", "sensitivity", "prediction", "profiles", "host", "traffic", "arrivals")
SWEPT = tuple(name for name in FIGURES if name in _SWEPT)
"""Of many settings or long runs: on fewer layers, where asked."""
