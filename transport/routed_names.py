"""Addresses and keys of endpoints that are reached in several ways: one string that holds each way's own.

    address   NODE;<address on the node>;tcp=10.0.0.2:41001;verbs=10.0.0.2:41002
    token     <token on the node>;tcp=REGION/TOKEN;verbs=REGION/TOKEN

So they travel wherever plain addresses and keys do. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from afore.core.errors import WireError
from afore.core.topology import NODE_NAME
from afore.transport.api import RegionKey

ROUTED = "routed"
"""The fabric of such a key."""
_SEPARATOR = ";"
_NUMBER = re.compile(r"[0-9]{1,20}")
"""Of a region; Python refuses to read thousands of digits."""


def is_routed(address: str) -> bool:
    """Whether this is such an address, or a plain one of the node itself."""
    return _SEPARATOR in address


@dataclass(frozen=True, slots=True)
class RoutedAddress:
    """An endpoint, as each fabric reaches it."""

    node: str
    near: str
    """On its node."""
    far: Mapping[str, str] = field(default_factory=dict)
    """By fabric, from other nodes; in order of preference of its owner."""

    def __str__(self) -> str:
        parts = [self.node, self.near, *(f"{fabric}={address}" for fabric, address in self.far.items())]
        assert all(_SEPARATOR not in part for part in parts), parts
        return _SEPARATOR.join(parts)

    @classmethod
    def parse(cls, address: str) -> RoutedAddress:
        """Raises ``WireError`` for what no endpoint of this kind says."""
        node, *rest = address.split(_SEPARATOR)
        ways = [part.partition("=") for part in rest[1:]]
        if not rest or not NODE_NAME.fullmatch(node) or not all(fabric and there for fabric, _, there in ways):
            raise WireError(address[:80], "is no address of a cluster on several nodes", "do all sides agree?")
        return cls(node, rest[0], {fabric: there for fabric, _, there in ways})


@dataclass(frozen=True, slots=True)
class RoutedKey:
    """A region, as each fabric writes into it."""

    near: RegionKey
    far: Mapping[str, RegionKey]

    def pack(self, address: RoutedAddress) -> RegionKey:
        """One plain key. ``address`` is the owner's."""
        parts = [self.near.token, *(f"{fabric}={key.region}/{key.token}" for fabric, key in self.far.items())]
        assert all(_SEPARATOR not in part for part in parts), parts
        return RegionKey(ROUTED, str(address), self.near.region, self.near.nbytes, _SEPARATOR.join(parts))

    @classmethod
    def parse(cls, key: RegionKey, near_fabric: str) -> RoutedKey:
        """The inverse of ``pack``. Raises ``WireError``."""
        address = RoutedAddress.parse(key.address)
        token, *ways = key.token.split(_SEPARATOR)
        far: dict[str, RegionKey] = {}
        for way in ways:
            fabric, _, rest = way.partition("=")
            region, slash, far_token = rest.partition("/")
            if not slash or not _NUMBER.fullmatch(region) or fabric not in address.far or fabric in far:
                raise WireError(key.address[:80], f"region {key.region} has no key that can be", "do all sides agree?")
            far[fabric] = RegionKey(fabric, address.far[fabric], int(region), key.nbytes, far_token)
        return cls(RegionKey(near_fabric, address.near, key.region, key.nbytes, token), far)
