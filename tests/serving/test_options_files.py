"""Files and options that cannot be: each refused in one line that names the field, without Python's names for types."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from afore.core.errors import ConfigError
from afore.core.version import VERSION
from afore.serving.files import _first_key_twice
from afore.serving.options import given_keys, parse


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"attention: 1\nffn: 2\nattention: 2\n", ["gives attention twice", "line 3"]),
        (b"\xef\xbb\xbfattention: 1\n", ["byte order mark"]),
        (b"attention: \xff\n", ["not UTF-8"]),
        (b"attention: [1\n", ["is not YAML"]),
        (b"a: " + b"[" * 3000 + b"]" * 3000, ["nested deeper"]),
        (b"a: " + b"[" * 100_000, ["nested deeper"]),
        (b"x" * (2 << 20), ["longer than"]),
        (b"attentoin: 1\n", ["attentoin", "did you mean topology.attention"]),
        (b"attention: many\n", ["topology.attention", "'many' is not a whole number"]),
        (b"fabric: quark\n", ["topology.fabric", "one of auto, shm, loopback"]),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else value[0],
)
def test_a_broken_topology_file_is_refused_in_one_line(tmp_path: Path, content: bytes, words: list[str]) -> None:
    file = tmp_path / "topology.yaml"
    file.write_bytes(content)
    run = tmp_path / "run.yaml"
    run.write_text("topology: topology.yaml\n")
    for arguments in (["--topology", str(file)], [f"--topology={file}"], ["--config", str(run)]):
        with pytest.raises(ConfigError) as refused:
            parse(arguments)
        message = str(refused.value)
        assert message.startswith("topology")
        assert "\n" not in message
        assert len(message) < 400
        for word in words:
            assert word in message
        for name in ("typing", "<class", "Traceback", "NoneType"):
            assert name not in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology", "/nonexistent.yaml"], "topology: /nonexistent.yaml does not exist; "),
        (["--config", "/"], "config: / is a directory; "),
        (["--ffn", "3"], "ffn: no such option; did you mean --topology.ffn 3?"),
        (["--log", "loud"], "log: 'loud' is not one of error, warning, info, debug; "),
        (["--rank", "x"], "rank: 'x' is not a whole number or null; "),
        (["--serve.max_body_bytes", "x"], "serve.max_body_bytes: 'x' is not a whole number; "),
        (["--times.join_s", "x"], "times.join_s: 'x' is not a number; "),
        (["--rendezvous", "here"], "topology.rendezvous: 'here' is no HOST:PORT; "),
    ],
)
def test_a_wrong_option_is_refused_by_name(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(arguments)
    assert str(refused.value).startswith(message)


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"afore {VERSION}\n"


def test_what_was_given_is_told_from_what_is_the_default(tmp_path: Path) -> None:
    assert given_keys(["--role", "ffn", "--port", "1"]) == {"serve.port"}
    assert given_keys(["--topology.ffn", "4", "--policy", "afore"]) == {"topology.ffn", "policy"}
    file = tmp_path / "topology.yaml"
    file.write_text("ffn: 4\n")
    assert {"topology.ffn", "topology.attention"} <= given_keys(["--topology", str(file)])
    run = tmp_path / "run.yaml"
    run.write_text("topology: topology.yaml\nbatch:\n  max_num_seqs: 8\n")
    assert {"topology.attention", "batch.max_num_seqs"} <= given_keys(["--config", str(run)])
    assert "batch.block_tokens" not in given_keys(["--config", str(run)])


documents = st.recursive(
    st.integers() | st.text("ab", max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", min_size=1, max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(documents)
def test_no_key_of_a_sound_document_counts_as_given_twice(document: object) -> None:
    assert _first_key_twice(yaml.safe_dump(document)) is None
