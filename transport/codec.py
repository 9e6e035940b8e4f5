"""Control messages as bytes: one msgpack map each, strict both ways. Never pickle, no extension types, limits on every length."""

from __future__ import annotations

from typing import Any, NoReturn

import msgpack

from afore.core.errors import WireError

MESSAGE_LIMIT = 16 << 20
"""Bytes of one encoded message, unless a fabric is given another limit."""
ITEM_LIMIT = 1 << 20
"""Entries of one list or map inside a message."""


def encode_message(message: dict[str, object], *, limit: int, peer: str) -> bytes:
    """``message`` as bytes. Raises ``WireError`` when it is over ``limit`` bytes or holds what msgpack does not carry."""
    if type(message) is not dict:
        raise WireError(peer, f"cannot send a {type(message).__name__}", "a control message is a dict with str keys")
    try:
        body: bytes = msgpack.packb(message, use_bin_type=True, strict_types=False)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(
            peer, f"a message cannot be encoded: {error}", "use None, bool, int, float, str, bytes, list, dict"
        ) from error
    if len(body) > limit:
        raise WireError(
            peer,
            f"a message of {len(body):,} bytes is over the limit of {limit:,}",
            "split it, or write it into a region",
        )
    # What the reader would refuse (keys of inner maps, item counts, depth) is refused here, where it can be mended: there it ends
    # the channel. Control messages are small: this costs microseconds.
    decode_message(body, limit=limit, peer=peer)
    return body


def decode_message(body: bytes, *, limit: int, peer: str) -> dict[str, object]:
    """The map in ``body``. Raises ``WireError`` for anything else: extension types, trailing bytes, non-text keys, lengths."""
    if len(body) > limit:
        raise WireError(peer, f"a message of {len(body):,} bytes is over the limit of {limit:,}")
    try:
        message: Any = msgpack.unpackb(
            body,
            raw=False,
            use_list=True,
            strict_map_key=True,
            ext_hook=_refuse_extension,
            max_str_len=limit,
            max_bin_len=limit,
            max_array_len=min(limit, ITEM_LIMIT),
            max_map_len=min(limit, ITEM_LIMIT),
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise WireError(peer, f"a message is not plain msgpack: {str(error) or type(error).__name__}") from error
    if type(message) is not dict:
        raise WireError(peer, f"a message is a {type(message).__name__}, not a map")
    for key in message:
        if type(key) is not str:
            raise WireError(peer, f"a message has the key {key!r}", "keys are str")
    return message


def _refuse_extension(code: int, data: bytes) -> NoReturn:
    raise ValueError(f"extension type {code}")
