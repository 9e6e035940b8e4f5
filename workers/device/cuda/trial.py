"""A target made up to measure kernels by: its pairs spread evenly over the rows of a worker's own store."""

from __future__ import annotations

import importlib.metadata
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from afore.workers.device.cuda.choice import median_us
from afore.workers.device.cuda.device import CudaDevice
from afore.workers.device.cuda.driver import Driver
from afore.workers.device.cuda.kernels import Implementation
from afore.workers.device.cuda.memory import DeviceMemory
from afore.workers.device.cuda.stopwatch import Stopwatch, torch_sleep


class Weights(Protocol):
    """A store on a GPU."""

    @property
    def gate_up(self) -> Any: ...

    @property
    def down(self) -> Any: ...

    @property
    def biases(self) -> Any: ...

    @property
    def shape(self) -> Any: ...


class Trial:
    """Measures ways over layer 0 of ``store``; what they compute is nobody's."""

    def __init__(
        self,
        driver: Driver,
        memory: DeviceMemory,
        device: CudaDevice,
        store: Weights,
        *,
        top_k: int,
        tile_tokens: int,
    ) -> None:
        self._driver = driver
        self._where = memory.torch_device
        self._device = device
        self._store = store
        self._top_k = top_k
        self._tile_tokens = tile_tokens

        def current(stream: int) -> AbstractContextManager[object]:
            return device.current_model_stream()

        self._watch = Stopwatch(driver, current, torch_sleep(current) if self._where.type == "cuda" else None)

    def key(self, ordinal: int) -> dict[str, Any]:
        """All that times depend on but the ways and the sizes."""
        shape, gate_up = self._store.shape, self._store.gate_up[0]
        return {
            "gpu": self._driver.device_name(ordinal),
            "driver": self._driver.version,
            "torch": torch.__version__,
            "triton": _version("triton"),
            "rows": shape.num_rows,
            "hidden": shape.hidden_size,
            "expert": shape.expert_size,
            "form": [int(shape.form.activation), bool(shape.form.biases)],
            "dtype": str(gate_up.dtype),
            "top_k": self._top_k,
            "tile": self._tile_tokens,
        }

    def measure_us(self, way: Implementation, pairs: int) -> float:
        """Median microseconds on the GPU of the experts of ``pairs`` pairs, a whole number of tokens."""
        shape, where, top_k = self._store.shape, self._where, self._top_k
        stream = self._device.model_stream.handles.stream
        tokens = max(1, pairs // top_k)
        places = tokens * top_k
        with self._device.current_model_stream():
            pair_P = torch.arange(places, dtype=torch.int32, device=where)
            start_S1 = (torch.arange(shape.num_rows + 1, device=where) * places // shape.num_rows).to(torch.int32)
            hidden_TD = torch.ones((tokens, shape.hidden_size), device=where)
            weight_TK = torch.ones((tokens, top_k), device=where)
            act_PI = torch.zeros((places, shape.expert_size), dtype=self._store.gate_up[0].dtype, device=where)
            y_PD = torch.zeros((places, shape.hidden_size), device=where)
            out_TD = torch.zeros((tokens, shape.hidden_size), device=where)

        def experts() -> None:
            way.experts(
                hidden_TD,
                weight_TK,
                pair_P,
                pair_P,
                start_S1,
                self._store.gate_up[0],
                self._store.down[0],
                self._store.biases[0],
                act_PI,
                y_PD,
                out_TD,
                shape.form,
                self._tile_tokens,
            )

        with self._device.current_model_stream():
            experts()  # compiles
        # It blocks: a worker that starts serves nothing yet.
        return median_us(lambda: self._watch.together([(stream, experts)])[0].took_us)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
