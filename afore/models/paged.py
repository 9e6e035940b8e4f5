"""The paged cache behind ``transformers``' ``Cache.update``, for one decode step of one microbatch.

``update`` receives this step's keys and values [T, heads, 1, dim], writes them into their slots, and returns all positions of every
row, gathered as [T, heads, Lmax, dim]. Positions past a row's own are masked; they point at that row's first slot, so that what
is gathered for them is always a finite number (0 · NaN would spoil the sum).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import Cache

from afore.models.kv import KEYS, VALUES, KVStorage

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepSlots:
    """Where a step's rows write and read, the same in every layer."""

    write_T: torch.Tensor
    """Slot of each row's new token, int64 [T]."""
    read_X: torch.Tensor
    """Slots of every row's positions 0…Lmax-1, flat int64 [T · Lmax]."""
    positions_T: I64
    """Position of each row's new token."""
    longest: int
    """Lmax."""

    def on(self, device: torch.device) -> StepSlots:
        """The same on another device."""
        if device.type == "cpu":
            return self
        write_T, read_X = (slots.to(device, non_blocking=True) for slots in (self.write_T, self.read_X))
        return StepSlots(write_T, read_X, self.positions_T, self.longest)

    def mask(self, window: int | None = None) -> torch.Tensor | None:
        """True where a row may look, bool [T, 1, 1, Lmax]; ``None`` when all rows are equally long and nothing is hidden.

        ``window``: a row sees its last so many positions, its own among them; ``None``: all of them.
        """
        positions_T1, all_L = self.positions_T[:, None], np.arange(self.longest)
        visible_TL = all_L <= positions_T1
        if window is not None:
            visible_TL &= all_L > positions_T1 - window
        return None if visible_TL.all() else torch.from_numpy(visible_TL)[:, None, None, :]


def step_slots(block_tokens: int, block_tables_TB: I32, positions_T: I64) -> StepSlots:
    """Slots of a step: row t is at ``positions_T[t]``, its blocks are ``block_tables_TB[t]`` (the rest is padding).

    Vectorised: computed once a step in tens of microseconds.
    """
    longest = int(positions_T.max()) + 1
    num_blocks = -(-longest // block_tokens)
    assert block_tables_TB.shape[1] >= num_blocks, f"{block_tables_TB.shape[1]} blocks for {longest} positions"
    first_slots_TB = block_tables_TB[:, :num_blocks].astype(np.int64) * block_tokens
    slots_TL = (first_slots_TB[:, :, None] + np.arange(block_tokens)).reshape(len(positions_T), -1)[:, :longest]
    write_T = slots_TL[np.arange(len(positions_T)), positions_T]
    visible_TL = np.arange(longest) <= positions_T[:, None]
    if not visible_TL.all():
        slots_TL = np.where(visible_TL, slots_TL, slots_TL[:, :1])
    read_X = torch.from_numpy(np.ascontiguousarray(slots_TL).reshape(-1))
    return StepSlots(torch.from_numpy(np.ascontiguousarray(write_T)), read_X, positions_T, longest)


class PagedCache(Cache):
    """One step's view of a ``KVStorage``; made anew for every step, since microbatches interleave on one storage."""

    def __init__(self, storage: KVStorage, slots: StepSlots) -> None:
        super().__init__(layers=[])
        self._storage = storage
        self._slots = slots

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes this step's [T, heads, 1, dim] and returns keys and values [T, heads, Lmax, dim] of every row."""
        planes = self._storage.planes[layer_idx]
        return self._through(planes[KEYS], key_states), self._through(planes[VALUES], value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions that are cached before this step, of the longest row."""
        return self._slots.longest - 1

    def _through(self, plane: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        rows, heads, one, dim = states.shape
        assert one == 1, f"{one} tokens a row: this cache serves decode steps"
        plane.index_copy_(0, self._slots.write_T, states.reshape(rows, heads * dim).to(plane.dtype))
        gathered = plane.index_select(0, self._slots.read_X).view(rows, self._slots.longest, heads, dim)
        return gathered.transpose(1, 2).to(states.dtype)
