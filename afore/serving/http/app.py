"""The HTTP application: which path does what."""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from afore.core.config import RunConfig
from afore.core.errors import TransportError
from afore.core.version import VERSION
from afore.serving.engine import Engine
from afore.serving.http.desk import Desk, Job
from afore.serving.http.disconnect import ClientGone, EventStream, while_connected
from afore.serving.http.errors import ApiError
from afore.serving.http.metrics import CONTENT_TYPE, Metrics
from afore.serving.http.reading import B, read_body
from afore.serving.http.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from afore.serving.hub import Hub
from afore.serving.local import LocalClient

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/live", "/version", "/metrics"})
"""What probes and scrapers ask without a key."""
STATS_TIMEOUT_US = 2e6
"""How long a scrape waits for the scheduler before it shows what it said last."""
Handler = Callable[[Request], Awaitable[Response]]
REFERENCE = "#/components/schemas/{model}"


class Json(Response):
    """Plain JSON, always ASCII: nothing in it can fail to be encoded."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode()


def make_app(
    *, hub: Hub, engine: Engine, config: RunConfig, desk: Desk, metrics: Metrics, client: LocalClient
) -> ASGIApp:
    """The application over a hub and its engine."""
    app = FastAPI(title="AFORE", version=VERSION, docs_url=None, redoc_url=None, openapi_url=None)
    doors = _Doors(hub, engine, config, desk, metrics, client)
    kinds: list[type[BaseModel]] = []

    def post(path: str, kind: type[BaseModel], handler: Handler) -> None:
        kinds.append(kind)
        schema = {"$ref": REFERENCE.format(model=kind.__name__)}
        body = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
        app.add_api_route(path, handler, methods=["POST"], openapi_extra=body, response_model=None)

    def get(path: str, handler: Callable[..., Awaitable[Response]]) -> None:
        app.add_api_route(path, handler, methods=["GET"], response_model=None)

    post("/v1/completions", CompletionRequest, doors.completions)
    post("/v1/chat/completions", ChatRequest, doors.chat)
    post("/tokenize", TokenizeRequest, doors.tokenize)
    post("/detokenize", DetokenizeRequest, doors.detokenize)
    get("/v1/models", doors.models)
    get("/v1/models/{name:path}", doors.model)
    get("/health", doors.health)
    get("/live", doors.live)
    get("/version", doors.version)
    get("/metrics", doors.metrics)
    description = _openapi(app, kinds)

    async def describe(request: Request) -> Response:
        return Json(description)

    get("/openapi.json", describe)

    app.add_exception_handler(ApiError, _refused)
    app.add_exception_handler(HTTPException, _no_such)
    app.add_exception_handler(RequestValidationError, _no_such)
    app.add_exception_handler(Exception, _defect)
    return KeyCheck(app, config.serve.api_key) if config.serve.api_key is not None else app


class _Doors:
    """The endpoints."""

    def __init__(
        self, hub: Hub, engine: Engine, config: RunConfig, desk: Desk, metrics: Metrics, client: LocalClient
    ) -> None:
        self._hub = hub
        self._engine = engine
        self._config = config
        self._desk = desk
        self._metrics = metrics
        self._client = client

    async def completions(self, request: Request) -> Response:
        body = await self._body(request, CompletionRequest)
        self._desk.check_serving()
        return await self._generate(request, await self._desk.completion(body), stream=body.stream)

    async def chat(self, request: Request) -> Response:
        body = await self._body(request, ChatRequest)
        self._desk.check_serving()
        return await self._generate(request, await self._desk.chat(body), stream=body.stream)

    async def tokenize(self, request: Request) -> Response:
        body = await self._body(request, TokenizeRequest)
        self._desk.check_model(body.model)
        desk = self._desk
        ids = await (desk.encode_chat(body.messages) if body.messages else desk.encode(body.prompt or "", "prompt"))
        return Json({"count": len(ids), "max_model_len": self._engine.limits.max_model_len, "tokens": ids})

    async def detokenize(self, request: Request) -> Response:
        body = await self._body(request, DetokenizeRequest)
        self._desk.check_model(body.model)
        return Json({"prompt": self._desk.decode(body.tokens, "tokens")})

    async def models(self, request: Request) -> Response:
        return Json({"object": "list", "data": [self._card()]})

    async def model(self, request: Request, name: str) -> Response:
        self._desk.check_model(name)
        return Json(self._card())

    async def health(self, request: Request) -> Response:
        self._desk.check_serving()
        return Json({"status": "ok"})

    async def live(self, request: Request) -> Response:
        return Json({"status": "ok"})

    async def version(self, request: Request) -> Response:
        return Json({"version": VERSION})

    async def metrics(self, request: Request) -> Response:
        if self._hub.membership.serving:
            with contextlib.suppress(TransportError):
                self._metrics.planner(await self._client.stats(timeout_us=STATS_TIMEOUT_US))
        return Response(self._metrics.text(), media_type=CONTENT_TYPE)

    async def _body(self, request: Request, kind: type[B]) -> B:
        return await read_body(
            request, kind, most_bytes=self._config.serve.max_body_bytes, timeout_s=self._config.times.control_s
        )

    async def _generate(self, request: Request, job: Job, *, stream: bool) -> Response:
        if not stream:
            try:
                return Json(await while_connected(request.receive, self._desk.answer(job)))
            except ClientGone:
                return Response(status_code=499)  # nobody reads it
        events: AsyncGenerator[bytes, None] = self._desk.stream(job)
        await anext(events)
        return EventStream(events)

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._desk.model,
            "object": "model",
            "created": self._desk.created_s,
            "owned_by": "afore",
            "max_model_len": self._engine.limits.max_model_len,
        }


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return Json(error.body(), status_code=error.status, headers=error.headers)


async def _no_such(request: Request, error: Exception) -> Response:
    """A path or method that is not there."""
    status = error.status_code if isinstance(error, HTTPException) else 400
    where = f"{request.method} {request.url.path}"
    message = {404: f"there is no {where}", 405: f"{where}: not this method"}.get(status, "the request cannot be read")
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    return Json(
        ApiError(status, message, code="not_found" if status == 404 else None).body(),
        status_code=status,
        headers=headers,
    )


async def _defect(request: Request, error: Exception) -> Response:
    log.error("%s %s failed: %r", request.method, request.url.path, error)
    return Json(ApiError(500, "internal error; see the door's log", kind="server_error").body(), status_code=500)


class KeyCheck:
    """Lets nobody in without the key, but for probes and scrapers."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = b"Bearer " + key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                message = "the API key is missing or wrong; send it as Authorization: Bearer KEY"
                error = ApiError(401, message, code="invalid_api_key")
                response = Json(error.body(), status_code=401, headers={"WWW-Authenticate": "Bearer"})
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _openapi(app: FastAPI, kinds: list[type[BaseModel]]) -> dict[str, Any]:
    """The OpenAPI description, with the bodies' schemas, which are read by our own hands."""
    description = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = description.setdefault("components", {}).setdefault("schemas", {})
    for kind in kinds:
        schema = kind.model_json_schema(ref_template=REFERENCE)
        schemas.update(schema.pop("$defs", {}))
        schemas[kind.__name__] = schema
    return description
