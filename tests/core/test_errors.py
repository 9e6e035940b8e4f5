"""What errors say: who, what, and one remedy, each once."""

from __future__ import annotations

from pathlib import Path

import pytest

from afore.core.errors import ClusterLate, ClusterLost, PeerLost, RoleLost, TransportError, why_not


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
