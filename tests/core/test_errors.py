"""What errors say: who, what, and one remedy, each once."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from afore.core import errors
from afore.core.errors import (
    AforeError,
    ClusterLate,
    ClusterLost,
    ConfigError,
    DeviceError,
    HostError,
    PeerLost,
    RoleLost,
    TransportError,
    why_not,
)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (PeerLost("10.0.0.1:5", "it is gone", "dial again"), "peer 10.0.0.1:5: it is gone; dial again"),
        (
            RoleLost("ffn-1", "its process ended (pid 842)"),
            "ffn-1: its process ended (pid 842); start the cluster again",
        ),
        (ClusterLate("lonely", "it does not serve after 2 s"), "cluster lonely: it does not serve after 2 s"),
        (ClusterLost("lonely", "it ended", "start its door again"), "cluster lonely: it ended; start its door again"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_message_says_who_in_the_words_of_its_kind(error: TransportError, text: str) -> None:
    assert str(error) == text


def test_why_a_file_cannot_be_read_names_it_no_second_time(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="missing") as raised:
        (tmp_path / "missing").read_bytes()
    assert why_not(raised.value) == "No such file or directory"
    assert why_not(ValueError("not UTF-8")) == "not UTF-8"


@pytest.mark.parametrize(
    "error",
    [
        AforeError("something"),
        ConfigError("batch.rows", "0 is none", "give more"),
        HostError("/dev/shm", "is full", "make room"),
        RoleLost("ffn-1", "its process ended (pid 842)"),
        DeviceError("ffn-1", "copy of target 3", "out of memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_is_whole_after_a_way_between_processes(error: AforeError) -> None:
    again = copy.copy(error)  # by the same way as pickling
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert again.__dict__ == error.__dict__


def test_every_kind_of_error_can_go_between_processes() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, AforeError)]
    assert len(kinds) > 20
    for kind in kinds:
        error = kind.__new__(kind)
        error.args, error.__dict__["peer"] = ("who: what; remedy",), "who"
        again = copy.copy(error)  # by the same way as pickling
        assert (type(again), again.args, again.__dict__) == (kind, error.args, error.__dict__)
