"""Addresses and keys that hold several fabrics' own: what goes in comes out, and nothing else is taken for one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afore.core.errors import WireError
from afore.transport.api import RegionKey
from afore.transport.routed_names import ROUTED, RoutedAddress, RoutedKey, is_routed

ADDRESS = RoutedAddress("b", "/dev/shm/afore-x/ffn-0-12-0", {"verbs": "10.0.0.2:4001", "tcp": "[fe80::1]:4002"})
words = st.from_regex(r"[A-Za-z0-9/.:\[\]#_-]{1,20}", fullmatch=True)
fabrics = st.dictionaries(st.sampled_from(["tcp", "verbs"]), words)


@given(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True), words, fabrics)
def test_an_address_survives_its_journey_with_the_order_of_preference(
    node: str, near: str, far: dict[str, str]
) -> None:
    address = RoutedAddress(node, near, far)
    assert is_routed(str(address))
    parsed = RoutedAddress.parse(str(address))
    assert parsed == address
    assert list(parsed.far) == list(far)


@given(st.text(max_size=60))
def test_other_text_is_refused_typed_or_says_the_same_again(text: str) -> None:
    try:
        parsed = RoutedAddress.parse(text)
    except WireError:
        return
    assert str(parsed) == text


@given(
    words,
    st.integers(0, 1 << 40),
    st.dictionaries(st.sampled_from(["tcp", "verbs"]), st.tuples(st.integers(0, 99), words)),
)
def test_a_key_survives_its_journey(token: str, nbytes: int, far: dict[str, tuple[int, str]]) -> None:
    near = RegionKey("shm", ADDRESS.near, 7, nbytes, token)
    keys = {name: RegionKey(name, ADDRESS.far[name], n, nbytes, t) for name, (n, t) in far.items()}
    packed = RoutedKey(near, keys).pack(ADDRESS)
    assert packed.fabric == ROUTED
    assert RoutedKey.parse(packed, "shm") == RoutedKey(near, keys)


@given(st.text(st.sampled_from("t;=/cp19vebrs")), st.integers(0, 99))
def test_any_token_is_a_key_or_a_wire_error(token: str, region: int) -> None:
    try:
        routed = RoutedKey.parse(RegionKey(ROUTED, str(ADDRESS), region, 8, token), "shm")
    except WireError:
        return
    assert routed.far.keys() <= ADDRESS.far.keys()


@pytest.mark.parametrize(
    "token",
    [
        "t;tcp=",
        "t;tcp=x/y",
        "t;tcp=3",
        "t;nope=3/y",
        "t;=3/y",
        "t;tcp=-1/y",
        "t;tcp=" + "9" * 5000 + "/y",
        "t;tcp=1/a;tcp=2/b",
    ],
)
def test_keys_that_cannot_be_are_refused(token: str) -> None:
    with pytest.raises(WireError):
        RoutedKey.parse(RegionKey(ROUTED, str(ADDRESS), 7, 8, token), "shm")
