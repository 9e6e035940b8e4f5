"""Recorded routing as demand for the planner's bench, brought to the paper's skew; which files, and what came out, is said.

Two kinds of ``.npz`` are read: per-token routing in text order, ``ids`` [tokens, L, K]; and tokens per expert of chunks of text,
``<domain>_cnt`` [chunks, L, E]. Letters: G layers (or sets of layers side by side), P places in the text.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from afore.core.errors import ConfigError

WINDOW_TOKENS: Final = 256
"""Of text behind one target's shares."""
PLACES: Final = 100
"""Windows of a layer, evenly over the text."""
WANTED_EXPERTS: Final = 128
"""Layers of fewer experts are put side by side until they have as many: no public per-token trace has 128."""
SKEW: Final = 1.70
SKEW_WORKERS: Final = 8
HOT_PART: Final = 0.244
HOT_ONE_OF: Final = 16
"""The paper (GLM-4.5-Air, 128 experts): the most loaded of 8 workers has 1.70 times the mean, the eight hottest experts, one in 16,
have 24.4 % of the pairs. Its worst layer (3.3) and its hottest expert (5.2 times the mean) come out as they do."""

Shares = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Shares of experts, target after target: one layer through the text, then the next."""

    shares_XE: Shares
    text: str
    """Where they come from, what was done to them, and how skewed they are."""

    @property
    def experts(self) -> int:
        """E."""
        return int(self.shares_XE.shape[1])

    def demands(self, *, pairs: int, targets: int, seed: int) -> NDArray[np.int64]:
        """[targets, E] pairs, drawn from the shares; these begin anew where there are more targets."""
        rng = np.random.default_rng(seed)
        X = len(self.shares_XE)
        return np.array([rng.multinomial(pairs, self.shares_XE[x % X]) for x in range(targets)], np.int64)


def read_traces(path: Path, *, seed: int) -> Recorded:
    """The recorded routing in a file, or in all files of a folder (per-token routing first, else counts), as skewed as the paper's.

    Raises ``ConfigError`` where there is none, or a file is damaged.
    """
    paths = sorted(path.rglob("*.npz")) if path.is_dir() else [path]
    ids: list[tuple[str, NDArray[np.int64]]] = []
    counts: list[tuple[str, Shares]] = []
    for one in paths:
        found = _read(one)
        ids += [(one.name, values) for name, values in found.items() if name == "ids"]
        # Chunks one after another, domain after domain: [P, L, E].
        domains = [values.astype(np.float64) for name, values in found.items() if name.endswith("_cnt")]
        if domains:
            counts.append((one.name, _joined(one.name, domains)))
    if ids:
        names, shares_GPE, what = _of_tokens(ids)
    elif counts:
        names = [name for name, _ in counts]
        shares_GPE = np.moveaxis(_joined(", ".join(names), [values for _, values in counts]), 1, 0)
        what = (
            f"{shares_GPE.shape[0]} layers of {shares_GPE.shape[2]} experts, {shares_GPE.shape[1]} chunks of text each"
        )
    else:
        raise ConfigError(
            "--traces",
            f"{path} has no recorded routing",
            "give an .npz with ids [tokens, layers, K] or <domain>_cnt [chunks, layers, experts], or a folder with such files",
        )
    if not (shares_GPE.sum(axis=2) > 0).all():
        raise ConfigError("--traces", f"{', '.join(names)}: a layer of a chunk counts no token", "leave the file out")
    shares_GPE, how = calibrated(normal(shares_GPE), seed)
    skew_GP = skew(shares_GPE, SKEW_WORKERS)
    return Recorded(
        shares_XE=shares_GPE.reshape(-1, shares_GPE.shape[2]),
        text=(
            f"{' then '.join(names)}: {what}; {how}: one expert in {HOT_ONE_OF} has {hot_part(shares_GPE):.1%}, the hottest"
            f" {_hottest(shares_GPE):.1f} times the mean; most loaded of {SKEW_WORKERS} workers {skew_GP.mean():.2f} times"
            f" the mean, in the worst layer {skew_GP.mean(axis=1).max():.2f}; seed {seed}"
        ),
    )


def _read(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a file that may be routing; none of another file's."""
    try:
        # numpy leaves a file open that it cannot read.
        with open(path, "rb") as file, np.load(file) as archive:
            wanted = [name for name in archive.files if name == "ids" or name.endswith("_cnt")]
            found = {name: archive[name] for name in wanted}
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ConfigError("--traces", f"{path} cannot be read: {error}", "give an .npz file, or a folder") from error
    return {
        name: values for name, values in found.items() if values.ndim == 3 and values.dtype.kind in "iu" and values.size
    }


def _joined(names: str, parts: list[Shares]) -> Shares:
    if len({part.shape[1:] for part in parts}) > 1:
        raise ConfigError("--traces", f"{names}: numbers of layers or experts differ", "name one file")
    return np.concatenate(parts)


def _of_tokens(ids: list[tuple[str, NDArray[Any]]]) -> tuple[list[str], Shares, str]:
    """(files, shares [G, P, E], in words). Only files of the first one's layers and K are taken."""
    shape = ids[0][1].shape[1:]
    taken = [(name, values) for name, values in ids if values.shape[1:] == shape]
    ids_TLK = np.concatenate([values for _, values in taken]).astype(np.int64)
    experts = 1 << (int(ids_TLK.max())).bit_length()
    layers = ids_TLK.shape[1]
    side = max(1, min(layers, WANTED_EXPERTS // experts))
    groups, window = layers // side, min(WINDOW_TOKENS, len(ids_TLK))
    starts = np.linspace(0, len(ids_TLK) - window, PLACES).astype(int)
    shares_GPE = np.zeros((groups, PLACES, side * experts))
    for g in range(groups):
        # Far apart, so that two layers side by side are no near copies of each other.
        side_TK = np.concatenate([ids_TLK[:, g + s * groups] + s * experts for s in range(side)], axis=1)
        for p, start in enumerate(starts):
            shares_GPE[g, p] = np.bincount(side_TK[start : start + window].reshape(-1), minlength=side * experts)
    what = f"{layers} layers of {experts} experts" + (f", {side} side by side: {side * experts}" if side > 1 else "")
    return [name for name, _ in taken], shares_GPE, f"{what}, {PLACES} windows of {window} tokens in text order each"


# Skew


def calibrated(shares_GPE: Shares, seed: int) -> tuple[Shares, str]:
    """(shares, in words): as hot as the paper's experts, and as unevenly spread over workers.

    One exponent for all sets how much the hottest experts have. Then each layer's experts are put in order of their mean share
    blurred by noise: the less noise, the more hot ones share a worker. Layers differ, as the paper's do: from no noise at all
    to twice the stated one. Experts stay what they are in all targets of a layer.
    """
    exponent = _bisect(lambda power: hot_part(normal(shares_GPE**power)) - HOT_PART, 0.05, 8.0)
    shares_GPE = normal(shares_GPE**exponent)
    heat_GE = np.log(shares_GPE.mean(axis=1) + 1e-9)  # an expert that is never chosen is coldest
    rng = np.random.default_rng(seed)
    noise_GE = rng.normal(size=heat_GE.shape) * heat_GE.std(axis=1, keepdims=True)
    noise_GE *= rng.permutation(np.linspace(0.0, 2.0, len(heat_GE)))[:, None]

    def ordered(blur: float) -> Shares:
        order_GE = np.argsort(-(heat_GE + blur * noise_GE), axis=1, kind="stable")
        return np.take_along_axis(shares_GPE, order_GE[:, None, :], axis=2)

    # The skew falls with the blur in steps, not evenly: the nearest of a grid.
    workers = min(SKEW_WORKERS, shares_GPE.shape[2])
    blur = min(np.linspace(0.0, 6.0, 121).tolist(), key=lambda blur: abs(skew(ordered(blur), workers).mean() - SKEW))
    return ordered(blur), f"shares to the power {exponent:.2f}, experts ordered by heat with noise {blur:.2f}"


def normal(shares_GPE: Shares) -> Shares:
    """Sums of 1."""
    found: Shares = shares_GPE / shares_GPE.sum(axis=2, keepdims=True)
    return found


def hot_part(shares_GPE: Shares) -> float:
    """What the hottest experts of each target have, one in ``HOT_ONE_OF``; mean over targets."""
    hot = max(1, shares_GPE.shape[2] // HOT_ONE_OF)
    return float(np.partition(shares_GPE, -hot, axis=2)[:, :, -hot:].sum(axis=2).mean())


def skew(shares_GPE: Shares, num_workers: int) -> Shares:
    """[G, P] most loaded worker / mean, experts in order on workers, as evenly as their number allows."""
    edges = np.arange(num_workers) * shares_GPE.shape[2] // num_workers
    loads_GPN = np.add.reduceat(shares_GPE, edges, axis=2)
    found: Shares = loads_GPN.max(axis=2) / loads_GPN.mean(axis=2)
    return found


def _hottest(shares_GPE: Shares) -> float:
    return float(shares_GPE.max(axis=2).mean() * shares_GPE.shape[2])


def _bisect(rising: Callable[[float], float], low: float, high: float) -> float:
    """Where a function that rises crosses zero, as near as its steps allow."""
    for _ in range(30):
        middle = (low + high) / 2
        if rising(middle) < 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2
