"""A strict codec between dataclasses and plain maps, read off the type hints: what ``Control`` channels carry.

A message becomes ``{"@": class name, field: value, ...}``; nested dataclasses become maps without the tag, since the hint says
what they are. Nothing is coerced on the way in: an unknown type, a missing or extra field, or a value of another type is a
``WireError`` that names message and field. Supported hints: ``str int float bool bytes``, ``T | None``, ``tuple[T, ...]``,
``tuple[A, B]``, ``list[T]``, ``dict[str, T]``, ``Literal``, enums, and dataclasses of these. Values survive msgpack unchanged.
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from afore.core.errors import WireError

TAG = "@"
INT_MIN, INT_MAX = -(1 << 63), (1 << 64) - 1
"""What msgpack can carry."""

Convert = Callable[[Any], Any]


class _Mismatch(Exception):
    """A value that does not fit its hint; the path is put together on the way out."""

    def __init__(self, problem: str, path: str = "") -> None:
        self.problem = problem
        self.path = path
        super().__init__(problem)

    def inside(self, step: str) -> _Mismatch:
        return _Mismatch(self.problem, step + self.path)


def _name(value: object) -> str:
    return type(value).__name__


def _integer(value: Any) -> int:
    # Subclasses (IntEnum, numpy scalars) would come back as another type, and bool is a subclass too.
    if type(value) is not int:
        raise _Mismatch(f"is {_name(value)}, not int")
    if not INT_MIN <= value <= INT_MAX:
        raise _Mismatch(f"{value} does not fit 64 bits")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise _Mismatch(f"is {_name(value)}, not str")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _Mismatch("is not valid Unicode") from None
    return value


_TEXT: tuple[Convert, Convert] = (_text, _text)
_INTEGER: tuple[Convert, Convert] = (_integer, _integer)


def _scalar(kind: type) -> tuple[Convert, Convert]:
    def same(value: Any) -> Any:
        if type(value) is not kind:
            raise _Mismatch(f"is {_name(value)}, not {kind.__name__}")
        return value

    def widened(value: Any) -> float:
        # Python lets an int stand where a float is meant; on the wire it is a float, so that the reader can be strict.
        if type(value) is int and abs(value) <= 1 << 53:
            return float(value)
        return typing.cast(float, same(value))

    if kind is int:
        return _INTEGER
    if kind is float:
        return widened, same
    return _TEXT if kind is str else (same, same)


def _literal(choices: tuple[Any, ...]) -> tuple[Convert, Convert]:
    def check(value: Any) -> Any:
        # 1 == True == 1.0: the type counts as well.
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            raise _Mismatch(f"{value!r} is none of {', '.join(map(repr, choices))}")
        return value

    return check, check


def _enum(kind: type[enum.Enum]) -> tuple[Convert, Convert]:
    by_value = {member.value: member for member in kind}

    def encode(value: Any) -> Any:
        if type(value) is not kind:
            raise _Mismatch(f"is {_name(value)}, not {kind.__name__}")
        return value.value

    def decode(value: Any) -> Any:
        member = by_value.get(value) if isinstance(value, int | str) else None
        if member is None or type(member.value) is not type(value):
            raise _Mismatch(f"{value!r} is no {kind.__name__}")
        return member

    return encode, decode


def _sequence(item: tuple[Convert, Convert], make: type[list[Any]] | type[tuple[Any, ...]]) -> tuple[Convert, Convert]:
    numbers, texts = item is _INTEGER, item is _TEXT

    def convert_all(convert: Convert, values: Any) -> list[Any]:
        # Prompts, and the columns of a step: thousands of numbers in one message, nearly never a mistake among them.
        if texts and values and set(map(type, values)) == {str}:
            try:
                "".join(values).encode()
            except UnicodeEncodeError:
                pass  # found and named below
            else:
                return list(values)
        if numbers and values and set(map(type, values)) == {int} and min(values) >= INT_MIN and max(values) <= INT_MAX:
            return list(values)
        out: list[Any] = []
        try:
            for value in values:
                out.append(convert(value))
        except _Mismatch as error:
            raise error.inside(f"[{len(out)}]") from None
        return out

    def encode(values: Any) -> list[Any]:
        if type(values) is not make:
            raise _Mismatch(f"is {_name(values)}, not {make.__name__}")
        return convert_all(item[0], values)

    def decode(values: Any) -> Any:
        if not isinstance(values, list | tuple):
            raise _Mismatch(f"is {_name(values)}, not a list")
        return make(convert_all(item[1], values))

    return encode, decode


def _fixed_tuple(items: tuple[tuple[Convert, Convert], ...]) -> tuple[Convert, Convert]:
    def convert_all(which: int, values: Any) -> list[Any]:
        if len(values) != len(items):
            raise _Mismatch(f"has {len(values)} items, not {len(items)}")
        out = []
        for index, (value, item) in enumerate(zip(values, items, strict=True)):
            try:
                out.append(item[which](value))
            except _Mismatch as error:
                raise error.inside(f"[{index}]") from None
        return out

    def encode(values: Any) -> list[Any]:
        if type(values) is not tuple:
            raise _Mismatch(f"is {_name(values)}, not tuple")
        return convert_all(0, values)

    def decode(values: Any) -> tuple[Any, ...]:
        if not isinstance(values, list | tuple):
            raise _Mismatch(f"is {_name(values)}, not a list")
        return tuple(convert_all(1, values))

    return encode, decode


def _mapping(item: tuple[Convert, Convert]) -> tuple[Convert, Convert]:
    text = _scalar(str)[0]

    def convert_all(convert: Convert, values: Any) -> dict[str, Any]:
        if type(values) is not dict:
            raise _Mismatch(f"is {_name(values)}, not dict")
        out = {}
        for key, value in values.items():
            try:
                out[text(key)] = convert(value)
            except _Mismatch as error:
                raise error.inside(f"[{key!r}]") from None
        return out

    return lambda values: convert_all(item[0], values), lambda values: convert_all(item[1], values)


def _dataclass(kind: type, busy: tuple[type, ...]) -> tuple[Convert, Convert]:
    if kind in busy:
        raise TypeError(f"{kind.__name__} contains itself: its depth on the wire would have no bound")
    hints = typing.get_type_hints(kind)
    fields = tuple(
        (field.name, *_converters(hints[field.name], (*busy, kind), f"{kind.__name__}.{field.name}"))
        for field in dataclasses.fields(kind)
    )
    names = frozenset(name for name, _, _ in fields)
    if TAG in names or not all(field.init for field in dataclasses.fields(kind)):
        raise TypeError(f"{kind.__name__} has a field that cannot travel")

    def encode(value: Any) -> dict[str, Any]:
        if type(value) is not kind:
            raise _Mismatch(f"is {_name(value)}, not {kind.__name__}")
        out = {}
        for name, convert, _ in fields:
            try:
                out[name] = convert(getattr(value, name))
            except _Mismatch as error:
                raise error.inside(f".{name}") from None
        return out

    def decode(data: Any) -> Any:
        if type(data) is not dict:
            raise _Mismatch(f"is {_name(data)}, not a map")
        extra = [key for key in data if key not in names]
        if extra:
            raise _Mismatch(f"has an unknown field {extra[0]!r}")
        values = {}
        for name, _, convert in fields:
            if name not in data:
                raise _Mismatch("is missing", f".{name}")
            try:
                values[name] = convert(data[name])
            except _Mismatch as error:
                raise error.inside(f".{name}") from None
        try:
            return kind(**values)
        except ValueError as error:
            raise _Mismatch(f"refuses its values: {error}") from None

    return encode, decode


def _optional(item: tuple[Convert, Convert]) -> tuple[Convert, Convert]:
    return (
        lambda value: None if value is None else item[0](value),
        lambda value: None if value is None else item[1](value),
    )


def _converters(hint: Any, busy: tuple[type, ...], where: str) -> tuple[Convert, Convert]:
    """(to the wire, from the wire) for a hint; ``TypeError`` for one that this codec does not carry."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in (str, int, float, bool, bytes):
        return _scalar(hint)
    if origin is Literal:
        return _literal(arguments)
    if origin in (typing.Union, types.UnionType):
        others = [argument for argument in arguments if argument is not type(None)]
        if len(others) == 1:
            return _optional(_converters(others[0], busy, where))
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return _sequence(_converters(arguments[0], busy, where), tuple)
    if origin is tuple and arguments:
        return _fixed_tuple(tuple(_converters(argument, busy, where) for argument in arguments))
    if origin is list:
        return _sequence(_converters(arguments[0], busy, where), list)
    if origin is dict and arguments[0] is str:
        return _mapping(_converters(arguments[1], busy, where))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _enum(hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _dataclass(hint, busy)
    raise TypeError(f"{where}: the wire cannot carry {hint!r}")


class Codec:
    """Messages of a closed set of dataclasses, told apart by class name. Immutable once made."""

    __slots__ = ("_by_name", "_by_type")

    def __init__(self, messages: Iterable[type]) -> None:
        """Raises ``TypeError`` for a class that cannot travel, and for two of one name."""
        self._by_type: dict[type, Convert] = {}
        self._by_name: dict[str, Convert] = {}
        for kind in messages:
            if not dataclasses.is_dataclass(kind) or kind.__name__ in self._by_name:
                raise TypeError(f"{kind.__name__} is no dataclass, or its name is taken")
            self._by_type[kind], self._by_name[kind.__name__] = _dataclass(kind, ())

    @property
    def names(self) -> tuple[str, ...]:
        """Every message name, in order."""
        return tuple(self._by_name)

    def to_wire(self, message: object, *, peer: str = "unknown") -> dict[str, object]:
        """The map that stands for ``message``. Raises ``WireError`` when a field's value does not fit its hint."""
        encode = self._by_type.get(type(message))
        if encode is None:
            raise WireError(peer, f"{type(message).__name__} is no message", "add it to the registered messages")
        try:
            return {TAG: type(message).__name__, **encode(message)}
        except _Mismatch as error:
            raise WireError(peer, f"{type(message).__name__}{error.path} {error.problem}; nothing was sent") from None

    def from_wire(self, data: Mapping[str, object], *, peer: str = "unknown") -> object:
        """The inverse of ``to_wire``. Raises ``WireError`` naming message and field; nothing of a bad map is used."""
        if not isinstance(data, Mapping):
            raise WireError(peer, f"sent {type(data).__name__} where a message was due")
        name = data.get(TAG)
        decode = self._by_name.get(name) if isinstance(name, str) else None
        if decode is None:
            raise WireError(peer, f"sent a message of unknown type {name!r}", "check that both sides have one version")
        try:
            return decode({key: value for key, value in data.items() if key != TAG})
        except _Mismatch as error:
            raise WireError(peer, f"{name}{error.path} {error.problem}", "nothing of the message was used") from None
