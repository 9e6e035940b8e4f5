"""Other systems' traces, read into rows. Everything is checked before anything is written; no code in a file is run.

    sglang     ``expert_distribution_recorder_*.pt`` or ``.json``: ``logical_count`` [steps, layers, E] (or [layers, E])
    vllm       ``routed_experts`` ``.npy`` [tokens, layers, K], one file or one a request
    eplb       a matrix of counts [layers, E] (or [steps, layers, E]): ``.npy``, ``.npz``, ``.csv``, ``.json``
    tensorrt-llm  a directory of ``rank<r>.safetensors`` with counts [E] named ``<iteration>_<layer>``, and ``meta_info.json``
    routing    this project's ``.npz``: ``ids`` [tokens, layers, K], or ``<domain>_cnt`` [chunks, layers, E]

A layer that counts nothing in any step is a dense one: it is left out, and MoE layers are numbered from 0, as everywhere here.
Letters: S steps, L layers, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from afore.core.errors import ConfigError
from afore.core.target import Target
from afore.scheduler.traces.corpus import CountCorpus, TokenCorpus, is_corpus, read_corpus
from afore.scheduler.traces.import_files import read_json, read_matrix, read_torch, read_trtllm
from afore.scheduler.traces.reader import TraceReader
from afore.scheduler.traces.records import MOST_EXPERTS, MOST_LAYERS, MOST_PAIRS, TraceError, TraceHeader, TraceTarget

Kind = Literal["sglang", "vllm", "eplb", "tensorrt-llm", "routing"]
KINDS: Final[tuple[str, ...]] = get_args(Kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A trace of another kind."""

    header: TraceHeader
    rows: Iterator[TraceTarget]
    notes: tuple[str, ...]
    """What was done to it, in words."""


def kind_of(path: Path) -> Kind:
    """What a file or directory seems to be. Raises ``TraceError`` where nothing fits."""
    if path.is_dir():
        return "tensorrt-llm"
    if path.suffix == ".pt":
        return "sglang"
    if is_corpus(path):
        return "vllm" if path.suffix == ".npy" else "routing"
    if path.suffix == ".json":
        return "sglang" if isinstance(read_json(path), dict) else "eplb"
    if path.suffix in (".npy", ".npz", ".csv"):
        return "eplb"
    if not path.exists():
        raise TraceError(path, "cannot be read: No such file or directory", "name one that is there")
    raise TraceError(
        path, f"a file {path.suffix or 'without a suffix'} is of no kind that is known", f"--format: {', '.join(KINDS)}"
    )


def open_import(
    paths: Sequence[Path], kind: Kind | None, *, tokens: int, experts: int | None, top_k: int, model: str
) -> Imported:
    """The trace in these files. ``tokens`` of a target, where every token's experts are known; ``experts``, ``top_k``: E and K,
    where the files do not say them (0: unknown).

    Raises ``TraceError`` naming file, row and reason.
    """
    if not paths:
        raise ConfigError("traces", "none is named", "name a file")
    kind = kind or kind_of(paths[0])
    if kind in ("vllm", "routing"):
        corpus = read_corpus(paths, experts=experts)
        return _of_tokens(corpus, tokens, model) if isinstance(corpus, TokenCorpus) else _of_domains(corpus, model)
    if len(paths) > 1:
        raise TraceError(paths[1], f"one {kind} trace is imported at a time", "name one")
    path = paths[0]
    if kind == "sglang":
        counts = read_torch(path) if path.suffix == ".pt" else _logical_count(path)
    elif kind == "eplb":
        counts = read_matrix(path)
    else:
        counts, top_k = read_trtllm(path)
    counts_SLE = checked_counts(path, counts)
    return _of_counts(path, counts_SLE, kind, top_k, model)


def counts_of(path: Path, *, partial: bool = False) -> NDArray[np.int64]:
    """Pairs of each layer and expert [L, E] of a whole trace, or of routing as it was published. Raises ``TraceError``."""
    if is_corpus(path):
        trace = open_import([path], None, tokens=1 << 16, experts=None, top_k=0, model="")
        header, rows = trace.header, trace.rows
    else:
        reader = TraceReader(path, partial=partial, ids=False)
        header, rows = reader.header, iter(reader)
    counts_LE = np.zeros((header.layers, header.experts), np.int64)
    for row in rows:
        assert row.demand_E is not None
        counts_LE[row.target.layer] += row.demand_E
    return counts_LE


def _logical_count(path: Path) -> Any:
    value = read_json(path)
    if not isinstance(value, dict) or "logical_count" not in value:
        raise TraceError(path, "it has no logical_count", "a placement is no trace; give what the recorder wrote")
    return value["logical_count"]


def checked_counts(path: Path, given: Any) -> NDArray[np.int64]:
    """Counts [S, L, E]. Raises ``TraceError``."""
    try:
        counts = np.asarray(given)
    except ValueError as error:
        raise TraceError(path, f"its rows differ in length: {error}", "give as many experts in each row") from error
    if counts.ndim == 2:
        counts = counts[None]
    if counts.ndim != 3 or counts.size == 0 or counts.dtype.kind not in "iuf":
        raise TraceError(
            path,
            f"it holds {counts.dtype} of shape {counts.shape}",
            "give counts [layers, experts] or [steps, layers, experts]",
        )
    L, E = counts.shape[1:]
    if L > MOST_LAYERS or E > MOST_EXPERTS:
        raise TraceError(path, f"{L} layers of {E} experts", f"at most {MOST_LAYERS} and {MOST_EXPERTS}")
    if counts.dtype.kind == "f":
        _refuse(
            path, ~(np.isfinite(counts) & (counts == np.floor(counts))).all(axis=2), "holds what is no whole number"
        )
    negative_SL: NDArray[np.bool_] = np.asarray((counts < 0).any(axis=2))
    _refuse(path, negative_SL, "has an expert with less than 0 tokens")
    large_SL: NDArray[np.bool_] = np.asarray(counts.sum(axis=2, dtype=np.float64) > MOST_PAIRS)
    _refuse(path, large_SL, f"counts more than {MOST_PAIRS:,} pairs")
    return counts.astype(np.int64)


def _refuse(path: Path, wrong_SL: NDArray[np.bool_], what: str) -> None:
    if wrong_SL.any():
        step, layer = np.argwhere(wrong_SL)[0].tolist()
        raise TraceError(path, f"(step {step}, layer {layer}) {what}", "mend it", row=step * wrong_SL.shape[1] + layer)


def _of_counts(path: Path, counts_SLE: NDArray[np.int64], kind: str, top_k: int, model: str) -> Imported:
    used = np.flatnonzero(counts_SLE.any(axis=(0, 2)))
    if not used.size:
        raise TraceError(path, "it counts nothing", "give another")
    notes = []
    if used.size < counts_SLE.shape[1]:
        notes.append(
            f"{counts_SLE.shape[1] - used.size} layers count nothing and are left out; layer 0 is its layer {used[0]}"
        )
    header = TraceHeader(
        experts=counts_SLE.shape[2],
        layers=int(used.size),
        top_k=top_k,
        model=model,
        source=f"{path.name} ({kind}): {len(counts_SLE)} steps" + "".join(f"; {note}" for note in notes),
    )

    def rows() -> Iterator[TraceTarget]:
        for step, counts_LE in enumerate(counts_SLE[:, used].astype(np.int32)):
            for layer, demand_E in enumerate(counts_LE):
                tokens = int(demand_E.sum()) // top_k if top_k else 0
                yield TraceTarget(target=Target(layer, 0, step), demand_E=demand_E, tokens=tokens)

    return Imported(header=header, rows=rows(), notes=tuple(notes))


def _of_domains(corpus: CountCorpus, model: str) -> Imported:
    D, P, L, E = corpus.counts_DPLE.shape
    header = TraceHeader(
        experts=E,
        layers=L,
        top_k=corpus.top_k,
        model=model,
        source=f"counts of {P} chunks of {', '.join(corpus.sources)}",
        sources=corpus.sources,
    )

    def rows() -> Iterator[TraceTarget]:
        for d in range(D):
            for p in range(P):
                for layer, counts_E in enumerate(corpus.counts_DPLE[d, p]):
                    tokens = int(counts_E.sum()) // corpus.top_k if corpus.top_k else 0
                    yield TraceTarget(
                        target=Target(layer, 0, d * P + p), demand_E=counts_E.astype(np.int32), source=d, tokens=tokens
                    )

    return Imported(header=header, rows=rows(), notes=(f"a step is a chunk: {D} domains one after another",))


def _of_tokens(corpus: TokenCorpus, tokens: int, model: str) -> Imported:
    header = TraceHeader(
        experts=corpus.experts,
        layers=corpus.layers,
        top_k=corpus.top_k,
        model=model,
        source=f"{' and '.join(corpus.sources)}: {len(corpus.ids_GLK):,} tokens, {tokens} a step",
        sources=corpus.sources,
    )

    def rows() -> Iterator[TraceTarget]:
        sources = np.repeat(corpus.source_of, corpus.ends - corpus.starts)
        for step, at in enumerate(range(0, len(corpus.ids_GLK), tokens)):
            ids_TLK = corpus.ids_GLK[at : at + tokens]
            for layer in range(corpus.layers):
                ids_TK = np.ascontiguousarray(ids_TLK[:, layer], np.int32)
                yield TraceTarget(
                    target=Target(layer, 0, step),
                    demand_E=np.bincount(ids_TK.reshape(-1), minlength=corpus.experts).astype(np.int32),
                    source=int(sources[at]),
                    tokens=len(ids_TK),
                    ids_TK=ids_TK,
                )

    return Imported(header=header, rows=rows(), notes=(f"a step is {tokens} tokens in the order of the files",))
