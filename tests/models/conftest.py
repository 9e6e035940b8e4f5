"""What the model tests share: the bundled checkpoint, its reference, and no way to a network."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from afore.models.bundle import bundled_model_path, bundled_prompts
from afore.models.checkpoint import Checkpoint
from afore.models.reference import Reference, random_checkpoint
from afore.models.tokenizer import Tokenizer


@pytest.fixture(autouse=True, scope="session")
def one_torch_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a model must never look beyond its directory."""

    def refuse(*args: object) -> None:
        raise AssertionError(f"a connection was attempted: {args[1:]}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="session")
def bundled() -> Iterator[Checkpoint]:
    with Checkpoint(bundled_model_path()) as checkpoint:
        yield checkpoint


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(bundled_model_path())


@pytest.fixture(scope="session")
def bundled_reference() -> Reference:
    return Reference(bundled_model_path())


@pytest.fixture(scope="session")
def prompts_ids(tokenizer: Tokenizer) -> list[list[int]]:
    """The bundled prompts, short and long alternating."""
    return [tokenizer.encode(prompt.prompt) for prompt in bundled_prompts()]


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint in several shards, with a multi-token-prediction layer. Tests must not change it."""
    directory = tmp_path_factory.mktemp("random-model")
    return random_checkpoint(directory, seed=3, max_shard_size="150KB", mtp_layer=True)
