"""One target on a GPU: where its rows lie there, what is computed of them, and what comes back to the host about it.

Ids, counts and weights come to the GPU once and stay there. What goes up with a target is its plan, a few hundred bytes; what comes
down beside the rows is the summary of the partition, from pinned to pinned memory, read when the target is done.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from afore.core.errors import WireError
from afore.core.plan import PlanEntry
from afore.workers.device.base import I32, Pairs
from afore.workers.device.cuda.driver import Driver, Span
from afore.workers.device.cuda.kernels import CudaKernels
from afore.workers.device.cuda.memory import DeviceMemory, address_of
from afore.workers.device.cuda.pair_plan import fill_plan, plan_words
from afore.workers.experts import Store
from afore.workers.flight import TargetCompute
from afore.workers.staging import Staging

_NOTHING: I32 = np.zeros(0, dtype=np.int32)


class CudaStaging(Staging):
    """One microbatch's buffers on the GPU, with the host's pinned ends of them."""

    __slots__ = (
        "device_hidden_TD",
        "device_ids_TK",
        "device_out_TD",
        "device_weights_TK",
        "hidden_now_TD",
        "ids_now_TK",
        "out_now_TD",
        "pair_P",
        "place_P",
        "plan_X",
        "plan_host_X",
        "summary_X",
        "summary_host_X",
        "tokens",
        "weights_now_TK",
    )

    def __init__(
        self,
        memory: DeviceMemory,
        *,
        max_tokens: int,
        hidden_size: int,
        top_k: int,
        num_rows: int,
        num_experts: int,
    ) -> None:
        super().__init__(max_tokens=1, hidden_size=1, top_k=1, num_rows=num_rows)
        places = max_tokens * top_k
        self.tokens = 0
        """Rows of the current target."""
        self.device_hidden_TD = memory.tensor((max_tokens, hidden_size), torch.float32)
        self.device_ids_TK = memory.tensor((max_tokens, top_k), torch.int32)
        self.device_weights_TK = memory.tensor((max_tokens, top_k), torch.float32)
        self.device_out_TD = memory.tensor((max_tokens, hidden_size), torch.float32)
        self.hidden_now_TD: torch.Tensor
        self.ids_now_TK: torch.Tensor
        self.weights_now_TK: torch.Tensor
        self.out_now_TD: torch.Tensor
        self.use_room(0)
        self.pair_P = memory.tensor((places,), torch.int32).zero_()
        self.place_P = memory.tensor((places,), torch.int32).fill_(-1)
        self.plan_X = memory.tensor((plan_words(num_experts),), torch.int32)
        self.plan_host_X: I32 = memory.pinned((plan_words(num_experts),), np.int32)
        self.summary_X = memory.tensor((num_rows + 3,), torch.int32)
        self.summary_host_X: I32 = memory.pinned((num_rows + 3,), np.int32)
        start_S1: I32 = self.summary_host_X[: num_rows + 1]
        self.pairs = Pairs(token_P=_NOTHING, k_P=_NOTHING, start_S1=start_S1, expert_S=_NOTHING)

    def use_room(self, tokens: int) -> None:
        """The current target has ``tokens`` rows, which lie in this room."""
        self.use(
            self.device_hidden_TD[:tokens],
            self.device_ids_TK[:tokens],
            self.device_weights_TK[:tokens],
            self.device_out_TD[:tokens],
        )

    def use(
        self, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, out_TD: torch.Tensor
    ) -> None:
        """The current target's rows lie there, and its partial rows go there: in this room, or in an attention worker's memory."""
        self.tokens = hidden_TD.shape[0]
        self.hidden_now_TD, self.ids_now_TK, self.weights_now_TK = hidden_TD, ids_TK, weights_TK
        self.out_now_TD = out_TD

    def settle(self) -> bool:
        """Once the target is done: reads its summary; whether its demand was another than planned.

        Raises ``WireError`` naming the gathered row of an unknown expert id.
        """
        mismatched, unknown = self.summary_host_X[-2:].tolist()
        if unknown >= 0:
            row, k = divmod(unknown, self.device_ids_TK.shape[1])
            raise WireError(
                "attention",
                f"gathered row {row}, choice {k} names an expert that the model does not have",
                "do all roles serve the same model?",
            )
        self.pairs.count = int(self.pairs.start_S1[-1])
        return bool(mismatched)


class CudaTarget(TargetCompute):
    """What the model stream is given for one target. ``stream``: the driver's, which is also torch's current one."""

    __slots__ = ("_driver", "_gpu_kernels", "_room", "_stream")

    def __init__(
        self,
        entry: PlanEntry,
        staging: Staging,
        kernels: Any,
        store: Store,
        driver: Driver,
        stream: int,
    ) -> None:
        super().__init__(entry, staging, kernels, store)
        assert isinstance(staging, CudaStaging), "a GPU's target needs a GPU's buffers"
        self._room = staging
        self._gpu_kernels: CudaKernels = kernels
        self._driver = driver
        self._stream = stream

    def partition(self) -> None:
        """Uploads the plan, takes the exact share (eq. 11), sends the summary on its way down. Raises ``PlanError``."""
        room, layout = self._room, self._store.layout
        fill_plan(
            room.plan_host_X,
            self._entry.shares_X4(),
            layout.row_E,
            layout.rank,
            layout.num_rows,
            self.num_primaries,
            self._entry.demand_crc,
        )
        self._move(room.plan_X, room.plan_host_X)
        self._gpu_kernels.partition(
            room.ids_now_TK, room.plan_X, layout.num_rows, self.num_primaries, room.pair_P, room.place_P, room.summary_X
        )
        self._move(room.summary_host_X, room.summary_X)

    def experts(self) -> None:
        """The grouped MLP over this worker's pairs: partial rows of all tokens."""
        room, layer = self._room, self._entry.target.layer
        num_rows = self._store.layout.num_rows
        self._gpu_kernels.grouped_mlp(
            room.hidden_now_TD,
            room.weights_now_TK,
            room.pair_P,
            room.place_P,
            room.summary_X[: num_rows + 1],
            self._store.gate_up[layer],
            self._store.down[layer],
            self._store.biases[layer],
            room.out_now_TD,
            self._store.shape.form,
        )

    def settle(self) -> None:
        """Once the target is done: what it found. Raises ``WireError``."""
        self.mismatched = self._room.settle()

    def _move(self, destination: Any, source: Any) -> None:
        self._driver.copy([Span(address_of(destination), address_of(source), source.nbytes)], self._stream)
