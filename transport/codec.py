"""Control messages as bytes: one msgpack map each, strict both ways. Never pickle, no extension types, limits on every length."""

from __future__ import annotations

from typing import Any, NoReturn

import msgpack

from afore.core.errors import WireError

MESSAGE_LIMIT = 16 << 20
"""Bytes of one encoded message, unless a fabric is given another limit."""
ITEM_LIMIT = 1 << 20
"""Entries of one list or map inside a message."""
_SMALL_BYTES = 1 << 10
"""Messages up to this length cannot claim enough to be looked at first."""
_CLAIM_LIMIT = 1 << 20
"""Entries that a message may claim, at most, before it is looked at first."""
_LARGE_HEADS = (b"\xdc", b"\xdd", b"\xde", b"\xdf")
"""First bytes of lists and maps whose count follows."""
_PLAIN = {
    **dict.fromkeys((0xC0, 0xC2, 0xC3), 1),
    **dict.fromkeys((0xCC, 0xD0), 2),
    **dict.fromkeys((0xCD, 0xD1), 3),
    **dict.fromkeys((0xCA, 0xCE, 0xD2), 5),
    **dict.fromkeys((0xCB, 0xCF, 0xD3), 9),
}
"""Bytes of a value, by its first."""
_COUNTED = {
    **dict.fromkeys((0xC4, 0xD9), (1, 0)),
    **dict.fromkeys((0xC5, 0xDA), (2, 0)),
    **dict.fromkeys((0xC6, 0xDB), (4, 0)),
    0xDC: (2, 1),
    0xDD: (4, 1),
    0xDE: (2, 2),
    0xDF: (4, 2),
}
"""By a value's first byte: the bytes of the count that follows, and the values that each one counted stands for; 0: bytes."""


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
    nbytes = len(body)
    if nbytes > _SMALL_BYTES and sum(map(body.count, _LARGE_HEADS)) * min(nbytes, ITEM_LIMIT) > _CLAIM_LIMIT:
        _require_honest(body, peer)
    try:
        message: Any = msgpack.unpackb(
            body,
            raw=False,
            use_list=True,
            strict_map_key=True,
            ext_hook=_refuse_extension,
            max_str_len=limit,
            max_bin_len=limit,
            max_array_len=min(nbytes, ITEM_LIMIT),
            max_map_len=min(nbytes, ITEM_LIMIT),
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


def _require_honest(body: bytes, peer: str) -> None:
    """Refuses lists and maps that claim more than the message has bytes for.

    The decoder makes room for each as soon as it reads its count: a thousand within each other would take gigabytes. What else is
    wrong with a message is the decoder's to say. Raises ``WireError``.
    """
    at, end, owed = 0, len(body), 1
    while owed:
        # Each value that is still to come takes a byte at least.
        if owed > end - at:
            raise WireError(
                peer, f"a message is not plain msgpack: {owed} values are to come in {max(end - at, 0)} bytes"
            )
        head = body[at]
        owed -= 1
        if head < 0x80 or head >= 0xE0:
            at += 1
        elif head < 0x90:
            at, owed = at + 1, owed + 2 * (head & 0x0F)
        elif head < 0xA0:
            at, owed = at + 1, owed + (head & 0x0F)
        elif head < 0xC0:
            at += 1 + (head & 0x1F)
        elif head in _PLAIN:
            at += _PLAIN[head]
        elif head in _COUNTED:
            width, each = _COUNTED[head]
            count = int.from_bytes(body[at + 1 : at + 1 + width], "big")
            at += 1 + width
            if each:
                owed += each * count
            else:
                at += count
        else:
            return  # an extension, or nothing that there is: the decoder stops here


def _refuse_extension(code: int, data: bytes) -> NoReturn:
    raise ValueError(f"extension type {code}")
