"""AFORE: attention-FFN disaggregated serving of Mixture-of-Experts models, with expert replicas moved just in time.

``Cluster`` and ``Topology`` are the scripting API; they are imported on first use, so that ``import afore`` stays light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from afore.core.version import VERSION as __version__

if TYPE_CHECKING:
    from afore.cluster import Cluster, Token
    from afore.core.config import RunConfig
    from afore.core.topology import Topology

__all__ = ["Cluster", "RunConfig", "Token", "Topology", "__version__"]

_HOMES = {
    "Cluster": "afore.cluster",
    "Token": "afore.cluster",
    "RunConfig": "afore.core.config",
    "Topology": "afore.core.topology",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'afore' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
