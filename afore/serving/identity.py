"""What a cluster says of itself at its rendezvous, and how a role that was started by hand tells whether it is the one it means.

The rendezvous is not authenticated and holds nothing secret: names, numbers, configuration without the HTTP key. Whoever can
reach it can read and forge it, so what it says is only where to knock; channels then prove the run's secret to each other. With
a secret file the document carries a proof (HMAC-SHA256) besides, checked before any of it is believed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import stat
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afore.core.config import RunConfig, ServeOptions
from afore.core.control import WIRE_VERSION
from afore.core.environment import SECRET
from afore.core.errors import CheckpointError, ConfigError, HostError
from afore.core.topology import ROLES
from afore.serving.spec import checkpoint_path

DOCUMENT_LIMIT = 64 << 10
"""Bytes of an identity; a longer one is not ours."""
SECRET_LEAST = 16
"""Bytes that a shared secret has at least."""
OWN = (
    "serve",
    "times",
    "record_wire",
    "verbs",
    "topology.rendezvous",
    "topology.rendezvous_remote",
    "topology.secret_file",
    "topology.node",
    "topology.listen",
)
"""Keys in which a process may differ from the cluster it joins; below them, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterIdentity:
    """One run of one cluster."""

    cluster: str
    """Its name on its machine: where its endpoints lie."""
    wire: int
    """The version of messages and records that it speaks."""
    nonce: str
    """Of this run of it: a rank that was taken in an earlier run is not taken in this one."""
    host: str
    """The machine (its boot id): ``shm`` reaches no other."""
    node: str
    """The door's node, where the cluster may be on several; empty: it is on this machine alone."""
    hub: str
    """Where the hub is dialled."""
    door_pid: int
    counts: dict[str, int]
    """How many ranks each role has."""
    config: dict[str, Any]
    """What it runs, by dotted key, without what belongs to the door alone."""
    model: str
    """Digest of the model (``model_digest``)."""

    def to_document(self, secret: bytes | None) -> str:
        """What is published: JSON, with a proof where there is a secret."""
        body = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return json.dumps({"identity": body, "proof": _proof(body, secret)})

    @classmethod
    def from_document(cls, document: str, where: str, secret: bytes | None) -> ClusterIdentity:
        """Raises ``ConfigError`` for what is no identity, of another wire version, or not proved with ``secret``."""
        remedy = "is something else's store at that address? give another --rendezvous"
        if len(document) > DOCUMENT_LIMIT:
            raise ConfigError("rendezvous", f"what {where} says is too long to be a cluster's", remedy)
        try:
            outer = json.loads(document)
            body, proof = outer["identity"], outer["proof"]
            if not isinstance(body, str) or not isinstance(proof, str):
                raise TypeError
            fields = json.loads(body)
            wire = fields["wire"]
            if wire != WIRE_VERSION:
                raise ConfigError(
                    "rendezvous",
                    f"the cluster at {where} speaks wire version {wire!r}, this process {WIRE_VERSION}",
                    "run one version of AFORE everywhere",
                )
            identity = cls(**fields)
            for field in dataclasses.fields(cls):
                expected = {"str": str, "int": int}.get(str(field.type), dict)
                if type(getattr(identity, field.name)) is not expected:
                    raise TypeError(field.name)
            if set(identity.counts) != set(ROLES) or not all(type(n) is int for n in identity.counts.values()):
                raise TypeError("counts")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError("rendezvous", f"what {where} says is no cluster's identity", remedy) from None
        if secret is not None and not hmac.compare_digest(proof, _proof(body, secret)):
            raise ConfigError(
                "topology.secret_file",
                f"the cluster at {where} does not prove this secret",
                "give door and roles the same file",
            )
        return identity

    def check_joining(self, config: RunConfig, given: Collection[str], where: str) -> None:
        """Refuses a process that was given something else than the cluster runs. Raises ``ConfigError`` naming the field.

        ``given`` are the dotted keys that were given to it: what it was not told, it is sent by the door.
        """
        mine = flat(config)
        for key, theirs in self.config.items():
            if key in given and key in mine and mine[key] != theirs:
                raise ConfigError(
                    key,
                    f"this process was given {mine[key]!r}, the cluster at {where} runs with {theirs!r}",
                    "give every process the same topology file, or leave it to the door",
                )
        if "model" in given and model_digest(config) != self.model:
            raise ConfigError(
                "model",
                f"{checkpoint_path(config)} is not the model of the cluster at {where}",
                "give every process the same model, or leave it to the door",
            )


def flat(config: RunConfig) -> dict[str, Any]:
    """Every value by dotted key, as JSON has it, without what is the process's own; the model is told by its digest instead."""

    def walk(value: Any, prefix: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for field in dataclasses.fields(value):
            key, inner = prefix + field.name, getattr(value, field.name)
            if key in OWN or key == "model":
                continue
            if dataclasses.is_dataclass(inner):
                values.update(walk(inner, key + "."))
            else:
                values[key] = list(inner) if isinstance(inner, tuple) else inner
        return values

    return walk(dataclasses.replace(config, serve=ServeOptions()), "")


def model_digest(config: RunConfig) -> str:
    """Tells models apart: SHA-256 of config.json, and of each weight file's name and size. Raises ``CheckpointError``."""
    path = checkpoint_path(config)
    digest = hashlib.sha256()
    try:
        digest.update((path / "config.json").read_bytes())
        for file in sorted(path.glob("*.safetensors")):
            digest.update(f"\0{file.name}\0{file.stat().st_size}".encode())
    except OSError as error:
        raise CheckpointError(str(path), f"cannot be read: {error.strerror}", "give a model directory") from error
    return digest.hexdigest()


def read_secret(path: str | None, given: str | None = None) -> bytes | None:
    """The shared secret: of the file, or ``given``, which is what the environment gives; none without either.

    Raises ``ConfigError`` (none can be read, it is too short, both are there and differ), ``HostError`` for a file that others
    may read. No message holds any of it.
    """
    from_environment = None if given is None else _long_enough(given.encode(errors="surrogateescape"), SECRET, SECRET)
    if path is None:
        return from_environment
    field = "topology.secret_file"
    file = Path(path)
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(field, f"{path} is no file", "give a file, or the secret itself as AFORE_SECRET")
        raw = file.read_bytes()
    except OSError as error:
        raise ConfigError(field, f"{path} cannot be read: {error.strerror}", "give a file") from error
    except ValueError as error:
        raise ConfigError(field, f"{path!r} is no path: {error}", "give a file") from error
    if status.st_mode & 0o077:
        raise HostError(path, "other users may read this secret", f"chmod 600 {path}")
    secret = _long_enough(raw, field, path)
    if from_environment is not None and not hmac.compare_digest(from_environment, secret):
        raise ConfigError(SECRET, f"it is another secret than that in {path}", "give one of the two")
    return secret


def _long_enough(raw: bytes, field: str, where: str) -> bytes:
    secret = raw.strip()
    if len(secret) < SECRET_LEAST:
        raise ConfigError(
            field,
            f"{where} holds {len(secret)} bytes, {SECRET_LEAST} are the least",
            "make one: (umask 077; python -c 'import secrets; print(secrets.token_hex(32))' > FILE)",
        )
    return secret


def _proof(body: str, secret: bytes | None) -> str:
    return "" if secret is None else hmac.new(secret, b"afore rendezvous\0" + body.encode(), hashlib.sha256).hexdigest()
