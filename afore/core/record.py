"""``@record``: a dataclass that nobody changes, cheap enough to be made for every target.

A frozen dataclass sets each field through ``object.__setattr__``: seven fields take five times as long as plain assignment, and a
target makes dozens of such objects on its way. A record is frozen for the type checker, which is where it is held to it; at run
time it is an ordinary dataclass with slots. Configuration stays truly frozen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, dataclass_transform, overload

T = TypeVar("T")


@overload
def record(cls: type[T], /) -> type[T]: ...


@overload
def record(*, kw_only: bool = False, order: bool = False) -> Callable[[type[T]], type[T]]: ...


@dataclass_transform(frozen_default=True, eq_default=True)
def record(
    cls: type[T] | None = None, /, *, kw_only: bool = False, order: bool = False
) -> type[T] | Callable[[type[T]], type[T]]:
    """A dataclass with slots, equality and a hash of its fields; frozen by convention and by the type checker."""

    def make(cls: type[T]) -> type[T]:
        return dataclass(slots=True, unsafe_hash=True, kw_only=kw_only, order=order)(cls)

    return make if cls is None else make(cls)
