"""Foreign files as arrays: sizes are looked at before anything is read, and pickles never run code."""

from __future__ import annotations

import csv
import json
import pickle
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from afore.scheduler.traces.files import regular
from afore.scheduler.traces.npy import array_of
from afore.scheduler.traces.records import MOST_LAYERS, MOST_PAIRS, MOST_TOP_K, TraceError

MOST_BYTES: Final = 1 << 30
"""Of a file, and of what it unpacks to."""
MOST_JSON: Final = 256 << 20
_RANK = re.compile(r"rank\d+\.safetensors")
_KEY = re.compile(r"(\d{1,12})_(\d{1,6})")


@contextmanager
def _reading(path: Path, remedy: str) -> Iterator[None]:
    """Whatever goes wrong in here is the file's fault."""
    try:
        yield
    except TraceError:
        raise
    except OSError as error:
        raise TraceError(path, f"cannot be read: {error.strerror or error}", remedy) from error
    except MemoryError as error:
        raise TraceError(path, "it does not fit into memory", remedy) from error
    except Exception as error:  # each library has a dozen ways to say that bytes are damaged
        raise TraceError(
            path, f"cannot be read: {str(error).splitlines()[0][:200] if str(error) else error!r}", remedy
        ) from error


def _sized(path: Path, most: int) -> None:
    size = regular(path).st_size
    if size > most:
        raise TraceError(path, f"it has {size:,} bytes", f"this reads at most {most:,}")


def read_json(path: Path) -> Any:
    """A JSON file. Raises ``TraceError``."""
    with _reading(path, "give a JSON file"):
        _sized(path, MOST_JSON)
        return json.loads(path.read_bytes(), parse_constant=_no_number)


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no count")


def read_matrix(path: Path) -> Any:
    """Counts from ``.npy``, ``.npz`` (its one array), ``.csv`` (a row for each layer) or ``.json``. Raises ``TraceError``."""
    with _reading(path, "give counts as .npy, .npz, .csv or .json"):
        _sized(path, MOST_BYTES)
        if path.suffix == ".npy":
            return array_of(path.read_bytes())
        if path.suffix == ".npz":
            return _only_array(path)
        if path.suffix == ".csv":
            return _csv(path)
        return read_json(path)


def _only_array(path: Path) -> NDArray[Any]:
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        if len(members) != 1:
            names = ", ".join(info.filename[:40] for info in members[:5])
            raise TraceError(path, f"it has {len(members)} arrays ({names}), not one", "save the counts alone")
        if members[0].file_size > MOST_BYTES:
            raise TraceError(
                path, f"it unpacks to {members[0].file_size:,} bytes", f"this reads at most {MOST_BYTES:,}"
            )
        return array_of(archive.read(members[0]))


def _csv(path: Path) -> list[list[int]]:
    rows: list[list[int]] = []
    with open(path, encoding="utf-8-sig", newline="") as file:
        for number, cells in enumerate(csv.reader(file)):
            if not cells:
                continue
            try:
                row = [int(cell) for cell in cells]
            except ValueError as error:
                raise TraceError(path, str(error), "give whole numbers with commas between", row=number) from error
            if rows and len(row) != len(rows[0]):
                raise TraceError(
                    path, f"{len(row)} numbers, {len(rows[0])} in the row before", "give E in each", row=number
                )
            if max(row) >= 1 << 62:
                raise TraceError(path, f"{max(row)} is too large", "give counts", row=number)
            rows.append(row)
    return rows


def read_torch(path: Path) -> NDArray[Any]:
    """``logical_count`` of SGLang's recorder. Only tensors are loaded: a pickle that asks for more is a ``TraceError``."""
    import torch  # seconds; only this needs it

    with _reading(
        path, "give what SGLang's expert distribution recorder wrote; a pickle that asks for more is not opened"
    ):
        _sized(path, MOST_BYTES)
        with zipfile.ZipFile(path) as archive:
            total = sum(info.file_size for info in archive.infolist())
        if total > MOST_BYTES:
            raise TraceError(path, f"it unpacks to {total:,} bytes", f"this reads at most {MOST_BYTES:,}")
        try:
            value = torch.load(path, weights_only=True, map_location="cpu")
        except pickle.UnpicklingError as error:
            raise TraceError(path, "its pickle asks for more than tensors and numbers", "it is not opened") from error
        if isinstance(value, dict) and "logical_count" not in value:
            raise TraceError(
                path, f"it has no logical_count ({', '.join(str(name)[:30] for name in list(value)[:5])})", ""
            )
        count = value["logical_count"] if isinstance(value, dict) else None
        if not isinstance(count, torch.Tensor) or count.layout != torch.strided or count.is_quantized:
            raise TraceError(path, "its logical_count is no tensor", "give what the recorder wrote")
        if count.numel() * count.element_size() > count.untyped_storage().nbytes():
            raise TraceError(
                path, f"a tensor of shape {tuple(count.shape)} that its file does not hold", "save it contiguous"
            )
        if count.dtype == torch.bfloat16:
            count = count.to(torch.float32)
        found: NDArray[Any] = count.numpy()
        return found


def read_trtllm(path: Path) -> tuple[NDArray[np.int64], int]:
    """(counts [S, L, E], summed over ranks; K). Iterations and layers come in rising order. Raises ``TraceError``."""
    from safetensors import safe_open

    meta = read_json(path / "meta_info.json")
    experts, top_k = (
        meta.get(name) if isinstance(meta, dict) else None for name in ("num_experts", "num_experts_per_token")
    )
    if type(experts) is not int or type(top_k) is not int or experts < 1 or not 0 < top_k <= MOST_TOP_K:
        raise TraceError(path / "meta_info.json", "it lacks num_experts or num_experts_per_token", "record again")
    files = sorted(file for file in path.iterdir() if _RANK.fullmatch(file.name))
    if not files:
        raise TraceError(path, "it has no rank<r>.safetensors", "name the recorder's directory")
    sums: dict[tuple[int, int], NDArray[np.int64]] = {}
    for file in files:
        with _reading(file, "record again"):
            _sized(file, MOST_BYTES)
            with safe_open(file, framework="numpy") as tensors:
                for key in tensors.keys():  # noqa: SIM118  # it is no mapping
                    place = _KEY.fullmatch(key)
                    counts_E = tensors.get_tensor(key)
                    if place is None or counts_E.shape != (experts,) or counts_E.dtype.kind not in "iu":
                        raise TraceError(
                            file,
                            f"{key[:40]!r} is {counts_E.dtype} of shape {counts_E.shape}, not {experts} counts",
                            "",
                        )
                    if int(counts_E.max(initial=0)) > MOST_PAIRS:
                        raise TraceError(file, f"{key!r} has an expert with over {MOST_PAIRS:,} tokens", "record again")
                    if (counts_E < 0).any():
                        raise TraceError(file, f"{key!r} has an expert with less than 0 tokens", "record again")
                    where = int(place[1]), int(place[2])
                    sums[where] = sums.get(where, np.zeros(experts, np.int64)) + counts_E.astype(np.int64)
    steps, layers = (sorted({where[at] for where in sums}) for at in (0, 1))
    if len(layers) > MOST_LAYERS or len(sums) != len(steps) * len(layers):
        raise TraceError(
            path, f"{len(sums)} counts are not {len(steps)} iterations of {len(layers)} layers", "record again"
        )
    return np.array([[sums[step, layer] for layer in layers] for step in steps]), top_k
