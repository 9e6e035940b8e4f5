"""Control messages to plain maps and back: the codec of ``afore.core.wire`` over the classes of ``afore.core.control``.

``WIRE_VERSION`` is exchanged when a channel opens; peers of different versions refuse each other there, so a message carries none.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping

from afore.core import control
from afore.core.control import WIRE_VERSION
from afore.core.wire import Codec

_CODEC = Codec(typing.get_args(control.Message))


def to_wire(message: control.Message, *, peer: str = "unknown") -> dict[str, object]:
    """The map that stands for ``message``. Raises ``WireError`` when a field's value does not fit its type hint."""
    return _CODEC.to_wire(message, peer=peer)


def from_wire(data: Mapping[str, object], *, peer: str = "unknown") -> control.Message:
    """The inverse of ``to_wire``. Raises ``WireError`` naming message and field; nothing of a bad map is used."""
    return typing.cast(control.Message, _CODEC.from_wire(data, peer=peer))


__all__ = ["WIRE_VERSION", "from_wire", "to_wire"]
