"""What a role process is told to become. Light to import: the supervisor starts its fork server before anything heavy is loaded."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afore.core.config import RunConfig
from afore.core.wire import Codec
from afore.models.bundle import bundled_model_path

HUB_ADDRESS = "hub"
_CODEC = Codec((RunConfig,))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """What a process must know to become its roles."""

    name: str
    """``ffn-2``, or several joined by ``+``."""
    cluster: str
    """Name of the local cluster."""
    roles: tuple[tuple[str, int], ...]
    """(role, rank)."""
    run_directory: str
    """Where the cluster's endpoints and secret are."""
    log_level: str
    config: RunConfig
    """Only the door's is used; everybody else is sent it."""

    def to_json(self) -> dict[str, Any]:
        """Plain data for the zygote."""
        return {**dataclasses.asdict(self), "config": config_to_json(self.config)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ProcessSpec:
        """The inverse of ``to_json``."""
        config = config_from_json(data["config"])
        return cls(**{**data, "roles": tuple((role, rank) for role, rank in data["roles"]), "config": config})


def checkpoint_path(config: RunConfig) -> Path:
    """The model's directory."""
    return Path(config.model) if config.model is not None else bundled_model_path()


def model_name(config: RunConfig) -> str:
    """What clients call the model: the given name, or that of its directory."""
    return config.serve.served_model_name or checkpoint_path(config).resolve().name


def config_to_json(config: RunConfig) -> dict[str, Any]:
    """Plain data."""
    return _CODEC.to_wire(config)


def config_from_json(data: dict[str, Any]) -> RunConfig:
    """The inverse of ``config_to_json``."""
    config = _CODEC.from_wire(data)
    assert isinstance(config, RunConfig)
    return config
