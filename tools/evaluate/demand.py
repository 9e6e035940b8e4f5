"""Demand of a cell: a table of counts, made by the generators of ``scheduler/traces``, stored as a trace, and hashed.

What a cell meets is read out of the table with whole numbers only: a machine that reads a stored table runs exactly what another
one ran. Each generated workload is a corpus of counts by topic and chunk, as varied as published ones, which the generator brings
to the paper's skew (most loaded of 8 workers 1.70 times the mean, one expert in 16 with 24.4 %) and makes targets of. Published
or recorded routing takes the corpus's place.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from afore.core.errors import ConfigError
from afore.core.target import Target
from afore.scheduler.traces import (
    Shape,
    TraceError,
    TraceHeader,
    TraceReader,
    TraceTarget,
    TraceWriter,
    read_corpus,
    workload_of,
)
from afore.scheduler.traces.calibrate import SKEW
from afore.scheduler.traces.corpus import CountCorpus, TokenCorpus, is_corpus
from afore.scheduler.traces.count_workload import CountWorkload
from afore.scheduler.traces.shape import AS_COUNTED, Motion
from afore.scheduler.traces.token_workload import TokenWorkload
from afore.tools.evaluate.workloads import WORKLOADS, Workload

I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]

FORMAT = 2
"""Of how tables are made: another one makes other tables."""
STATIC_IMBALANCE = SKEW
TOPICS, CHUNKS, CHUNK_TOKENS = 4, 8, 20_000
"""Of a generated corpus; as published counts have them."""
_CORPUS = 0xC0
_EVEN_KAPPA = 1e12
"""Of uniform routing: only sampling is left of its noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandKey:
    """What a table is made of. Two that are equal have the same table on one machine."""

    workload: str
    layers: int
    experts: int
    top_k: int
    microbatches: int
    tokens: int
    """T of a whole microbatch, all attention workers together."""
    steps: int
    """Steps of each microbatch that are stored; a run that goes on longer begins anew."""
    seed: int = 0
    imbalance: float = STATIC_IMBALANCE
    """Mean static imbalance over 8 workers; 1: uniform routing. Not of recorded traces, which are what they are."""
    motion: Motion = AS_COUNTED
    """How the traffic moves on from step to step. Not of recorded traces."""
    routing: str = ""
    """Files of published routing, or one recorded trace, by commas; empty: generated."""

    def file_name(self) -> str:
        """Names its file."""
        text = json.dumps([FORMAT, asdict(replace(self, routing="")), routing_digest(self.routing)], sort_keys=True)
        return f"{self.workload}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.trace.npz"


class StoredDemand:
    """A ``DemandSource`` over a table of whole microbatches [X, L, E]: microbatch m's step s is row (s · M + m) mod X."""

    def __init__(self, table_XLE: I32, *, microbatches: int, top_k: int, source: str) -> None:
        self._cumulated_XLE = np.cumsum(table_XLE, axis=2, dtype=np.int64)
        self._microbatches = microbatches
        self._top_k = top_k
        self.source = source
        """Where the demand comes from, in words."""
        self.digest = hashlib.blake2b(np.ascontiguousarray(table_XLE).data, digest_size=16).hexdigest()
        """Of the whole table."""

    def counts(self, attention: int, microbatch: int, step: int, tokens: int) -> I64:
        """See ``DemandSource.counts``.

        The table's pairs of a layer stand in a row, by expert; a worker takes T_a · K of them at even distances. Workers whose
        tokens are even parts of the table's take every pair once.
        """
        cumulated_LE = self._cumulated_XLE[(step * self._microbatches + microbatch) % len(self._cumulated_XLE)]
        total_L1 = cumulated_LE[:, -1:]
        pairs = tokens * self._top_k
        taken_LE = (cumulated_LE * pairs + (attention * pairs) % total_L1) // total_L1
        counts_LE: I64 = np.diff(taken_LE, axis=1, prepend=0)
        return counts_LE


def demand_of(key: DemandKey, directory: Path | None = None) -> StoredDemand:
    """The table: read from ``directory`` where it is stored, else made, and stored there where one is named.

    Raises ``ConfigError`` for routing of another model and for a stored table that is damaged, ``HostError`` for a full disk.
    """
    path = None if directory is None else directory / key.file_name()
    if path is None or not path.is_file():
        header, targets = _made(key)
        if path is None:
            return _stored(key, header, targets, header.source)
        with TraceWriter(path, header) as out:
            for target in targets:
                out.add(target)
    try:
        reader = TraceReader(path)
        _check_stored(key, reader.header, path)
        return _stored(key, reader.header, reader, path)
    except TraceError as error:
        what = error.problem if error.row is None else f"row {error.row}: {error.problem}"
        raise ConfigError(
            str(path), what, "remove it: it is made anew, or copy it again from where it was made"
        ) from error


def _check_stored(key: DemandKey, header: TraceHeader, path: Path) -> None:
    """Raises ``TraceError`` where the stored table is none of the key's, whatever its name says."""
    its = header.experts, header.top_k, header.microbatches, min(header.layers, key.layers)
    mine = key.experts, key.top_k, key.microbatches, header.layers
    if its != mine:
        raise TraceError(
            path,
            f"it is of {header.experts} experts, top-{header.top_k}, M = {header.microbatches}, {header.layers} layers; its name "
            f"says {key.experts}, top-{key.top_k}, M = {key.microbatches}, {key.layers}",
        )


def routing_digest(routing: str) -> str:
    """Of the files' contents; empty for generated routing. Raises ``ConfigError``."""
    digest = hashlib.blake2b(digest_size=16)
    names = [name for name in routing.split(",") if name]
    if routing and not names:
        raise ConfigError("--routing", f"{routing!r} names no file", "name files, with commas between them")
    for name in names:
        path = Path(name)
        try:
            if path.exists() and not path.is_file():
                raise ConfigError("--routing", f"{name} is no file: a pipe or a device may never end", "name a file")
            with path.open("rb") as file:
                while chunk := file.read(1 << 20):
                    digest.update(chunk)
        except (OSError, ValueError) as error:  # a name with a NUL is a ValueError
            raise ConfigError("--routing", f"{name!r} cannot be read: {error}", "name a file") from error
    return digest.hexdigest() if routing else ""


def generated_corpus(workload: Workload, *, layers: int, experts: int, top_k: int, seed: int) -> CountCorpus:
    """Counts [topics, chunks, L, E] as varied as ``workload`` says."""
    rng = np.random.default_rng([_CORPUS, seed, zlib.crc32(workload.name.encode())])
    shared_DPLE = rng.normal(size=(1, 1, layers, experts))
    topic_DPLE = rng.normal(size=(TOPICS, 1, layers, experts))
    chunk_DPLE = rng.normal(size=(TOPICS, CHUNKS, layers, experts))
    apart_DPLE = np.sqrt(workload.alike) * shared_DPLE + np.sqrt(1 - workload.alike) * topic_DPLE
    shares_DPLE = np.exp(workload.spread * apart_DPLE + workload.within * chunk_DPLE)
    shares_DPLE /= shares_DPLE.sum(axis=3, keepdims=True)
    counts = [rng.multinomial(CHUNK_TOKENS * top_k, share_E) for share_E in shares_DPLE.reshape(-1, experts)]
    return CountCorpus(
        counts_DPLE=np.array(counts, np.int64).reshape(shares_DPLE.shape),
        sources=tuple(f"{workload.name}, topic {topic + 1}" for topic in range(TOPICS)),
        top_k=top_k,
    )


def _made(key: DemandKey) -> tuple[TraceHeader, Iterator[TraceTarget]]:
    """Header and targets, each of a whole microbatch, in the order in which they run."""
    if key.workload not in WORKLOADS:
        raise ConfigError("workload", f"there is no {key.workload!r}", f"of {', '.join(WORKLOADS)}")
    paths = [Path(name) for name in key.routing.split(",") if name]
    if len(paths) == 1 and not is_corpus(paths[0]):
        if key.motion != AS_COUNTED:
            raise ConfigError("--routing", f"{paths[0]} is recorded: it moves as it does", "give counts of texts")
        return _recorded(key, TraceReader(paths[0], ids=False))
    shape = Shape(
        microbatches=key.microbatches,
        tokens=key.tokens,
        seed=key.seed,
        skew="paper",
        imbalance=key.imbalance,
        motion=key.motion,
    )
    corpus: CountCorpus | TokenCorpus
    if paths:
        corpus = _of_domain(read_corpus(paths), key.workload)
        _same_model(key, corpus.experts, corpus.top_k, str(paths[0]))
    else:
        corpus = generated_corpus(
            WORKLOADS[key.workload], layers=key.layers, experts=key.experts, top_k=key.top_k, seed=key.seed
        )
    made: CountWorkload | TokenWorkload
    if isinstance(corpus, CountCorpus) and key.imbalance == 1.0:
        made = CountWorkload(corpus, shape, np.full(corpus.layers, _EVEN_KAPPA))
    else:
        made = workload_of(corpus, shape)
    here = min(key.layers, made.header.layers)
    counts = (
        replace(target, ids_TK=None)
        for target in itertools.islice(made.targets(), key.steps * key.microbatches * made.header.layers)
        if target.target.layer < here
    )
    return replace(made.header, layers=here), counts


def _of_domain(corpus: CountCorpus | TokenCorpus, workload: str) -> CountCorpus | TokenCorpus:
    """The domain of that name where counts have one; else all of them."""
    if isinstance(corpus, TokenCorpus):
        return corpus
    named = [index for index, domain in enumerate(corpus.sources) if domain.split("_")[0] == workload]
    if not named:
        return corpus
    return replace(
        corpus, counts_DPLE=corpus.counts_DPLE[named], sources=tuple(corpus.sources[index] for index in named)
    )


def _same_model(key: DemandKey, experts: int, top_k: int, name: str) -> None:
    if (experts, top_k or key.top_k) != (key.experts, key.top_k):
        raise ConfigError(
            "--routing",
            f"{name} is of {experts} experts, top-{top_k}; the profile's model has {key.experts}, top-{key.top_k}",
            f"give another trace, or --set shape.experts={experts} --set shape.top_k={top_k}",
        )


def _recorded(key: DemandKey, reader: TraceReader) -> tuple[TraceHeader, Iterator[TraceTarget]]:
    """A recording's decode targets, numbered anew: only steps of which every layer is there."""
    header = reader.header
    _same_model(key, header.experts, header.top_k, str(reader.path))
    whole: dict[tuple[int, int], dict[int, I32]] = {}
    for row in reader:
        if row.demand_E is not None and int(row.demand_E.sum()) and row.phase.name == "DECODE":
            whole.setdefault((row.target.step, row.target.microbatch), {})[row.target.layer] = row.demand_E
    steps = [layers for _, layers in sorted(whole.items()) if len(layers) == header.layers]
    if not steps:
        raise ConfigError(
            "--routing", f"{reader.path} has no step of which every layer is there", "record a longer run"
        )
    wanted = min(len(steps), key.steps * key.microbatches)
    layers = min(key.layers, header.layers)
    targets = (
        TraceTarget(
            target=Target(layer, number % key.microbatches, number // key.microbatches), demand_E=steps[number][layer]
        )
        for number in range(wanted)
        for layer in range(layers)
    )
    made = TraceHeader(
        experts=header.experts,
        layers=layers,
        top_k=key.top_k,
        microbatches=key.microbatches,
        source=f"{reader.path.name}: {wanted} recorded steps; {header.source}",
    )
    return made, targets


def _stored(key: DemandKey, header: TraceHeader, targets: Iterable[TraceTarget], where: str | Path) -> StoredDemand:
    """The table. Raises ``TraceError`` where a layer of a step is not there, or met nothing."""
    rows: dict[int, dict[int, I32]] = {}
    for target in targets:
        if target.demand_E is not None and target.demand_E.any():
            row = target.target.step * key.microbatches + target.target.microbatch
            rows.setdefault(row, {})[target.target.layer] = target.demand_E
    if sorted(rows) != list(range(len(rows))) or not rows or any(len(row) != header.layers for row in rows.values()):
        raise TraceError(where, "a layer of a step is not there")
    # A model of more layers than were recorded meets them again.
    table_XLE = np.array(
        [[rows[row][layer % header.layers] for layer in range(key.layers)] for row in sorted(rows)], np.int32
    )
    return StoredDemand(table_XLE, microbatches=key.microbatches, top_k=key.top_k, source=header.source)
