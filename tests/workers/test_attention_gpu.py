"""Attention and prefill roles on a GPU, over the strict driver: the tokens of transformers, whichever way rows go to FFN workers.

Everything between the engine and the experts is the product's: streams, pinned memory, the demand that the device counts, the way
of a prompt's cache, handles of rows, and replies that lie in GPU memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from contextlib import AsyncExitStack

import pytest
import torch

from afore.core.config import DeviceOptions, RunConfig
from afore.models.loading import LoadedModel
from afore.transport.exchange import ExchangeLayout
from afore.transport.session import Directory, RoleContext
from afore.workers.attention import AttentionWeights
from afore.workers.attention_gpu import GpuAttentionWeights
from afore.workers.checkpoint_models import (
    AttentionForGpu,
    CheckpointModels,
    LoadedAttention,
    LoadedPrefill,
    PrefillForGpu,
)
from afore.workers.device.cuda.driver import Driver
from afore.workers.device.cuda.memory import DeviceMemory
from afore.workers.device.cuda.places import ROWS
from afore.workers.gpu_place import GpuPlace
from afore.workers.gpu_rows import OpenedRows
from afore.workers.prefill import PrefillWeights
from afore.workers.prefill_gpu import GpuPrefillWeights
from tests.workers.attention_rig import Rig, decode_all
from tests.workers.device.cuda.fake_driver import FakeCalls
from tests.workers.device.cuda.fake_machine import Machine
from tests.workers.plain_experts import ExpertsOfCheckpoint
from tests.workers.test_attention import NEW_TOKENS, SEATS, expected, experts, make_config, prompts

__all__ = ["expected", "experts", "prompts"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class FakePlace:
    """Processes of one machine, one for each role."""

    def __init__(self) -> None:
        self.machine = Machine()
        self.calls: dict[str, FakeCalls] = {}

    def driver(self, name: str) -> Driver:
        self.calls[name] = FakeCalls(self.machine)
        return Driver(self.calls[name], name=name)

    def open(self, ctx: RoleContext, stack: AsyncExitStack) -> GpuPlace:
        place = GpuPlace(
            self.driver(ctx.name),
            ctx.clock,
            name=ctx.name,
            ordinal=0,
            on_gpu=False,
            current=lambda handle: contextlib.nullcontext(),
            process=len(self.calls),
        )
        stack.callback(place.close)
        return place


@dataclasses.dataclass(frozen=True, slots=True)
class FakeAttention(AttentionForGpu):
    where: FakePlace

    def place(self, ctx: RoleContext, stack: AsyncExitStack) -> AttentionWeights:
        return GpuAttentionWeights(self.loaded, self.where.open(ctx, stack), self.nbytes, self.tensors)


@dataclasses.dataclass(frozen=True, slots=True)
class FakePrefill(PrefillForGpu):
    where: FakePlace

    def place(self, ctx: RoleContext, stack: AsyncExitStack) -> PrefillWeights:
        return GpuPrefillWeights(self.loaded, self.where.open(ctx, stack), self.nbytes, self.tensors)


class FakeModels(CheckpointModels):
    """The bundled model for a GPU that is not there."""

    def __init__(self, where: FakePlace) -> None:
        self._where = where

    def load_attention(self, config: RunConfig, rank: int) -> LoadedAttention | AttentionForGpu:
        found = super().load_attention(config, rank)
        assert isinstance(found, AttentionForGpu)
        return FakeAttention(found.loaded, found.nbytes, found.tensors, self._where)

    def load_prefill(self, config: RunConfig) -> LoadedPrefill | PrefillForGpu:
        found = super().load_prefill(config)
        assert isinstance(found, PrefillForGpu)
        return FakePrefill(found.loaded, found.nbytes, found.tensors, self._where)


class GpuRig(Rig):
    """FFN workers that open the attention workers' rows, each in a process of its own to the driver."""

    def __init__(self, config: RunConfig, experts: ExpertsOfCheckpoint, where: FakePlace) -> None:
        super().__init__(config, experts, world=FakeModels(where))
        self._where = where
        self.opened: list[OpenedRows] = []

    def open_rows(self, ctx: RoleContext, directory: Directory, a: int, layout: ExchangeLayout) -> OpenedRows | None:
        if ROWS not in directory.keys["attention", a]:
            return None
        driver = self._where.driver(f"{ctx.name} of {a}")
        buffer = ctx.fabric.map(directory.key("attention", a, ROWS)).buffer
        opened = OpenedRows(driver, DeviceMemory(driver, None), layout, a, buffer, process=900)
        self.opened.append(opened)
        return opened

    async def __aexit__(self, *exc: object) -> None:
        for opened in self.opened:
            opened.close()
        await super().__aexit__(*exc)


def on_gpus(name: str) -> RunConfig:
    config = make_config()
    return dataclasses.replace(config, device=DeviceOptions(name="cuda" if name == "ipc" else "cpu", attention="cuda"))


@pytest.mark.parametrize("name", ["ipc", "through the host"])
async def test_tokens_are_those_of_transformers(
    name: str, experts: ExpertsOfCheckpoint, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    where = FakePlace()
    rig = GpuRig(on_gpus(name), experts, where)
    async with rig:
        assert await decode_all(rig, prompts, SEATS, NEW_TOKENS) == expected
    assert len(rig.opened) == (6 if name == "ipc" else 0), "three FFN workers open two attention workers' rows"
    assert set(where.calls) >= {"attention-0", "attention-1", "prefill-0"}
    for calls in where.calls.values():
        assert calls.mistakes == []
        assert set(calls.live.values()) == {0}, calls.live


def test_weights_say_where_they_are() -> None:
    loaded: LoadedModel = None  # type: ignore[assignment]  # nobody looks at it
    with pytest.raises(AssertionError, match="place it first"):
        _ = PrefillForGpu(loaded, 0, 0).model
