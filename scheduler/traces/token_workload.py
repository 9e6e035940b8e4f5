"""Microbatches of tokens whose experts are known.

Each of M microbatches has T requests. A request walks through a document, one token a step; where the document ends, another
request joins with the next document of a shuffled order, as continuous batching does. At first requests stand anywhere in their
documents. Several requests may walk through one document at different places: corpora are smaller than servers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afore.core.demand import count_demand
from afore.core.errors import ConfigError
from afore.core.target import Target
from afore.scheduler.traces.calibrate import Shares, in_words, normal, orders, reordered
from afore.scheduler.traces.corpus import TokenCorpus
from afore.scheduler.traces.records import TraceHeader, TraceTarget
from afore.scheduler.traces.shape import AS_COUNTED, PLACES, Shape


class TokenWorkload:
    """Microbatches of tokens whose experts are known.

    ``skew="paper"`` gives experts other numbers, the same in all of a layer's targets, so that workers have the paper's mean skew;
    how hot experts are stays as recorded.
    """

    def __init__(self, corpus: TokenCorpus, shape: Shape) -> None:
        if shape.motion != AS_COUNTED:
            raise ConfigError(
                "workload.motion", f"{corpus.sources[0]} has tokens in their order, which is as it is", "give counts"
            )
        self._corpus, self._shape = corpus, shape
        chosen = shape.chosen(corpus.layers)
        ids_GLK = np.ascontiguousarray(corpus.ids_GLK[:, chosen.start : chosen.stop])
        E, how = corpus.experts, "as recorded"
        shares_LPE = _windows(corpus, ids_GLK, shape)
        if shape.skew == "paper":
            order_LE, blur = orders(shares_LPE, shape.seed, shape.imbalance)
            number_LE = np.argsort(order_LE, axis=1).astype(ids_GLK.dtype)
            ids_GLK = _renamed(ids_GLK, number_LE)
            shares_LPE = reordered(shares_LPE, order_LE)
            how = f"experts ordered by heat with noise {blur:.2f}"
        self._ids_GLK = ids_GLK
        self.header = TraceHeader(
            experts=E,
            layers=len(chosen),
            top_k=corpus.top_k,
            microbatches=shape.microbatches,
            source=(
                f"{' and '.join(corpus.sources)}: {len(ids_GLK):,} tokens of {len(corpus.starts)} documents, layers"
                f" {chosen.start} to {chosen.stop - 1}; {shape.microbatches} microbatches of {shape.tokens} requests, a token"
                f" a step; {how}: {in_words(shares_LPE)}; seed {shape.seed}"
            ),
            sources=corpus.sources,
        )

    def targets(self) -> Iterator[TraceTarget]:
        shape, corpus = self._shape, self._corpus
        M, L, E = shape.microbatches, self.header.layers, corpus.experts
        rng = np.random.default_rng(shape.seed)
        ends, documents = corpus.ends, len(corpus.starts)
        order = _Shuffled(documents, rng)
        place_MT = np.zeros((M, shape.tokens), np.int64)
        end_MT = np.zeros((M, shape.tokens), np.int64)
        for m in range(M):
            for t in range(shape.tokens):
                document = order.next()
                place_MT[m, t] = rng.integers(corpus.starts[document], ends[document])
                end_MT[m, t] = ends[document]
        step = 0
        while True:
            ids_MTLK = self._ids_GLK[place_MT]
            for layer in range(L):
                for m in range(M):
                    ids_TK = ids_MTLK[m, :, layer].astype(np.int32)
                    yield TraceTarget(
                        target=Target(layer, m, step),
                        demand_E=count_demand(ids_TK, E),
                        tokens=shape.tokens,
                        ids_TK=ids_TK,
                    )
            place_MT += 1
            for m, t in np.argwhere(place_MT >= end_MT).tolist():
                document = order.next()
                place_MT[m, t], end_MT[m, t] = corpus.starts[document], ends[document]
            step += 1


class _Shuffled:
    """Documents in a shuffled order, shuffled anew each time all have had their turn."""

    def __init__(self, documents: int, rng: np.random.Generator) -> None:
        self._rng, self._documents = rng, documents
        self._left: list[int] = []

    def next(self) -> int:
        if not self._left:
            self._left = self._rng.permutation(self._documents).tolist()
        return self._left.pop()


def _renamed(ids_GLK: NDArray[Any], number_LE: NDArray[Any]) -> NDArray[Any]:
    layers = np.arange(ids_GLK.shape[1])[None, :, None]
    renamed: NDArray[Any] = number_LE[layers, ids_GLK]
    return renamed


def _windows(corpus: TokenCorpus, ids_GLK: NDArray[Any], shape: Shape) -> Shares:
    """Shares [L, P, E] of microbatches: tokens anywhere in documents, each document as likely as any other."""
    rng = np.random.default_rng(shape.seed)
    L, E = ids_GLK.shape[1], corpus.experts
    shares_LPE = np.zeros((L, PLACES, E))
    for p in range(PLACES):
        document_T = rng.integers(len(corpus.starts), size=shape.tokens)
        taken_T = rng.integers(corpus.starts[document_T], corpus.ends[document_T])
        for layer in range(L):
            shares_LPE[layer, p] = np.bincount(ids_GLK[taken_T, layer].reshape(-1), minlength=E)
    return normal(shares_LPE)
