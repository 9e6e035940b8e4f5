"""What may be written: flat bytes, and the checks at the door that every fabric makes alike."""

from __future__ import annotations

from afore.core.errors import AccessRefused, ConfigError, RegionRevoked
from afore.transport.api import Buffer, RegionKey

IMMEDIATE_LIMIT = 1 << 32


def flat(data: Buffer, peer: str) -> Buffer:
    """``data`` such that ``len`` counts bytes and it can be assigned to a slice of a region. Raises ``AccessRefused``."""
    kind = type(data)
    if kind is bytes or kind is bytearray:
        return data
    view = memoryview(data)
    if view.nbytes == 0:
        return b""
    if view.format == "B" and view.ndim == 1:
        return view
    try:
        return view.cast("B")
    except TypeError as error:
        raise AccessRefused(
            peer, f"write of memory that is not contiguous ({error})", "copy it into one piece first"
        ) from error


def require_immediate(notify: int, peer: str) -> None:
    """Raises ``AccessRefused`` unless ``notify`` fits 32 bits."""
    if not 0 <= notify < IMMEDIATE_LIMIT:
        raise AccessRefused(peer, f"immediate {notify} does not fit 32 bits", "put what is larger into the region")


def refuse_bounds(key: RegionKey, offset: int, nbytes: int) -> AccessRefused:
    """The error for a write outside a region."""
    return AccessRefused(
        key.address,
        f"write of {nbytes} bytes at offset {offset} of region {key.region}, which has {key.nbytes}",
        "the two sides disagree on its layout",
    )


def refuse_foreign(key: RegionKey, peer: str, why: str) -> AccessRefused:
    """The error for a key that does not belong to the link's peer."""
    return AccessRefused(
        peer,
        f"region {key.region} of {key.fabric}:{key.address} {why}",
        "use a link to the region's owner and the key it sent",
    )


def revoked(key: RegionKey) -> RegionRevoked:
    """The error for a region that its owner has closed."""
    return RegionRevoked(
        key.address, f"region {key.region} is closed", "its epoch has ended: ask the owner for a new key"
    )


def require_nbytes(nbytes: int, label: str) -> None:
    """Raises ``ConfigError`` for a size that no region can have."""
    if not 0 <= nbytes < 1 << 48:
        raise ConfigError(f"region {label!r}", f"{nbytes} bytes is no size", "give 0 or more")
