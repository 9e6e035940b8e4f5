"""The config's checks, and its durations in verbs' codes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afore.core.errors import ConfigError, HostError
from afore.transport.verbs.binding import load_binding
from afore.transport.verbs.config import RNR_TIMERS_US, VerbsConfig

SECRET = b"the secret of this run, long enough"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("api", "libfabric"),
        ("mtu_bytes", 1500),
        ("port", 0),
        ("gid_index", -1),
        ("credits", 0),
        ("credits", 1 << 20),
        ("send_depth", 3),
        ("inline_bytes", -1),
        ("staging_bytes", 100),
        ("retry_count", 8),
        ("rnr_retry_count", 7),
        ("reads_in_flight", 0),
        ("message_limit", 1 << 32),
        ("ack_timeout_us", 0),
        ("ack_timeout_us", float("inf")),
        ("ack_timeout_us", 1e10),
        ("rnr_timer_us", 1e6),
        ("linger_us", -1),
        ("revoke_timeout_us", float("nan")),
    ],
)
def test_what_cannot_be_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^verbs\.{field}: "):
        VerbsConfig(secret=SECRET, **{field: value})


@given(st.floats(1, 4.096 * 2**31))
def test_the_time_out_is_rounded_up_and_never_for_ever(timeout_us: float) -> None:
    code = VerbsConfig(secret=SECRET, ack_timeout_us=timeout_us).ack_timeout_code
    assert 1 <= code <= 31
    assert 4.096 * 2**code >= timeout_us
    assert code == 1 or 4.096 * 2 ** (code - 1) < timeout_us


@given(st.floats(1, RNR_TIMERS_US[0]))
def test_the_receiver_s_timer_is_the_shortest_that_suffices(timer_us: float) -> None:
    chosen_us = RNR_TIMERS_US[VerbsConfig(secret=SECRET, rnr_timer_us=timer_us).rnr_timer_code]
    assert chosen_us == min(duration_us for duration_us in RNR_TIMERS_US if duration_us >= timer_us)


def test_a_binding_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="'libfabric' is no binding; choose one of auto, pyverbs, ibverbs"):
        load_binding("libfabric")


def test_without_any_binding_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in ("pyverbs", "ibverbs"):
        for module in [one for one in sys.modules if one == name or one.startswith(name + ".")]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.delitem(sys.modules, f"afore.transport.verbs.binding_{name}", raising=False)
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        HostError, match=r"none can be imported \(pyverbs: .*; ibverbs: .*python3-pyverbs.*afore\[rdma\]"
    ):
        load_binding("auto")
