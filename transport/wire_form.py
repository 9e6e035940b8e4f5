"""The form of each record in a file of ``wire_file``: what readers rely on, checked once, where records come in. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from afore.core.target import Target
from afore.transport.api import Lane

Test = Callable[[Any], bool]
_WORD = 1 << 64


def _text(value: Any) -> bool:
    return type(value) is str


def _data(value: Any) -> bool:
    return type(value) is bytes


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _WORD


def _optional(test: Test) -> Test:
    return lambda value: value is None or test(value)


def _list_of(test: Test) -> Test:
    return lambda value: type(value) is list and all(map(test, value))


def _lane(value: Any) -> bool:
    return _count(value) and value in tuple(Lane)


def _way(value: Any) -> bool:
    return value in ("in", "out")


def _message(value: Any) -> bool:
    return type(value) is dict and all(map(_text, value))


def _target(value: Any) -> bool:
    try:
        return _count(value) and Target.from_word(value) is not None
    except ValueError:
        return False


def _key(value: Any) -> bool:
    return type(value) is list and _fit(_KEY, value)


def _fit(tests: Mapping[str, Test], values: list[Any]) -> bool:
    return len(values) == len(tests) and all(test(value) for test, value in zip(tests.values(), values, strict=True))


_KEY: Mapping[str, Test] = {"fabric": _text, "address": _text, "region": _count, "nbytes": _count, "token": _text}
_WHERE: Mapping[str, Test] = {"peer": _text, "lane": _lane, "address": _text, "region": _count, "offset": _count}
FORMS: Mapping[str, Mapping[str, Test]] = {
    "region": {"label": _text, "keys": _list_of(_key)},
    "write": {**_WHERE, "data": _optional(_data), "nbytes": _count, "notify": _optional(_count)},
    "read": {**_WHERE, "nbytes": _count},
    "message": {"way": _way, "channel": _count, "peer": _text, "message": _message},
    "entry": {"sequence": _count, "data": _data},
    "asked": {"target": _target},
    "predicted": {"target": _target},
    "heard": {"records": _list_of(_count)},
    "end": {"records": _count, "dropped": _count},
}
"""By kind: the fields behind kind and time, in order."""


def fault(record: Any) -> str:
    """What is wrong with a record, as ``msgpack`` gave it; empty where it is ``[kind, t_ns, fields…]`` of a kind above."""
    if type(record) is not list or len(record) < 2 or not _text(record[0]) or type(record[1]) is not int:
        return "one that does not begin with a kind and a time"
    kind, _, *values = record
    tests = FORMS.get(kind)
    if tests is None:
        return f"one of an unknown kind, {kind[:40]!r}"
    if len(values) != len(tests):
        return f"a {kind!r} of {len(values)} fields, not {len(tests)}"
    wrong = [name for (name, test), value in zip(tests.items(), values, strict=True) if not test(value)]
    return f"a {kind!r} whose {wrong[0]} is none" if wrong else ""
