"""What a cluster says of itself at the rendezvous, and what a role makes of it."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afore.core.config import RunConfig, ServeOptions
from afore.core.control import WIRE_VERSION
from afore.core.environment import SECRET as SECRET_NAME
from afore.core.environment import take_secret
from afore.core.errors import CheckpointError, ConfigError, HostError
from afore.core.topology import ROLES, Topology
from afore.serving.identity import ClusterIdentity, flat, model_digest, read_secret

CONFIG = RunConfig(topology=Topology(attention=1, ffn=2), serve=ServeOptions(api_key="hush"))
IDENTITY = ClusterIdentity(
    cluster="c",
    wire=WIRE_VERSION,
    nonce="n",
    host="h",
    node="",
    hub="hub",
    door_pid=7,
    counts={role: CONFIG.topology.count(role) for role in ROLES},
    config=flat(CONFIG),
    model=model_digest(CONFIG),
)
SECRET = b"sixteen bytes or more"


def test_it_comes_back_as_it_went_and_keeps_the_key_to_itself() -> None:
    document = IDENTITY.to_document(None)
    assert ClusterIdentity.from_document(document, "w", None) == IDENTITY
    assert "hush" not in document
    assert "sixteen" not in IDENTITY.to_document(SECRET)


def test_with_a_secret_only_what_is_proved_is_believed() -> None:
    assert ClusterIdentity.from_document(IDENTITY.to_document(SECRET), "w", SECRET) == IDENTITY
    for forged in (IDENTITY.to_document(None), IDENTITY.to_document(b"another secret, as long")):
        with pytest.raises(ConfigError, match="does not prove this secret"):
            ClusterIdentity.from_document(forged, "w", SECRET)
    changed = json.loads(IDENTITY.to_document(SECRET))
    changed["identity"] = changed["identity"].replace('"nonce": "n"', '"nonce": "m"')
    with pytest.raises(ConfigError, match="does not prove this secret"):
        ClusterIdentity.from_document(json.dumps(changed), "w", SECRET)


def test_another_wire_version_is_named() -> None:
    other = dataclasses.replace(IDENTITY, wire=WIRE_VERSION + 1)
    with pytest.raises(ConfigError, match=f"speaks wire version {WIRE_VERSION + 1}, this process {WIRE_VERSION}"):
        ClusterIdentity.from_document(other.to_document(None), "w", None)


@given(
    st.one_of(
        st.text(),
        st.recursive(
            st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
        ).map(json.dumps),
        st.dictionaries(st.sampled_from(["identity", "proof"]), st.text() | st.integers()).map(json.dumps),
        st.dictionaries(st.sampled_from(["wire", "cluster", "counts"]), st.just(WIRE_VERSION)).map(
            lambda fields: json.dumps({"identity": json.dumps(fields), "proof": ""})
        ),
    )
)
def test_whatever_else_stands_there_is_refused_in_one_line(document: str) -> None:
    with pytest.raises(ConfigError, match=r"is no cluster's identity|too long|wire version") as refused:
        ClusterIdentity.from_document(document, "w", None)
    assert "\n" not in str(refused.value)


def test_a_process_is_held_to_what_it_was_given_and_to_nothing_else() -> None:
    IDENTITY.check_joining(RunConfig(), frozenset(), "w")
    IDENTITY.check_joining(CONFIG, frozenset(flat(CONFIG)), "w")
    other = RunConfig(topology=Topology(ffn=3))
    with pytest.raises(ConfigError, match=r"^topology\.ffn: this process was given 3, .* runs with 2"):
        IDENTITY.check_joining(other, {"topology.ffn"}, "w")
    with pytest.raises(ConfigError, match=r"^policy: this process was given 'static'"):
        IDENTITY.check_joining(RunConfig(policy="static"), {"policy"}, "w")
    moved = RunConfig(topology=Topology(attention=1, ffn=2, rendezvous="127.0.0.1:1"))
    IDENTITY.check_joining(moved, {"topology.ffn", "topology.rendezvous", "serve.port"}, "w")


def test_another_model_is_refused_and_a_missing_one_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"^model: "):
        IDENTITY.check_joining(RunConfig(model=str(tmp_path)), {"model"}, "w")
    with pytest.raises(CheckpointError):
        model_digest(RunConfig(model=str(tmp_path / "none")))


def test_the_secret_of_the_environment_is_taken_out_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_NAME, "abc")
    assert take_secret() == "abc"
    assert SECRET_NAME not in os.environ
    assert take_secret() is None


def test_a_secret_is_long_and_nobody_elses_to_read(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    assert read_secret(None) is None
    with pytest.raises(ConfigError, match="cannot be read"):
        read_secret(str(file))
    file.write_bytes(SECRET + b"\n")
    file.chmod(0o644)
    with pytest.raises(HostError, match="chmod 600"):
        read_secret(str(file))
    file.chmod(0o600)
    assert read_secret(str(file)) == SECRET
    assert read_secret(None, SECRET.decode() + "\n") == read_secret(str(file), SECRET.decode()) == SECRET
    with pytest.raises(ConfigError, match=r"^AFORE_SECRET: it is another secret") as refused:
        read_secret(str(file), "x" * 40)
    assert "xx" not in str(refused.value)
    assert SECRET.decode() not in str(refused.value)
    with pytest.raises(ConfigError, match=r"^AFORE_SECRET: .* 3 bytes, 16 are the least"):
        read_secret(None, "abc")
    with pytest.raises(ConfigError, match="is no file"):
        read_secret(str(tmp_path))
    file.write_bytes(b"short")
    with pytest.raises(ConfigError, match="16 are the least"):
        read_secret(str(file))


@pytest.mark.parametrize(
    ("address", "problem"),
    [("127.0.0.1", "HOST:PORT"), ("127.0.0.1:0", "HOST:PORT"), ("x:y", "HOST:PORT"), ("0.0.0.0:5", "beyond")],
)
def test_an_address_that_cannot_be_is_refused(address: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Topology(rendezvous=address)
    assert Topology(rendezvous="0.0.0.0:5", rendezvous_remote=True, secret_file="s").rendezvous == "0.0.0.0:5"
    assert Topology(rendezvous="[::1]:5").rendezvous == "[::1]:5"
