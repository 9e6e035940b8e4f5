"""What computes attention on a GPU: ``transformers``' SDPA, or a library made for it, where it is installed and capable.

What a library asks for is here, and what a run offers: so the choice can be said in one line.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Library:
    """A library of attention kernels, and what it computes."""

    module: str
    dtypes: frozenset[str]
    capability: tuple[int, int]
    """Of the GPU, at least."""


LIBRARIES: Final = (
    Library("flash_attn", frozenset({"float16", "bfloat16"}), (8, 0)),
    Library("flashinfer", frozenset({"float16", "bfloat16"}), (7, 5)),
)


def attention_way(
    dtype: str, capability: tuple[int, int], installed: Callable[[str], object] = importlib.util.find_spec
) -> tuple[str, str]:
    """(``sdpa`` or a library's module, why) for a model that computes in ``dtype``."""
    reasons = []
    for library in LIBRARIES:
        if installed(library.module) is None:
            reasons.append(f"{library.module} is not installed")
        elif dtype not in library.dtypes:
            reasons.append(f"{library.module} computes {' and '.join(sorted(library.dtypes))}, not {dtype}")
        elif capability < library.capability:
            major, minor = library.capability
            reasons.append(f"{library.module} wants compute capability {major}.{minor}")
        else:
            return library.module, f"it is installed and computes {dtype}"
    return "sdpa", "; ".join(reasons)
