"""Hostile requests, made from the door's own OpenAPI description: ``python -m tests.serving.http.hostile 2500``.

Every request is a good one with some fields replaced by any JSON value, or with bytes of it spoilt. The description itself says
which values are wrong: those must be refused with a 4xx that names the field. No request may end in a 5xx, and after all of them
the door answers as before.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.serving.http.served import CONFIG, serving

GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hello", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [5, 6]},
}
JSON_HEADERS = {"content-type": "application/json"}

numbers = (
    st.sampled_from(
        [-1, 0, 1, 2, 2**31, 2**63 - 1, 2**64, -(2**63) - 1, 10**30, 10**400, -0.0, 0.5, 1.0, 1e308, 5e-324]
    )
    | st.integers(-3, 2)
    | st.floats(allow_nan=False, allow_infinity=False)
)
texts = st.text(max_size=12) | st.sampled_from(["", "a" * 5000, "\x00", "\u202e", "🜁" * 400, "NaN", "1"])
scalars = st.none() | st.booleans() | numbers | texts
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            texts | st.sampled_from(["role", "content", "type", "text", "include_usage"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)
raw_numbers = st.sampled_from(
    [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"9" * 5000, b"01", b"1.", b"+1"]
)


@dataclass(frozen=True, slots=True)
class Case:
    """One request: where it goes, its bytes, and the fields of which one must be named; none where it may be good."""

    path: str
    body: bytes
    wrong: frozenset[str] | None
    """Empty: it must be refused, whatever is named."""


class Description:
    """The door's description, as far as it says which values are right."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._schemas = document["components"]["schemas"]
        self._bodies = {
            path: self._resolve(document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"])
            for path in GOOD
        }

    def fields(self, path: str) -> list[str]:
        """The fields that a path's body may have."""
        return sorted(self._bodies[path]["properties"])

    def wrong(self, path: str, body: dict[str, Any]) -> frozenset[str]:
        """The fields of a body that are wrong by the description, missing ones included."""
        schema = self._bodies[path]
        given_ = {name: value for name, value in body.items() if value is not None}
        wrong = {name for name in schema.get("required", ()) if name not in given_}
        for name, value in given_.items():
            if name not in schema["properties"] or not self._fits(value, schema["properties"][name]):
                wrong.add(name)
        return frozenset(wrong)

    def _resolve(self, schema: dict[str, Any]) -> dict[str, Any]:
        reference = schema.get("$ref")
        return self._schemas[reference.rsplit("/", 1)[1]] if reference is not None else schema

    def _fits(self, value: Any, schema: dict[str, Any]) -> bool:
        schema = self._resolve(schema)
        if "anyOf" in schema:
            return any(self._fits(value, one) for one in schema["anyOf"])
        check: Callable[[Any, dict[str, Any]], bool] | None = _KINDS.get(schema.get("type", ""))
        if check is not None and not check(value, schema):
            return False
        if "enum" in schema and value not in schema["enum"]:
            return False
        if "const" in schema and value != schema["const"]:
            return False
        if isinstance(value, list) and "items" in schema:
            return all(self._fits(item, schema["items"]) for item in value)
        if isinstance(value, dict) and "properties" in schema:
            known = {name: item for name, item in value.items() if item is not None}
            return all(
                name in schema["properties"] and self._fits(item, schema["properties"][name])
                for name, item in known.items()
            ) and all(name in known for name in schema.get("required", ()))
        return True


def _number(value: Any, schema: dict[str, Any]) -> bool:
    if type(value) not in (int, float):
        return False
    return (
        value >= schema.get("minimum", value)
        and value <= schema.get("maximum", value)
        and ("exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"])
        and ("exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"])
    )


_KINDS: dict[str, Callable[[Any, dict[str, Any]], bool]] = {
    "string": lambda value, schema: (
        isinstance(value, str) and schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
    ),
    "integer": lambda value, schema: type(value) is int and _number(value, schema),
    "number": _number,
    "boolean": lambda value, schema: isinstance(value, bool),
    "null": lambda value, schema: value is None,
    "array": lambda value, schema: (
        isinstance(value, list) and schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
    ),
    "object": lambda value, schema: isinstance(value, dict),
}


def cases(description: Description) -> st.SearchStrategy[Case]:
    """Every kind of request that this file knows."""

    @st.composite
    def changed(draw: st.DrawFn) -> Case:
        path = draw(st.sampled_from(sorted(GOOD)))
        names = st.sampled_from(description.fields(path)) | st.text(min_size=1, max_size=8)
        body = {**GOOD[path], **draw(st.dictionaries(names, values, min_size=1, max_size=3))}
        wrong = description.wrong(path, body)
        return Case(path, json.dumps(body).encode(), wrong or None)

    @st.composite
    def numbered(draw: st.DrawFn) -> Case:
        path = draw(st.sampled_from(sorted(GOOD)))
        name = draw(st.sampled_from(description.fields(path)))
        body = json.dumps({**GOOD[path], name: "@"}).encode().replace(b'"@"', draw(raw_numbers))
        return Case(path, body, None)

    @st.composite
    def spoilt(draw: st.DrawFn) -> Case:
        path = draw(st.sampled_from(sorted(GOOD)))
        body = bytearray(json.dumps(GOOD[path]).encode())
        for _ in range(draw(st.integers(1, 4))):
            at = draw(st.integers(0, len(body)))
            body[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
        return Case(path, bytes(body), None)

    @st.composite
    def deep(draw: st.DrawFn) -> Case:
        path = draw(st.sampled_from(sorted(GOOD)))
        opening = draw(st.sampled_from([b"[", b'{"a":', b'{"messages":[']))
        return Case(path, opening * draw(st.sampled_from([300, 20_000])), frozenset())

    return st.one_of(changed(), changed(), changed(), numbered(), spoilt(), deep())


def check(http: httpx.Client, case: Case) -> int:
    """Sends a case; returns the status. Raises ``AssertionError`` where the door did not do as it must."""
    answer = http.post(case.path, content=case.body, headers=JSON_HEADERS)
    assert answer.status_code < 500, (case, answer.text)
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert 0 < len(error["message"]) <= 500
    if case.wrong is not None:
        assert 400 <= answer.status_code < 500, (case, answer.text)
        if case.wrong:
            top = (answer.json()["error"]["param"] or "").split("[")[0].split(".")[0]
            assert any(top == name[:80].split("[")[0].split(".")[0] for name in case.wrong), (case, answer.text)
    return answer.status_code


def run(http: httpx.Client, examples: int) -> dict[int, int]:
    """Sends that many; returns how often each status came. Raises as ``check`` does, and where the door has changed."""
    description = Description(http.get("/openapi.json").json())
    good = [
        http.post(path, json={**body, "temperature": 0} if "max_tokens" in body else body)
        for path, body in GOOD.items()
    ]
    counts: dict[int, int] = {}

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(description))
    def one(case: Case) -> None:
        status = check(http, case)
        counts[status] = counts.get(status, 0) + 1

    one()
    for before, (path, body) in zip(good, GOOD.items(), strict=True):
        after = http.post(path, json={**body, "temperature": 0} if "max_tokens" in body else body)
        assert after.status_code == 200
        same = [{k: v for k, v in a.json().items() if k not in ("id", "created")} for a in (before, after)]
        assert same[0] == same[1]
    assert http.get("/health").status_code == 200
    return counts


def main() -> None:
    """Prints how often each status came."""
    with serving(CONFIG) as served, httpx.Client(base_url=served.url, timeout=60) as http:
        print(json.dumps(run(http, int(sys.argv[1]))))  # noqa: T201  # a command


if __name__ == "__main__":
    main()
