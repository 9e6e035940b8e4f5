"""From a request's bytes to a checked body: every way in which they can be wrong is a 4xx that names the field."""

from __future__ import annotations

import asyncio
import difflib
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect

from afore.serving.http.errors import ApiError
from afore.serving.http.schemas import FieldError

B = TypeVar("B", bound=BaseModel)
_NAME_CHARACTERS = 80
_SHAPES = frozenset({"str", "int"})
"""What pydantic calls the shapes that a field may have; lists have a bracket in their name."""
_CHOICES = {
    "prompt": "give a text, a list of token ids (whole numbers from 0), or up to 128 of either",
    "stop": "give a string of 1 to 1024 characters, or up to 16 of them",
}
"""Fields that take several shapes: what they take says more than why each shape did not fit."""


async def read_body(request: Request, kind: type[B], *, most_bytes: int, timeout_s: float) -> B:
    """The request's JSON body as ``kind``. Raises ``ApiError``: 400, 408, 413 or 415."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        # A browser's page can send other kinds to any address without asking first; this one it cannot.
        raise ApiError(415, f"content-type is {content_type!r}; send application/json", code="unsupported_media_type")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > most_bytes:
        raise _too_large(most_bytes)
    data = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for piece in request.stream():
                data += piece
                if len(data) > most_bytes:
                    raise _too_large(most_bytes)
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {timeout_s:g} s", code="request_timeout") from None
    except ClientDisconnect:
        raise ApiError(400, "the connection ended within the body", code="incomplete_body") from None
    return parse_body(bytes(data), kind)


def parse_body(data: bytes, kind: type[B]) -> B:
    """The bytes as ``kind``. Raises ``ApiError`` (400) naming the first field that is wrong."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise _refusal(first, kind) from None


def _refusal(first: ErrorDetails, kind: type[BaseModel]) -> ApiError:
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, FieldError):
        return ApiError(400, str(cause), param=cause.field)
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "it cannot be read")
        return ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json")
    if not first["loc"]:
        return ApiError(400, "the body is not a JSON object", code="invalid_json")
    name = str(first["loc"][0])[:_NAME_CHARACTERS]
    if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
        near = difflib.get_close_matches(name, kind.model_fields, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return ApiError(400, f"{name}: no such field{hint}", param=name, code="unknown_field")
    if name in _CHOICES and first["type"] != "missing":
        return ApiError(400, f"{name}: {_CHOICES[name]}", param=name)
    param = _path(first)
    return ApiError(400, f"{param}: {first['msg'][0].lower()}{first['msg'][1:]}", param=param)


def _path(error: ErrorDetails) -> str:
    """``messages[0].content`` out of pydantic's location, without the names of the shapes that it tried."""
    path = ""
    for part in error["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in _SHAPES and "[" not in part:
            path += f".{part}" if path else part
    return path[:_NAME_CHARACTERS]


def _too_large(most_bytes: int) -> ApiError:
    return ApiError(413, f"the body is longer than {most_bytes} bytes", code="body_too_large")
