"""Tokens of tcp regions: a random number that frames carry, and proof that a key was made by somebody who knows the secret.

A writer checks the proof before it sends a byte, so that a key with another size, number or owner is refused at once; the owner
checks the number, which no earlier life of it has had.
"""

from __future__ import annotations

import hmac
import re
import secrets

from afore.transport.api import RegionKey
from afore.transport.buffers import refuse_foreign

_TOKEN = re.compile(r"(?P<number>[0-9a-f]{16})-(?P<proof>[0-9a-f]{32})")


def new_key(secret: bytes, address: str, region: int, nbytes: int) -> tuple[RegionKey, int]:
    """A key for a new region, and its number."""
    number = secrets.randbits(64)
    token = f"{number:016x}-{_proof(secret, address, region, nbytes, number)}"
    return RegionKey("tcp", address, region, nbytes, token), number


def require_genuine(secret: bytes, key: RegionKey, peer: str) -> int:
    """The number of ``key``, a region of ``peer``'s. Raises ``AccessRefused``."""
    if key.fabric != "tcp" or key.address != peer:
        raise refuse_foreign(key, peer, "is not this peer's")
    said = _TOKEN.fullmatch(key.token)
    if said is None:
        raise refuse_foreign(key, peer, "has no token of this fabric")
    number = int(said["number"], 16)
    if not hmac.compare_digest(said["proof"], _proof(secret, key.address, key.region, key.nbytes, number)):
        raise refuse_foreign(key, peer, "is not as its owner made it")
    return number


def _proof(secret: bytes, address: str, region: int, nbytes: int, number: int) -> str:
    said = f"afore region {region} of {nbytes} bytes, number {number}, at {address}".encode()
    return hmac.digest(secret, said, "sha256").hex()[:32]
