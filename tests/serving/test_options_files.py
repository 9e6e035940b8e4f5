"""Files and options that cannot be: each refused in one line that names the field, without Python's names for types."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from afore.core.errors import ConfigError
from afore.core.version import VERSION
from afore.serving import files
from afore.serving.files import _first_key_twice
from afore.serving.options import given_keys, parse, prepared


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
        (b"fabric: quark\n", ["topology.fabric", "one of auto, shm, tcp, verbs, loopback"]),
        (b"? [a]\n: b\n", ["key that is no plain text", "line 1"]),
        (b"ffn: !!python/name:os.system\n", ["has a tag in line 1"]),
        (b"ffn: 1\n---\nffn: 2\n", ["second document from line 2"]),
        (b"ffn: " + b"1" * 5000 + b"\n", ["number of 5,000 digits"]),
        (b"a: &a [x, x]\nb: &b [*a, *a]\n", ["anchor or alias (a) in line 1"]),
        (b"<<: {ffn: 1}\n", ["key that is no plain text"]),
        (b'secret_file: "a\\0b"\n', ["topology.secret_file", "null character"]),
        (b"", ["is empty"]),
        (b"# nothing\n", ["holds no options"]),
        (b"[1, 2]\n", ["holds no options"]),
        (b"other.yaml\n", ["holds no options"]),
        (b"redundant_slots_per_worker: [" + b"1, " * 300_000 + b"1]\n", ["more than 4,096 entries", "line 1"]),
        (b"".join(b"k%d: 1\n" % n for n in range(50_000)), ["more than 4,096 entries"]),
        (b"redundant_slots_per_worker: [1, 1, 1, 99999999999999999999999]\n", ["per_worker", "from 0 to"]),
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
        (["--role", "door,door"], "role: door is given twice and a cluster has one; "),
        (["--role", "ffn,scheduler,scheduler"], "role: scheduler is given twice and a cluster has one; "),
        (["--role", "door", "--rank", "5"], "rank: door has rank 0 alone, not 5; "),
        (["--role", "ffn", "--rank", "1" * 30], "rank: "),
        (["--rendezvous", "127.0.0.1:" + "1" * 5000], "topology.rendezvous: '127.0.0.1:111"),
        (["--rendezvous", "a" * 70 + ":80"], "topology.rendezvous: 'aaaa"),
        (["--times.join_s", "1e300"], "times.join_s: it is above 2,592,000; "),
        (["--costs.copy_us", "1e300"], "costs.copy_us: it is above "),
        (["--device.emulate_copy_us", "1e300"], "device.emulate_copy_us: it is above "),
        (["--planner.tile_tokens", "1" * 25], "planner.tile_tokens: it is above "),
        (["--planner.worker_speed", "[1, 0.5]"], "planner.worker_speed: 2 numbers for 4 workers; "),
        (["--planner.worker_speed", "[1, 1, 0, 1]"], "planner.worker_speed: 0.0 for worker 2 is no speed; "),
        (["--planner.worker_speed", "[1, 1, .nan, 1]"], "planner.worker_speed: nan for worker 2 is no speed; "),
        (["--planner.worker_speed", "[1, 1, fast, 1]"], "planner.worker_speed: 'fast' is not a number; "),
        (["--planner.worker_speed", "2"], "planner.worker_speed: '2' is not a list, "),
        (
            ["--planner.worker_speed", "[1, 1, 1, 65]"],
            "planner.worker_speed: worker 3 is 65 times as fast as worker 0; ",
        ),
        (["--planner.compactness_share", "1.5"], "planner.compactness_share: it is above 1; "),
        (["--batch.max_waiting", "1" * 25], "batch.max_waiting: it is above "),
        (["--seed", "1" * 25], "seed: it lies beyond "),
        (["--max-new-tokens", "1" * 25], "max_new_tokens: "),
        (["--rendezvous", "here"], "topology.rendezvous: 'here' is no HOST:PORT; "),
    ],
)
def test_a_wrong_option_is_refused_by_name(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(arguments)
    assert str(refused.value).startswith(message)


def test_a_key_given_dotted_and_nested_is_given_twice(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    for text in ("topology.ffn: 3\ntopology:\n  ffn: 2\n", "topology:\n  ffn: 2\ntopology.ffn: 3\n"):
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"gives topology(\.ffn)? twice, again in line [23]"):
            parse(["--config", str(file)])
    file.write_text("topology.ffn: 3\ntopology:\n  attention: 1\n")
    with pytest.raises(ConfigError, match="gives topology twice, again in line 2"):
        parse(["--config", str(file)])


def test_a_null_character_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    for text, key in (('trace: "a\\0b"', "trace"), ('topology: "a\\0b"', "topology"), ('json: "a\\0b"', "json")):
        file.write_text(text + "\n")
        with pytest.raises(ConfigError) as refused:
            parse(["--config", str(file)])
        assert refused.value.field == key


def test_what_can_be_read_once_is_read_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for option, text in (("--config", "policy: static\ntopology:\n  ffn: 3\n"), ("--topology", "ffn: 3\n")):
        writer = threading.Thread(target=pipe.write_text, args=(text,), daemon=True)
        writer.start()
        arguments = prepared([option, str(pipe)])
        writer.join()
        assert parse(arguments)[1].topology.ffn == 3
        assert "topology.ffn" in given_keys(arguments)


@pytest.mark.parametrize("option", ["--config", "--topology"])
def test_a_pipe_without_a_writer_is_refused(tmp_path: Path, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PATIENCE_S", 0.01)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="a pipe or a device that has not ended within"):
        prepared([option, str(pipe)])
    # A writer that says nothing, or never ends.
    writer = os.open(pipe, os.O_RDWR)
    try:
        os.write(writer, b"ffn: 3\n")
        with pytest.raises(ConfigError, match="a pipe or a device that has not ended within"):
            prepared([option, str(pipe)])
    finally:
        os.close(writer)


def test_worker_speeds_are_a_list_on_the_command_line_and_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("planner:\n  worker_speed: [1, 1, 0.5, 2]\n  compactness_share: 0.25\n")
    for arguments in (["--planner.worker-speed", "[1, 1, .5, 2]"], ["--config", str(file)]):
        assert parse(arguments)[1].planner.worker_speed == (1.0, 1.0, 0.5, 2.0)
    assert parse(["--config", str(file)])[1].planner.compactness_share == 0.25
    assert parse([])[1].planner.worker_speed == ()


def test_a_duration_may_last_thirty_days() -> None:
    assert parse(["--times.join_s", str(30 * 86400)])[1].times.join_s == 30 * 86400


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
