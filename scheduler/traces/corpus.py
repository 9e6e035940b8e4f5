"""Real routing as it was published: experts of every token, or tokens of every expert by chunk of text; read, not yet a workload.

Files are ``.npz``: ``ids`` [tokens, L, K] in text order, with ``sample_lens`` where it is cut into documents; or ``<domain>_cnt``
[chunks, L, E]. Or ``.npy`` [tokens, L, K], as vLLM returns a request's ``routed_experts``. Layers without a choice (all zero) are
dense ones, and left out. Letters: G tokens of a text, L layers, K experts per token, P chunks, E experts.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from afore.core.errors import ConfigError
from afore.scheduler.traces.files import regular
from afore.scheduler.traces.npy import array_of, header_of
from afore.scheduler.traces.records import MOST_EXPERTS, MOST_LAYERS, MOST_TOP_K, TraceError

MOST_BYTES: Final = 1 << 30
"""Of an array, unpacked."""
_SUFFIX: Final = "_cnt"
_GIVE = "give ids [tokens, layers, K], or <domain>_cnt [chunks, layers, experts]"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCorpus:
    """Experts of every token."""

    ids_GLK: NDArray[np.integer[Any]]
    experts: int
    """E."""
    starts: NDArray[np.int64]
    """Where each document begins; the last one ends with the tokens."""
    source_of: NDArray[np.int64]
    """Each document's file."""
    sources: tuple[str, ...]

    @property
    def layers(self) -> int:
        """L."""
        return int(self.ids_GLK.shape[1])

    @property
    def top_k(self) -> int:
        """K."""
        return int(self.ids_GLK.shape[2])

    @property
    def ends(self) -> NDArray[np.int64]:
        """Where each document ends."""
        return np.append(self.starts[1:], len(self.ids_GLK))


@dataclass(frozen=True, slots=True, kw_only=True)
class CountCorpus:
    """Tokens of every expert, for chunks of text of several domains."""

    counts_DPLE: NDArray[np.int64]
    sources: tuple[str, ...]
    """The domains."""
    top_k: int
    """K, where the file says how many tokens its chunks have; else 0."""

    @property
    def experts(self) -> int:
        """E."""
        return int(self.counts_DPLE.shape[3])

    @property
    def layers(self) -> int:
        """L."""
        return int(self.counts_DPLE.shape[2])


def read_corpus(paths: Sequence[str | Path], *, experts: int | None = None) -> TokenCorpus | CountCorpus:
    """The routing in one file, or in several of one kind and shape, one after another.

    ``experts``: E, where the ids alone do not say it (none: the next power of two). Raises ``TraceError`` naming file and reason.
    """
    found = [(Path(path), _arrays(Path(path))) for path in paths]
    if not found:
        raise ConfigError("traces", "none is named", "name an .npz")
    if all("ids" in arrays for _, arrays in found):
        return _of_tokens(found, experts)
    if all("ids" not in arrays for _, arrays in found):
        return _of_counts(found)
    odd = next(path for path, arrays in found if ("ids" in arrays) != ("ids" in found[0][1]))
    raise TraceError(odd, f"it is of another kind than {found[0][0]}", "give tokens' experts, or counts")


def is_corpus(path: str | Path) -> bool:
    """Whether the file is of one of these kinds."""
    try:
        if Path(path).suffix == ".npy":
            with open(path, "rb") as file:
                return len(header_of(file)[0]) == 3
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError):
        return False
    return "ids.npy" in names or any(name.endswith(f"{_SUFFIX}.npy") for name in names)


def _arrays(path: Path) -> dict[str, NDArray[Any]]:
    """What may be routing in an ``.npz``; nothing else of it is unpacked."""
    found: dict[str, NDArray[Any]] = {}
    try:
        if path.suffix == ".npy":
            if (size := regular(path).st_size) > MOST_BYTES:
                raise TraceError(path, f"it has {size:,} bytes", f"this reads at most {MOST_BYTES:,}")
            return {"ids": array_of(path.read_bytes())}
        regular(path)
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                name = info.filename.removesuffix(".npy")
                if name not in ("ids", "sample_lens") and not name.endswith((_SUFFIX, "_tokens")):
                    continue
                if info.file_size > MOST_BYTES:
                    raise TraceError(path, f"{name} has {info.file_size:,} bytes", f"this reads at most {MOST_BYTES:,}")
                with archive.open(info) as member:
                    found[name] = array_of(member.read(info.file_size + 1))
    except OSError as error:
        raise TraceError(path, f"cannot be read: {error.strerror or error}", "name an .npz file") from error
    except TraceError:
        raise
    except Exception as error:  # zipfile and zlib have a dozen ways to say that bytes are damaged
        raise TraceError(path, f"cannot be read: {error}", "name an .npz file") from error
    if "ids" not in found and not any(name.endswith(_SUFFIX) for name in found):
        raise TraceError(path, "it has no routing", _GIVE)
    return found


def _of_tokens(found: Sequence[tuple[Path, dict[str, NDArray[Any]]]], experts: int | None) -> TokenCorpus:
    parts: list[NDArray[Any]] = []
    starts, source_of = [], []
    base = 0
    for number, (path, arrays) in enumerate(found):
        ids_GLK = arrays["ids"]
        shape = ids_GLK.shape
        if ids_GLK.dtype.kind not in "iu" or len(shape) != 3 or 0 in shape:
            raise TraceError(path, f"ids is {ids_GLK.dtype} of shape {shape}", "give whole numbers [tokens, layers, K]")
        if shape[1] > MOST_LAYERS or shape[2] > MOST_TOP_K:
            raise TraceError(path, f"ids has shape {shape}", f"at most {MOST_LAYERS} layers and K of {MOST_TOP_K}")
        wide = found[0][1]["ids"].shape[1:]
        if wide != shape[1:]:
            raise TraceError(path, f"it has {shape[1:]} layers and K, {found[0][0]} {wide}", "give one model's")
        ids_GLK = _without_dense(ids_GLK)
        _check_ids(path, ids_GLK, experts)
        lens = _lens(path, arrays.get("sample_lens"), len(ids_GLK))
        begins = base + np.concatenate(([0], np.cumsum(lens)[:-1]))
        starts.append(begins)
        source_of.append(np.full(len(begins), number))
        parts.append(ids_GLK)
        base += len(ids_GLK)
    if len({part.shape[1] for part in parts}) > 1:
        raise TraceError(found[0][0], "its dense layers are not those of the other files", "give one model's")
    joined = np.concatenate(parts)
    return TokenCorpus(
        ids_GLK=joined,
        experts=experts or 1 << int(joined.max()).bit_length(),
        starts=np.concatenate(starts).astype(np.int64),
        source_of=np.concatenate(source_of),
        sources=tuple(path.stem for path, _ in found),
    )


def _without_dense(ids_GLK: NDArray[Any]) -> NDArray[Any]:
    chosen_L = ids_GLK.any(axis=(0, 2)) if ids_GLK.shape[2] > 1 else np.ones(ids_GLK.shape[1], np.bool_)
    return ids_GLK if chosen_L.all() or not chosen_L.any() else ids_GLK[:, chosen_L]


def _check_ids(path: Path, ids_GLK: NDArray[Any], experts: int | None) -> None:
    most = experts or MOST_EXPERTS
    if int(ids_GLK.min()) < 0 or int(ids_GLK.max()) >= most:
        wrong_G = ((ids_GLK < 0) | (ids_GLK >= most)).any(axis=(1, 2))
        row = int(np.flatnonzero(wrong_G)[0])
        raise TraceError(
            path, f"its experts {ids_GLK[row].reshape(-1)[:12].tolist()}… are none of 0 to {most - 1}", row=row
        )
    ordered = np.sort(ids_GLK, axis=2)
    twice_G = (ordered[:, :, 1:] == ordered[:, :, :-1]).any(axis=(1, 2))
    if twice_G.any():
        row = int(np.flatnonzero(twice_G)[0])
        raise TraceError(path, "an expert is chosen twice in one layer", "give each token's K experts", row=row)


def _lens(path: Path, lens: NDArray[Any] | None, tokens: int) -> NDArray[np.int64]:
    if lens is None:
        return np.array([tokens])
    if lens.dtype.kind not in "iu" or lens.ndim != 1 or (lens <= 0).any() or int(lens.sum()) != tokens:
        raise TraceError(
            path, f"sample_lens does not cut its {tokens:,} tokens into documents", "leave it out, or mend it"
        )
    return lens.astype(np.int64)


def _of_counts(found: Sequence[tuple[Path, dict[str, NDArray[Any]]]]) -> CountCorpus:
    domains: dict[str, NDArray[np.int64]] = {}
    top_k = 0
    for path, arrays in found:
        for name, counts_PLE in arrays.items():
            if not name.endswith(_SUFFIX):
                continue
            _check_domain(path, name, counts_PLE)
            first = next(iter(domains.values()), counts_PLE)
            if first.shape[1:] != counts_PLE.shape[1:]:
                raise TraceError(path, f"{name} has layers and experts {counts_PLE.shape[1:]}, not {first.shape[1:]}")
            domain = name.removesuffix(_SUFFIX)
            if domain in domains:
                raise TraceError(path, f"{name} is in a file before it too", "give each domain once")
            domains[domain] = counts_PLE.astype(np.int64)
            tokens = arrays.get(f"{domain}_tokens")
            if (
                tokens is not None
                and tokens.shape == counts_PLE.shape[:1]
                and tokens.dtype.kind in "iu"
                and (tokens > 0).all()
            ):
                top_k = round(float((domains[domain].sum(axis=2) / tokens[:, None]).mean()))
    fewest = min(len(counts) for counts in domains.values())
    return CountCorpus(
        counts_DPLE=np.stack([counts[:fewest] for counts in domains.values()]), sources=tuple(domains), top_k=top_k
    )


def _check_domain(path: Path, name: str, counts_PLE: NDArray[Any]) -> None:
    shape = counts_PLE.shape
    if counts_PLE.dtype.kind not in "iu" or len(shape) != 3 or 0 in shape:
        raise TraceError(
            path, f"{name} is {counts_PLE.dtype} of shape {shape}", "give whole numbers [chunks, layers, experts]"
        )
    if shape[1] > MOST_LAYERS or shape[2] > MOST_EXPERTS:
        raise TraceError(path, f"{name} has shape {shape}", f"at most {MOST_LAYERS} layers of {MOST_EXPERTS} experts")
    wrong_P = (counts_PLE < 0).any(axis=(1, 2)) | (counts_PLE.sum(axis=2, dtype=np.float64) <= 0).any(axis=1)
    if wrong_P.any():
        row = int(np.flatnonzero(wrong_P)[0])
        raise TraceError(
            path, f"{name}: a chunk's layer counts no token, or one below 0", "leave the chunk out", row=row
        )
