"""What runs on a GPU for a target, and which implementation of it: compiled by Triton, or torch's own operations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from afore.core.errors import ConfigError, HostError
from afore.models.expert_form import ExpertForm
from afore.workers.device.cuda import experts_torch, partition_torch
from afore.workers.device.cuda.demand_check import CrcTable
from afore.workers.device.cuda.memory import DeviceMemory

if TYPE_CHECKING:
    from afore.workers.device.cuda.choice import Choice

TILES = (16, 32, 64, 128)
"""What a tile may be: the sizes that tensor cores take."""
NARROW = (32, 32)
"""Blocks of kernels for targets of few tiles, which then keep more of the GPU busy."""
TORCH = "torch"
"""The way that is everywhere."""
GROUPED_CAPABILITY = (8, 0)
"""From where torch has a grouped product for bfloat16 that does not stop the host."""


class Launch(Protocol):
    """A function that enqueues on torch's current stream."""

    def __call__(self, *args: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to compute a target."""

    name: str
    partition: Launch
    """As ``partition_kernel.launch``."""
    experts: Launch
    """As ``experts_kernel.launch``."""


def torch_implementation() -> Implementation:
    """By torch's operations: everywhere."""
    return Implementation(TORCH, partition_torch.launch, experts_torch.launch)


def triton_implementation(blocks: tuple[int, int] | None = None) -> Implementation:
    """By our own kernels. ``blocks``: width and depth of theirs, by default as the weights' type suggests.

    Raises ``HostError`` where Triton is not installed.
    """
    if missing := triton_missing():
        raise HostError(
            "GPU", missing, "install torch for CUDA, which brings triton along, or use --device.kernels torch"
        )
    from afore.workers.device.cuda import experts_kernel, partition_kernel

    if blocks is None:
        return Implementation("triton", partition_kernel.launch, experts_kernel.launch)
    launch = partial(experts_kernel.launch, blocks=blocks)
    return Implementation(f"triton-{blocks[0]}x{blocks[1]}", partition_kernel.launch, launch)


def grouped_implementation() -> Implementation:
    """Our partition, and torch's grouped product. Raises ``HostError`` where Triton is not installed."""
    return Implementation("grouped", triton_implementation().partition, experts_torch.launch)


def triton_missing() -> str:
    """Why our own kernels cannot be had; empty where they can. What they need of Triton is asked for, not its version."""
    try:
        from afore.workers.device.cuda import experts_kernel, partition_kernel
    except ImportError as error:
        return "the package triton is not installed" if error.name == "triton" else f"triton cannot be used: {error}"
    except Exception as error:  # the compiler looks at our source, and another release may not take it
        return f"triton does not take our kernels: {type(error).__name__}: {' '.join(str(error).split())}"
    del experts_kernel, partition_kernel
    return ""


def applicable(
    dtype: torch.dtype, capability: tuple[int, int] = (0, 0), widths: tuple[int, ...] = ()
) -> list[Implementation]:
    """What computes experts of ``dtype``, best guess first: without stopping the host, unless there is nothing but torch.

    torch's grouped product wants bfloat16, and rows of 16 bytes' multiples (``widths``: hidden and expert size).
    """
    if triton_missing():
        return [torch_implementation()]
    found = [triton_implementation()]
    if (
        dtype is torch.bfloat16
        and capability >= GROUPED_CAPABILITY
        and all(width * dtype.itemsize % 16 == 0 for width in widths)
    ):
        found.append(grouped_implementation())
    return found


def ways_of(
    name: str, dtype: torch.dtype, capability: tuple[int, int], widths: tuple[int, ...]
) -> list[Implementation]:
    """The ways that ``device.kernels`` names: one, or with ``auto`` all that apply. Raises ``HostError``."""
    if name == TORCH:
        return [torch_implementation()]
    if name == "grouped":
        return [grouped_implementation()]
    if name == "triton":
        return [triton_implementation()]
    ways = applicable(dtype, capability, widths)
    return ways if triton_missing() else [*ways, triton_implementation(NARROW)]


def check_tile(tile_tokens: int) -> None:
    """Refuses a tile that no kernel has. Raises ``ConfigError``."""
    if tile_tokens not in TILES:
        raise ConfigError(
            "planner.tile_tokens",
            f"{tile_tokens} is no tile of a GPU, which takes {', '.join(map(str, TILES))}",
            "add --planner.tile_tokens 64",
        )


class CudaKernels:
    """A worker's kernels, for one model. Everything is enqueued on torch's current stream; nothing waits."""

    def __init__(
        self,
        implementation: Implementation,
        memory: DeviceMemory,
        *,
        num_experts: int,
        most_places: int,
        hidden_size: int,
        expert_size: int,
        dtype: torch.dtype,
        tile_tokens: int,
    ) -> None:
        """``most_places``: tokens times choices of the largest target. Targets run one after another: scratch is shared."""
        check_tile(tile_tokens)
        self.implementation = implementation
        self.ways: dict[str, Implementation] = {implementation.name: implementation}
        """By name: what ``choice`` speaks of."""
        self.choice: Choice | None = None
        """Which way computes targets of which size; none: ``implementation`` computes all."""
        self.num_experts = num_experts
        self._tile_tokens = tile_tokens
        self.most_places = most_places
        table = CrcTable.of(num_experts)
        self._zero_crc = table.zero
        self._words_EB = torch.from_numpy(table.words_EB).to(memory.torch_device)
        place = memory.torch_device
        self._act_PI = torch.zeros((most_places, expert_size), dtype=dtype, device=place)
        self._y_PD = torch.zeros((most_places, hidden_size), dtype=torch.float32, device=place)

    def use(self, implementation: Implementation) -> None:
        """Computes all targets by it."""
        self.implementation, self.choice = implementation, None
        self.ways = {implementation.name: implementation}

    def partition(
        self, ids_TK: Any, plan_X: Any, num_rows: int, first_redundant: int, pair_P: Any, place_P: Any, summary_X: Any
    ) -> None:
        """Exact share by ``plan_X`` (``pair_plan.fill_plan``); see ``partition_kernel.partition_places`` for what it fills."""
        self.implementation.partition(
            ids_TK,
            plan_X,
            self._words_EB,
            self._zero_crc,
            self.num_experts,
            num_rows,
            first_redundant,
            pair_P,
            place_P,
            summary_X,
        )

    def grouped_mlp(
        self,
        hidden_TD: Any,
        weight_TK: Any,
        pair_P: Any,
        place_P: Any,
        start_S1: Any,
        gate_up_SFD: Any,
        down_SDI: Any,
        biases: tuple[Any, Any] | None,
        out_TD: Any,
        form: ExpertForm,
    ) -> None:
        """out[t] = weighted sum of the token's pairs here through their experts."""
        way = self.implementation
        if self.choice is not None:
            way = self.ways[self.choice.name(weight_TK.numel())]
        way.experts(
            hidden_TD,
            weight_TK,
            pair_P,
            place_P,
            start_S1,
            gate_up_SFD,
            down_SDI,
            biases,
            self._act_PI,
            self._y_PD,
            out_TD,
            form,
            self._tile_tokens,
        )
