"""Listens, and runs the application in the door's event loop until the cluster stops."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import uvicorn

from afore.core.clock import Clock
from afore.core.config import RunConfig
from afore.serving.engine import Engine, Text
from afore.serving.http.app import make_app
from afore.serving.http.desk import Desk
from afore.serving.http.listen import listen, url_of
from afore.serving.http.metrics import Metrics
from afore.serving.http.protocol import h11_with_head_deadline
from afore.serving.hub import Hub
from afore.serving.local import LocalClient

GRACE_S = 1
"""How long open connections have to end once the cluster stops: their requests have been ended then."""


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the process's own see it out."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serving_http(
    hub: Hub, engine: Engine, config: RunConfig, text: Text | None, clock: Clock
) -> AsyncIterator[None]:
    """Serves HTTP while the block runs; ``hub.url`` says where. Raises ``ConfigError`` when the address cannot be had."""
    listener = listen(config.serve)
    client = LocalClient(hub)
    metrics = Metrics(engine, clock)
    engine.observer = metrics
    desk = Desk(hub, engine, config, text, client)
    app = make_app(hub=hub, engine=engine, config=config, desk=desk, metrics=metrics, client=client)
    server = _Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            loop="none",
            http=h11_with_head_deadline(config.times.control_s),
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=GRACE_S,
        )
    )
    hub.url = url_of(listener, config.serve.host)
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    ending = asyncio.create_task(_end_with(hub, client, server), name="http end")
    try:
        yield
    finally:
        client.close("the cluster is ending")
        ending.cancel()
        server.should_exit = True
        # Should this be cancelled as well, the connections are cut.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S + 1):
                await asyncio.shield(serving)
        server.force_exit = True
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        listener.close()


async def _end_with(hub: Hub, client: LocalClient, server: _Server) -> None:
    """As soon as the cluster stops, requests end with an error that says so, not with silence."""
    await hub.stopping.wait()
    client.close("the cluster is ending")
    server.should_exit = True
