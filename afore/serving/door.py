"""The door role: hub and engine in one process."""

from __future__ import annotations

import contextlib
import dataclasses
import logging

from afore.core.clock import Clock
from afore.core.config import RunConfig, ServeOptions
from afore.core.errors import ConfigError
from afore.models.config import ModelSpec
from afore.serving.admission import Limits
from afore.serving.engine import Engine, Text
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


async def serve(
    fabric: Fabric,
    hub_address: str,
    config: RunConfig,
    spec: ModelSpec,
    text: Text | None,
    clock: Clock,
    *,
    replaceable: bool = False,
) -> None:
    """Runs hub and engine, and the HTTP door where it is asked for, until a client stops the cluster.

    ``replaceable``: a role that is lost before all have loaded only frees its rank.
    Raises ``ConfigError`` when the door's address cannot be had.
    """
    # Every role is sent the hub's configuration; the key is nobody's business but the door's.
    hub = Hub(fabric, dataclasses.replace(config, serve=ServeOptions()), replaceable=replaceable)
    engine = Engine(hub, config, request_limits(config, spec), text)
    async with contextlib.AsyncExitStack() as stack:
        if config.serve.http:
            # Only then does this process need an HTTP server.
            from afore.serving.http.server import serving_http

            await stack.enter_async_context(serving_http(hub, engine, config, text, clock))
        await hub.run(hub_address)
