"""Safetensors files of a checkpoint, in one shard or many, read tensor by tensor.

A role reads only the tensors it needs; ``tensors_read`` counts them. ``verify`` checks the whole checkpoint from the files'
headers alone (milliseconds, no weights read), so that a launcher can refuse a bad one before it starts anything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open

from afore.core.errors import CheckpointError
from afore.models.config import read_config
from afore.models.families import FAMILIES, Family

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
COPY_AGAIN = "copy the file again from where the model was published"
_PLAIN_DTYPES = frozenset({"BF16", "F16", "F32"})
_QUANTISED = {
    ".weight_scale_inv": "fp8",
    "_proj_blocks": "mxfp4",
    "_proj_scales": "mxfp4",
    ".weight_packed": "compressed-tensors",
    ".qweight": "gptq or awq",
}
"""Endings of names that only quantised checkpoints have."""
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


class Checkpoint:
    """An opened model directory: its spec, its family, and its tensors by name.

    Raises ``CheckpointError`` when the directory, its configuration or its index cannot be used.
    """

    def __init__(self, path: str | Path, families: Mapping[str, Family] = FAMILIES) -> None:
        self.path = Path(path)
        self.spec, self.family, self.config = read_config(path, families)
        self._file_of = _read_index(self.path)
        self._open_files: dict[str, Any] = {}
        self.tensors_read = 0
        """Tensors whose data were read so far."""

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors in the files, needed or not."""
        return frozenset(self._file_of)

    def read(self, name: str) -> torch.Tensor:
        """Reads one tensor in the dtype that the file holds. Raises ``CheckpointError`` naming file and tensor."""
        handle = self._handle(name)
        self.tensors_read += 1
        tensor: torch.Tensor = handle.get_tensor(name)
        return tensor

    def read_slice(self, name: str, index: int) -> torch.Tensor:
        """Reads row ``index`` of a tensor, and not the others. Raises ``CheckpointError``."""
        handle = self._handle(name)
        self.tensors_read += 1
        row: torch.Tensor = handle.get_slice(name)[index]
        return row

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the header."""
        return tuple(self._handle(name).get_slice(name).get_shape())

    def verify(self, dense_shapes: Mapping[str, tuple[int, ...]], optional: Iterable[str] = ()) -> None:
        """Refuses a checkpoint whose files are missing or cut, or whose tensors are missing, misshapen, quantised or unknown.

        ``dense_shapes`` names everything but the routed experts (``loading.dense_shapes`` says it); ``optional`` may be absent.
        """
        expected = dict(dense_shapes)
        spec = self.spec
        for layer in spec.moe_layers:
            expected |= self.family.expert_files.shapes(
                layer,
                num_experts=spec.num_experts,
                hidden_size=spec.hidden_size,
                expert_size=spec.expert_size,
                form=spec.expert_form,
            )
        self._refuse_quantised()
        allowed_absent = frozenset(optional)
        missing = sorted(name for name in expected if name not in self._file_of and name not in allowed_absent)
        if missing:
            raise CheckpointError(
                str(self.path), f"{_some(missing)} missing", "complete the download; the configuration asks for them"
            )
        unknown = sorted(n for n in self._file_of if n not in expected and n not in allowed_absent and self._counts(n))
        if unknown:
            raise CheckpointError(
                str(self.path),
                f"{_some(unknown)} unknown to this model",
                "config.json and weights must belong together",
            )
        for name in sorted(self._file_of):
            if name in expected:
                self._verify_tensor(name, expected[name])

    def close(self) -> None:
        """Lets go of the files; idempotent."""
        self._open_files.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _verify_tensor(self, name: str, shape: tuple[int, ...]) -> None:
        view = self._handle(name).get_slice(name)
        if tuple(view.get_shape()) != shape:
            raise CheckpointError(
                str(self.path / self._file_of[name]),
                f"{name} has shape {tuple(view.get_shape())}, the configuration says {shape}",
                "config.json and weights must belong together",
            )
        if view.get_dtype() not in _PLAIN_DTYPES:
            raise CheckpointError(
                str(self.path / self._file_of[name]),
                f"{name} is stored as {view.get_dtype()}",
                "use the bfloat16, float16 or float32 release of the model",
            )

    def _counts(self, name: str) -> bool:
        """Multi-token-prediction layers lie behind the last layer; old files store rotary tables: neither is used."""
        layer = _LAYER.match(name)
        if layer is not None and int(layer.group(1)) >= self.spec.num_layers:
            return False
        return not name.endswith("rotary_emb.inv_freq") and not any(part in name for part in self.family.ignored)

    def _refuse_quantised(self) -> None:
        """Names a quantisation that config.json keeps silent about."""
        for ending, kind in _QUANTISED.items():
            found = next((name for name in sorted(self._file_of) if name.endswith(ending)), None)
            if found is not None:
                raise CheckpointError(
                    str(self.path),
                    f"the weights are quantised ({kind}: {found})",
                    f"use a bfloat16, float16 or float32 release of {self.family.title}",
                )

    def _handle(self, name: str) -> Any:
        file = self._file_of.get(name)
        if file is None:
            raise CheckpointError(str(self.path), f"tensor {name} is missing", "complete the download")
        handle = self._open_files.get(file)
        if handle is None:
            handle = _open(self.path / file)
            held = frozenset(handle.keys())
            absent = sorted(n for n, f in self._file_of.items() if f == file and n not in held)
            if absent:
                raise CheckpointError(
                    str(self.path / file), f"{_some(absent)} missing although the index says it is here", COPY_AGAIN
                )
            self._open_files[file] = handle
        return handle


class ExpertReader:
    """Reads single routed experts out of a checkpoint, as one gate|up block and one down block, whatever the files' layout."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        spec = checkpoint.spec
        self.gate_up_shape = (2 * spec.expert_size, spec.hidden_size)
        """[2I, D]: gate rows, then up rows."""
        self.down_shape = (spec.hidden_size, spec.expert_size)
        """[D, I]."""
        self.has_biases = spec.expert_form.biases
        """Whether an expert has biases [2I] and [D]."""

    def read_expert(
        self,
        layer_ordinal: int,
        expert: int,
        gate_up_FD: torch.Tensor | npt.NDArray[np.float32],
        down_DI: torch.Tensor | npt.NDArray[np.float32],
        gate_up_bias_F: torch.Tensor | npt.NDArray[np.float32] | None = None,
        down_bias_D: torch.Tensor | npt.NDArray[np.float32] | None = None,
    ) -> None:
        """Reads one expert of MoE layer ``layer_ordinal`` into the caller's buffers [2I, D] and [D, I], in their dtype.

        Experts with biases fill [2I] and [D] too. Raises ``CheckpointError``; wrong buffers are the caller's defect.
        """
        gate_up, down = _tensor(gate_up_FD), _tensor(down_DI)
        assert tuple(gate_up.shape) == self.gate_up_shape, f"gate|up buffer has shape {tuple(gate_up.shape)}"
        assert tuple(down.shape) == self.down_shape, f"down buffer has shape {tuple(down.shape)}"
        checkpoint, spec = self._checkpoint, self._checkpoint.spec
        layer, size = spec.moe_layers[layer_ordinal], spec.expert_size
        read = checkpoint.family.expert_files.read(checkpoint, layer, expert, spec.expert_form)
        parts = [(read.gate, gate_up[:size]), (read.up, gate_up[size:]), (read.down, down)]
        if self.has_biases:
            assert gate_up_bias_F is not None, "this family's experts have biases"
            assert down_bias_D is not None, "this family's experts have biases"
            assert read.gate_bias is not None, "the family reads no biases"
            assert read.up_bias is not None, "the family reads no biases"
            assert read.down_bias is not None, "the family reads no biases"
            gate_up_bias, down_bias = _tensor(gate_up_bias_F), _tensor(down_bias_D)
            parts += [
                (read.gate_bias, gate_up_bias[:size]),
                (read.up_bias, gate_up_bias[size:]),
                (read.down_bias, down_bias),
            ]
        for name, (tensor, rows) in zip(read.names, parts, strict=True):
            if tensor.shape != rows.shape:  # copy_ would broadcast it
                raise CheckpointError(
                    str(checkpoint.path), f"{name} has shape {tuple(tensor.shape)}, not {tuple(rows.shape)}", COPY_AGAIN
                )
            rows.copy_(tensor)


def _tensor(buffer: torch.Tensor | npt.NDArray[np.float32]) -> torch.Tensor:
    return buffer if isinstance(buffer, torch.Tensor) else torch.from_numpy(buffer)


def _read_index(directory: Path) -> dict[str, str]:
    """Tensor name → file name, from the index where there is one, from the single file's header otherwise."""
    index = directory / INDEX_FILE
    if index.exists():
        return _read_weight_map(index)
    if (directory / SINGLE_FILE).exists():
        return dict.fromkeys(_open(directory / SINGLE_FILE).keys(), SINGLE_FILE)
    shards = sorted(file.name for file in directory.glob("*.safetensors"))
    if shards:
        raise CheckpointError(str(index), f"the index of {len(shards)} shards is missing", COPY_AGAIN)
    others = sorted(file.name for file in directory.glob("*.bin")) + sorted(f.name for f in directory.glob("*.gguf"))
    if others:
        raise CheckpointError(str(directory), f"holds {others[0]} but no safetensors", "use the safetensors release")
    raise CheckpointError(str(directory), f"holds no weights ({SINGLE_FILE} or {INDEX_FILE})", "complete the download")


def _read_weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        file_of = {str(name): str(file) for name, file in weight_map.items()}
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(str(index), "is not a safetensors index (no weight_map)", COPY_AGAIN) from error
    except OSError as error:
        raise CheckpointError(str(index), f"cannot be read ({error.strerror})", "check its permissions") from error
    lost = sorted(file for file in set(file_of.values()) if not (index.parent / file).exists())
    if lost:
        raise CheckpointError(
            str(index.parent / lost[0]), f"shard is missing ({len(lost)} of them are)", "complete the download"
        )
    return file_of


def _open(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="pt", device="cpu")
    except SafetensorError as error:
        raise CheckpointError(str(file), f"cut short or not a safetensors file ({error})", COPY_AGAIN) from error
    except FileNotFoundError as error:
        raise CheckpointError(str(file), "file is missing", "complete the download") from error
    except OSError as error:
        raise CheckpointError(str(file), f"cannot be read ({error})", "check its permissions") from error


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{len(names)} tensors ({shown}{', …' if len(names) > 3 else ''}) are" if len(names) > 1 else f"{shown} is"
