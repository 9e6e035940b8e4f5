"""Recorded routing as demand for the planner's bench, brought to the paper's skew; which files, and what came out, is said.

Two kinds of ``.npz`` are read: per-token routing in text order, ``ids`` [tokens, L, K]; and tokens per expert of chunks of text,
``<domain>_cnt`` [chunks, L, E]. Letters: G layers (or sets of layers side by side), P places in the text.
"""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from afore.core.errors import ConfigError
from afore.scheduler.traces.calibrate import Shares, calibrated, in_words, normal

WINDOW_TOKENS: Final = 256
"""Of text behind one target's shares."""
PLACES: Final = 100
"""Windows of a layer, evenly over the text."""
WANTED_EXPERTS: Final = 128
"""Layers of fewer experts are put side by side until they have as many: no public per-token trace has 128."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Shares of experts, of every layer at every place."""

    shares_GPE: Shares
    text: str
    """Where they come from, what was done to them, and how skewed they are."""

    @property
    def experts(self) -> int:
        """E."""
        return int(self.shares_GPE.shape[2])

    def demands(self, *, pairs: int, targets: int, seed: int) -> NDArray[np.int64]:
        """[targets, E] pairs, drawn from the shares: each layer on its way through the text, then the next one.

        All layers have their part, however few targets there are; where there are more than shares, these begin anew.
        """
        rng = np.random.default_rng(seed)
        G, _, E = self.shares_GPE.shape
        shares_XE = self.shares_GPE[:, : -(-targets // G)].reshape(-1, E)
        return np.array([rng.multinomial(pairs, shares_XE[x % len(shares_XE)]) for x in range(targets)], np.int64)


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
    return Recorded(
        shares_GPE=shares_GPE,
        text=f"{' then '.join(names)}: {what}; {how}: {in_words(shares_GPE)}; seed {seed}",
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
