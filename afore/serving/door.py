"""The door role: hub and engine in one process."""

from __future__ import annotations

import logging

from afore.core.config import RunConfig
from afore.core.errors import ConfigError
from afore.models.config import ModelSpec
from afore.serving.engine import Engine, Limits, Text
from afore.serving.hub import Hub
from afore.transport.api import Fabric
from afore.workers.kv_layout import kv_layout

log = logging.getLogger(__name__)


def request_limits(config: RunConfig, spec: ModelSpec) -> Limits:
    """What a request may ask for. Raises ``ConfigError`` for a length that the model does not have."""
    wanted = config.batch.max_model_len
    if wanted is not None and wanted > spec.max_positions:
        raise ConfigError(
            "batch.max_model_len", f"{wanted} exceeds the model's {spec.max_positions} positions", "lower it"
        )
    layout = kv_layout(config, spec)
    return Limits(
        vocab_size=spec.vocab_size,
        max_model_len=wanted or spec.max_positions,
        kv_tokens=layout.num_blocks * layout.block_tokens,
        eos_ids=frozenset(spec.eos_ids),
    )


async def serve(fabric: Fabric, hub_address: str, config: RunConfig, spec: ModelSpec, text: Text | None) -> None:
    """Runs hub and engine until a client stops the cluster."""
    hub = Hub(fabric, config)
    Engine(hub, config, request_limits(config, spec), text)
    await hub.run(hub_address)
