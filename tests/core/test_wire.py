"""The codec of control messages: strict on the way in, unchanged on the way round, also through msgpack."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afore.core import control
from afore.core.config import RunConfig
from afore.core.errors import ConfigError, WireError
from afore.core.messages import from_wire, to_wire
from afore.core.topology import Topology
from afore.core.wire import TAG, Codec


class Colour(enum.IntEnum):
    RED = 1
    BLUE = 2


@dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Everything:
    text: str
    number: int
    real: float
    flag: bool
    raw: bytes
    maybe: int | None
    many: tuple[Point, ...]
    pair: tuple[int, str]
    nested: tuple[tuple[int, ...], ...]
    listed: list[str]
    table: dict[str, Point | None]
    choice: Literal["a", 1]
    colour: Colour


@dataclass(frozen=True, slots=True)
class Positive:
    value: int

    def __post_init__(self) -> None:
        if self.value <= 0:
            raise ConfigError("value", "is not positive")


CODEC = Codec((Everything, Point, Positive))

reals = st.floats(allow_nan=False)
ints = st.integers(-(1 << 63), (1 << 64) - 1)
points = st.builds(Point, x=ints, y=reals)
everythings = st.builds(
    Everything,
    text=st.text(),
    number=ints,
    real=reals,
    flag=st.booleans(),
    raw=st.binary(),
    maybe=st.none() | ints,
    many=st.lists(points, max_size=3).map(tuple),
    pair=st.tuples(ints, st.text()),
    nested=st.lists(st.lists(ints, max_size=3).map(tuple), max_size=3).map(tuple),
    listed=st.lists(st.text(), max_size=3),
    table=st.dictionaries(st.text(), st.none() | points, max_size=3),
    choice=st.sampled_from(["a", 1]),
    colour=st.sampled_from(Colour),
)
SAMPLE = Everything(
    text="t",
    number=1,
    real=0.5,
    flag=True,
    raw=b"r",
    maybe=None,
    many=(Point(1, 2.0),),
    pair=(1, "p"),
    nested=((1,), ()),
    listed=["l"],
    table={"k": Point(3, 4.0)},
    choice="a",
    colour=Colour.BLUE,
)


@pytest.mark.slow
@given(everythings)
def test_a_message_comes_back_as_it_was_also_through_msgpack(message: Everything) -> None:
    wire = CODEC.to_wire(message)
    assert CODEC.from_wire(wire) == message
    unpacked = msgpack.unpackb(msgpack.packb(wire))
    returned = CODEC.from_wire(unpacked)
    assert returned == message
    assert type(returned) is Everything
    assert type(returned.colour) is Colour


def test_a_whole_number_in_a_float_field_travels_as_a_float() -> None:
    wire = CODEC.to_wire(Point(1, 2))
    assert type(wire["y"]) is float


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("text", b"bytes", r"Everything\.text is bytes, not str"),
        ("text", "\ud800", r"Everything\.text is not valid Unicode"),
        ("number", True, r"Everything\.number is bool, not int"),
        ("number", 1.0, r"Everything\.number is float, not int"),
        ("number", 1 << 64, r"Everything\.number .* does not fit 64 bits"),
        ("real", "1", r"Everything\.real is str, not float"),
        ("flag", 1, r"Everything\.flag is int, not bool"),
        ("raw", "text", r"Everything\.raw is str, not bytes"),
        ("maybe", "no", r"Everything\.maybe is str, not int"),
        ("many", [{"x": 1, "y": 2.0}, {"x": "?", "y": 2.0}], r"Everything\.many\[1\]\.x is str, not int"),
        ("many", [{"x": 1}], r"Everything\.many\[0\]\.y is missing"),
        ("many", [{"x": 1, "y": 1.0, "z": 1}], r"Everything\.many\[0\] has an unknown field 'z'"),
        ("many", [[1, 2.0]], r"Everything\.many\[0\] is list, not a map"),
        ("many", "text", r"Everything\.many is str, not a list"),
        ("pair", [1], r"Everything\.pair has 1 items, not 2"),
        ("pair", [1, 2], r"Everything\.pair\[1\] is int, not str"),
        ("nested", [[1], [None]], r"Everything\.nested\[1\]\[0\] is NoneType, not int"),
        ("listed", [1], r"Everything\.listed\[0\] is int, not str"),
        ("table", {"k": 1}, r"Everything\.table\['k'\] is int, not a map"),
        ("table", {1: None}, r"Everything\.table\[1\] is int, not str"),
        ("table", [], r"Everything\.table is list, not dict"),
        ("choice", "b", r"Everything\.choice 'b' is none of 'a', 1"),
        ("choice", True, r"Everything\.choice True is none of"),
        ("colour", 3, r"Everything\.colour 3 is no Colour"),
        ("colour", True, r"Everything\.colour True is no Colour"),
        ("colour", [1], r"Everything\.colour \[1\] is no Colour"),
    ],
)
def test_a_value_of_another_type_is_refused_by_message_and_field(field: str, value: object, complaint: str) -> None:
    wire = {**CODEC.to_wire(SAMPLE), field: value}
    with pytest.raises(WireError, match=complaint):
        CODEC.from_wire(wire, peer="ffn-1")


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        ({}, "peer door-0: sent a message of unknown type None"),
        ({TAG: "Nonsense"}, "unknown type 'Nonsense'"),
        ({TAG: 3}, "unknown type 3"),
        ({TAG: "Point", "x": 1}, r"Point\.y is missing"),
        ({TAG: "Point", "x": 1, "y": 1.0, "z": 0}, "Point has an unknown field 'z'"),
        ({TAG: "Positive", "value": 0}, "Positive refuses its values: value: is not positive"),
        ([1, 2], "sent list where a message was due"),
    ],
)
def test_a_map_that_is_no_message_is_refused(data: Any, complaint: str) -> None:
    with pytest.raises(WireError, match=complaint):
        CODEC.from_wire(data, peer="door-0")


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("number", Colour.RED, r"Everything\.number is Colour, not int"),
        ("real", True, r"Everything\.real is bool, not float"),
        ("real", 1 << 60, r"Everything\.real is int, not float"),
        ("many", [Point(1, 1.0)], r"Everything\.many is list, not tuple"),
        ("many", (Point(1, 1.0), None), r"Everything\.many\[1\] is NoneType, not Point"),
        ("pair", [1, "p"], r"Everything\.pair is list, not tuple"),
        ("colour", 1, r"Everything\.colour is int, not Colour"),
    ],
)
def test_a_bad_value_is_not_sent(field: str, value: Any, complaint: str) -> None:
    with pytest.raises(WireError, match=complaint):
        CODEC.to_wire(replace(SAMPLE, **{field: value}))


def test_what_is_no_message_is_not_sent() -> None:
    with pytest.raises(WireError, match="str is no message"):
        CODEC.to_wire("text")


@dataclass
class Recursive:
    again: Recursive | None


@dataclass
class Untyped:
    thing: object


@dataclass
class Ambiguous:
    thing: int | str


@pytest.mark.parametrize("kind", [Recursive, Untyped, Ambiguous, Colour])
def test_classes_that_cannot_travel_are_refused_when_the_codec_is_made(kind: type) -> None:
    with pytest.raises(TypeError):
        Codec((kind,))


def test_two_messages_of_one_name_are_refused() -> None:
    with pytest.raises(TypeError, match="name is taken"):
        Codec((Point, Point))


@pytest.mark.slow
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda leaf: st.lists(leaf) | st.dictionaries(st.text(), leaf),
    )
)
def test_arbitrary_data_is_a_typed_error_or_a_message(data: Any) -> None:
    for name in CODEC.names:
        fields = {**data, TAG: name} if isinstance(data, dict) else data
        try:
            assert type(CODEC.from_wire(fields)).__name__ == name
        except WireError:
            continue


@pytest.mark.parametrize(
    "message",
    [
        control.Welcome("ffn", 3, RunConfig(topology=Topology(ffn=2, redundant_slots_per_worker=(1, 0)))),
        control.StepWork.of(0, 7, (control.Row(1, 2, 3), control.Row(4, 5, 6))),
        control.DirectoryMessage(
            1, (control.MemberKeys("ffn", 0, (control.LabelledKey("ring", "shm", "a", 1, 64, "t"),)),)
        ),
    ],
)
def test_the_control_plane_s_own_messages_survive(message: control.Message) -> None:
    assert from_wire(msgpack.unpackb(msgpack.packb(to_wire(message)))) == message
