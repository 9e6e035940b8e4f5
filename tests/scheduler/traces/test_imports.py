"""Other systems' traces: what they write is read, whatever they write wrongly is refused with file, row and reason."""

from __future__ import annotations

import io
import json
import os
import pickle
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.numpy import save_file

from afore.scheduler.traces import TraceError, import_files
from afore.scheduler.traces.imports import Imported, kind_of, open_import

COUNTS = arrays(
    np.int64, st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 9)), elements=st.integers(0, 1 << 20)
)


def imported(*paths: Path, tokens: int = 3, experts: int | None = None, top_k: int = 0) -> Imported:
    return open_import(list(paths), None, tokens=tokens, experts=experts, top_k=top_k, model="m")


def demands(found: Imported) -> np.ndarray:
    """[steps, layers, E]"""
    rows = [row.demand_E for row in found.rows]
    return np.array(rows).reshape(-1, found.header.layers, found.header.experts)


def torch_file(path: Path, counts: np.ndarray) -> None:
    torch.save({"rank": 0, "logical_count": torch.from_numpy(counts)}, path)


def trtllm_directory(path: Path, counts_SLE: np.ndarray, ranks: int = 2) -> None:
    path.mkdir(exist_ok=True)
    S, L, E = counts_SLE.shape
    (path / "meta_info.json").write_text(json.dumps({"num_experts": E, "num_experts_per_token": 2}))
    half = counts_SLE // 2
    for rank in range(ranks):
        part = counts_SLE - half * (ranks - 1) if rank == 0 else half
        tensors = {f"{50 + s}_{3 + layer}": part[s, layer].astype(np.int32) for s in range(S) for layer in range(L)}
        save_file(tensors, path / f"rank{rank}.safetensors")
    save_file({"x": np.zeros(3)}, path / "rank0_raw.safetensors")


WRITERS: dict[str, tuple[str, Callable[[Path, np.ndarray], object]]] = {
    "sglang-pt": ("a.pt", torch_file),
    "sglang-json": ("a.json", lambda path, counts: path.write_text(json.dumps({"logical_count": counts.tolist()}))),
    "eplb-npy": ("a.npz", lambda path, counts: np.savez(path, counts)),
    "eplb-json": ("b.json", lambda path, counts: path.write_text(json.dumps(counts.tolist()))),
    "tensorrt-llm": ("d", trtllm_directory),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", WRITERS)
@settings(max_examples=25, deadline=None)
@given(counts=COUNTS)
def test_counts_of_steps_come_back(kind: str, counts: np.ndarray) -> None:
    name, write = WRITERS[kind]
    used = counts.any(axis=(0, 2))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        write(path, counts)
        if not used.any():
            with pytest.raises(TraceError, match="it counts nothing"):
                imported(path)
            return
        found = imported(path, top_k=2)
        assert np.array_equal(demands(found), counts[:, used])
        assert found.header.top_k == 2
        assert bool(found.notes) == (not used.all())


@settings(max_examples=25, deadline=None)
@given(counts=COUNTS.map(lambda counts: counts[0] + 1))
def test_matrices_come_back(counts: np.ndarray) -> None:
    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder) / "m.npy", np.asfortranarray(counts))
        np.savetxt(Path(folder) / "m.csv", counts, fmt="%d", delimiter=",")
        for name in ("m.npy", "m.csv"):
            assert np.array_equal(demands(imported(Path(folder) / name))[0], counts)


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(1, 12),
    layers=st.integers(1, 3),
    experts=st.integers(3, 40),
    seed=st.integers(0, 99),
    step=st.integers(1, 5),
)
def test_tokens_come_back(tokens: int, layers: int, experts: int, seed: int, step: int) -> None:
    rng = np.random.default_rng(seed)
    ids_GLK = np.argsort(rng.random((tokens, layers, experts)), axis=2)[:, :, :3].astype(np.int16)
    dense_GLK = np.concatenate((np.zeros((tokens, 1, 3), np.int16), ids_GLK), axis=1)
    with tempfile.TemporaryDirectory() as folder:
        cut = tokens // 2
        parts = [dense_GLK[:cut], dense_GLK[cut:]] if cut else [dense_GLK]
        for number, part in enumerate(parts):
            np.save(Path(folder) / f"{number}.npy", part)
        paths = [Path(folder) / f"{number}.npy" for number in range(len(parts))]
        found = imported(*paths, tokens=step, experts=experts)
        assert (found.header.layers, found.header.top_k, found.header.experts) == (layers, 3, experts)
        again = [[] for _ in range(layers)]  # type: list[list[Any]]
        for row in found.rows:
            assert row.ids_TK is not None
            assert row.tokens == len(row.ids_TK) <= step
            again[row.target.layer].append(row.ids_TK)
        assert np.array_equal(np.stack([np.concatenate(parts) for parts in again], axis=1), ids_GLK)


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/traces-evil-ran",)


def _evil_torch(path: Path) -> None:
    torch.save({"logical_count": Evil()}, path)


def _stride_torch(path: Path) -> None:
    torch.save({"logical_count": torch.zeros(1, dtype=torch.int64).expand(1 << 30, 1 << 10, 64)}, path)


def _bomb_torch(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data/0", bytes((2 << 20) + 1))


def _raw(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


def _json(value: Any) -> Callable[[Path], object]:
    return lambda path: path.write_text(json.dumps(value))


def _npy(value: Any) -> Callable[[Path], object]:
    return lambda path: np.save(path, value, allow_pickle=True)


def _npy_bytes(value: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, value)
    return out.getvalue()


def _npy_bytes_of_shape() -> bytes:
    head = b"{'descr': '<i8', 'fortran_order': False, 'shape': (100000, 100000), }"
    return b"\x93NUMPY\x01\x00" + (len(head) + 1).to_bytes(2, "little") + head + b"\n"


BAD: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "code in a pickle": ("x.pt", _evil_torch, "its pickle asks for more than tensors and numbers; it is not opened"),
    "a bare pickle": ("x.pt", _raw(pickle.dumps(Evil())), "not a zip"),
    "a tensor of strides": ("x.pt", _stride_torch, r"shape \(1073741824, 1024, 64\) that its file does not hold"),
    "a tensor that is none": ("x.pt", lambda path: torch.save({"logical_count": [1]}, path), "no tensor"),
    "another dump": ("x.pt", lambda path: torch.save({"a": torch.zeros(2)}, path), r"no logical_count \(a\)"),
    "negative": ("x.json", _json({"logical_count": [[1, 2], [3, -4]]}), r"row 1: \(step 0, layer 1\) has an expert with less"),
    "ragged": ("x.json", _json([[1, 2], [3]]), "its rows differ in length"),
    "halves": ("x.json", _json([[1, 2.5]]), r"row 0: \(step 0, layer 0\) holds what is no whole number"),
    "NaN in JSON": ("x.json", _raw(b"[[1, NaN]]"), "NaN is no count"),
    "NaN": ("x.npy", _npy(np.array([[1.0, np.nan]])), r"row 0: .*no whole number"),
    "infinite": ("x.npy", _npy(np.array([[1.0, 2.0], [1.0, np.inf]])), r"row 1: .*no whole number"),
    "words": ("x.npy", _npy(np.array([["a", "b"]])), "it holds <U1"),
    "objects": ("x.npy", _npy(np.array([[print]], dtype=object)), "could carry code"),
    "one dimension": ("x.npy", _npy(np.arange(3)), r"of shape \(3,\)"),
    "too many": ("x.json", _json([[1 << 40, 1]]), r"row 0: .*more than 1,073,741,824 pairs"),
    "huge numbers": ("x.json", _json([[10**30]]), "it holds object"),
    "deep": ("x.json", _raw(b"[" * 200_000), "cannot be read"),
    "cut off": ("x.json", _raw(b"[[1, 2"), "cannot be read"),
    "a short array": ("x.npy", lambda path: path.write_bytes(_npy_bytes(np.ones((4, 4), int))[:-8]), "120 are there"),
    "an absurd shape": ("x.npy", _raw(_npy_bytes_of_shape()), "0 are there"),
    "a ragged table": ("x.csv", _raw(b"1,2\n3\n"), "row 1: 1 numbers, 2 in the row before"),
    "a word in a table": ("x.csv", _raw(b"1,2\n3,x\n"), "row 1: invalid literal"),
    "a placement": ("x.json", _json({"physical_to_logical_map": [[0]]}), "it has no logical_count"),
    "an expert beyond": ("x.npy", _npy(np.array([[[0, 99]]])), "row 0: its experts .* are none of 0 to 63"),
    "two arrays": ("x.npz", lambda path: np.savez(path, a=np.ones(2), b=np.ones(2)), "it has 2 arrays"),
    "an unknown file": ("x.txt", _raw(b"1"), "of no kind that is known"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_is_refused(tmp_path: Path, case: str) -> None:
    name, write, why = BAD[case]
    write(tmp_path / name)
    with pytest.raises(TraceError, match=rf"(?s)x\.\w+: .*{why}"):
        list(imported(tmp_path / name, experts=64 if case == "an expert beyond" else None).rows)
    assert not Path("/tmp/traces-evil-ran").exists()


def test_what_unpacks_to_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_files, "MOST_BYTES", 2 << 20)
    _bomb_torch(tmp_path / "x.pt")
    assert (tmp_path / "x.pt").stat().st_size < 1 << 16
    with pytest.raises(TraceError, match="it unpacks to 2,097,153 bytes"):
        imported(tmp_path / "x.pt")


def test_statistics_that_are_not_whole(tmp_path: Path) -> None:
    counts = np.arange(24).reshape(2, 3, 4) + 1
    for change, why in (
        (lambda path: (path / "meta_info.json").write_text("{}"), "meta_info.json: it lacks num_experts"),
        (lambda path: (path / "meta_info.json").unlink(), "meta_info.json: cannot be read: No such file"),
        (
            lambda path: save_file({"50_3": np.zeros(5, np.int32)}, path / "rank0.safetensors"),
            "'50_3' is int32 of shape",
        ),
        (lambda path: save_file({"50_3": -np.ones(4, np.int32)}, path / "rank0.safetensors"), "less than 0"),
        (lambda path: save_file({"x": np.ones(4, np.int32)}, path / "rank0.safetensors"), "'x' is int32"),
        (
            lambda path: save_file({"77_3": np.ones(4, np.int32)}, path / "rank1.safetensors"),
            "7 counts are not 3 iterations",
        ),
        (lambda path: (path / "rank0.safetensors").write_bytes(b"\xff" * 99), "rank0.safetensors: cannot be read"),
        (lambda path: [one.unlink() for one in path.glob("rank*")], "it has no rank<r>.safetensors"),
    ):
        path = tmp_path / "d"
        trtllm_directory(path, counts)
        assert np.array_equal(demands(imported(path)), counts)
        change(path)
        with pytest.raises(TraceError, match=why):
            imported(path)


def test_kinds_by_name_and_content(tmp_path: Path) -> None:
    np.save(tmp_path / "counts.npy", np.ones((2, 3), int))
    np.save(tmp_path / "tokens.npy", np.ones((2, 3, 1), int))
    np.savez(tmp_path / "chunks.npz", a_cnt=np.ones((1, 1, 3), int))
    (tmp_path / "s.json").write_text('{"logical_count": [[1]]}')
    (tmp_path / "e.json").write_text("[[1]]")
    kinds = {
        name: kind_of(tmp_path / name) for name in ("counts.npy", "tokens.npy", "chunks.npz", "s.json", "e.json", ".")
    }
    assert list(kinds.values()) == ["eplb", "vllm", "routing", "sglang", "eplb", "tensorrt-llm"]
    with pytest.raises(TraceError, match=r"none\.npy: cannot be read"):
        imported(tmp_path / "none.npy")
