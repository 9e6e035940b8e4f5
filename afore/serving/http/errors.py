"""Errors as OpenAI's clients expect them: ``{"error": {"message", "type", "param", "code"}}`` with the status that fits."""

from __future__ import annotations

from typing import Any

from afore.core.errors import PromptTooLong, QueueFull, RequestError, RoleLost

RETRY_AFTER_S = 1
"""When a client that was turned away for lack of room, or of roles, should come again."""
INVALID = "invalid_request_error"
_MOST_CHARACTERS = 500
"""Of a message: what a client sent must not come back at full length."""


class ApiError(Exception):
    """A request that is answered with an error. ``param`` is the field that is to blame."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        retry: bool = False,
        extra: dict[str, Any] | None = None,
    ) -> None:
        self.status = status
        self.message = message if len(message) <= _MOST_CHARACTERS else message[: _MOST_CHARACTERS - 1] + "…"
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = {"Retry-After": str(RETRY_AFTER_S)} if retry else {}
        self.extra = extra or {}
        super().__init__(self.message)

    def body(self) -> dict[str, Any]:
        """The answer's JSON."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error, **self.extra}


def bad_field(param: str, message: str, code: str | None = None) -> ApiError:
    """400: a field cannot be used."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)


def unavailable(message: str, *, code: str, missing: tuple[str, ...] = (), lost: str = "") -> ApiError:
    """503: roles are missing or lost; they are named beside the error."""
    return ApiError(
        503,
        message,
        kind="service_unavailable_error",
        code=code,
        retry=True,
        extra={"missing": list(missing), "lost": lost},
    )


def of_failure(error: RequestError | RoleLost, prompt_field: str) -> ApiError:
    """What the engine said, in OpenAI's words."""
    if isinstance(error, RoleLost):
        lost = f"{error.role}: {error.reason}"
        return unavailable(f"{lost}; {error.hint}", code="role_lost", lost=lost)
    message = error.problem + (f"; {error.remedy}" if error.remedy else "")
    if isinstance(error, QueueFull):
        return ApiError(429, message, kind="rate_limit_error", code="queue_full", retry=True)
    code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
    return ApiError(400, message, param=prompt_field, code=code)
