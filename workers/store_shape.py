"""Where everything lies in an FFN worker's expert store: sizes and offsets, from the model's numbers and the topology alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from afore.core.slots import PrimariesVector, StoreLayout
from afore.models.expert_form import SILU_GATED, ExpertForm

ALIGNMENT = 64
"""Of each array in the buffer, in bytes: a cache line, and more than any vector load wants."""
_F32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreShape:
    """Sizes and offsets of one worker's store."""

    num_layers: int
    """L, MoE layers."""
    num_primaries: int
    """Primaries of a layer on this worker."""
    num_redundant: int
    """R, redundant slots of a layer."""
    hidden_size: int
    """D."""
    expert_size: int
    """I."""
    form: ExpertForm = SILU_GATED
    """What else belongs to an expert, and what it computes."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_primaries", "num_redundant"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it cannot be negative")
        if self.hidden_size < 1 or self.expert_size < 1:
            raise ValueError(f"an expert of {self.hidden_size} x {self.expert_size} has no weights")

    @classmethod
    def of(
        cls,
        layout: StoreLayout,
        *,
        num_layers: int,
        hidden_size: int,
        expert_size: int,
        form: ExpertForm = SILU_GATED,
    ) -> StoreShape:
        """The shape of the store with this layout."""
        return cls(
            num_layers=num_layers,
            num_primaries=len(layout.primary_experts),
            num_redundant=layout.num_redundant,
            hidden_size=hidden_size,
            expert_size=expert_size,
            form=form,
        )

    @property
    def num_rows(self) -> int:
        """S."""
        return self.num_primaries + self.num_redundant

    @property
    def expert_nbytes(self) -> int:
        """Bytes of one expert: what a copy moves."""
        return self.form.elements(self.hidden_size, self.expert_size) * _F32_BYTES

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer; never 0, so that a worker without experts registers a region like all others."""
        return self.checksums_offset + max(ALIGNMENT, self.num_layers * self.num_primaries * 4)

    @property
    def checksums_offset(self) -> int:
        """Where the table of checksums begins, uint32 [L, primaries]."""
        return self.num_layers * self.layer_nbytes

    def gate_up_offset(self, layer: int) -> int:
        """Where ``gate_up`` of a layer begins."""
        return layer * self.layer_nbytes

    def down_offset(self, layer: int) -> int:
        """Where ``down`` of a layer begins."""
        return layer * self.layer_nbytes + self._gate_up_nbytes

    def gate_up_bias_offset(self, layer: int) -> int:
        """Where ``gate_up_bias`` of a layer begins; nothing lies there without biases."""
        return self.down_offset(layer) + self._down_nbytes

    def down_bias_offset(self, layer: int) -> int:
        """Where ``down_bias`` of a layer begins; nothing lies there without biases."""
        return self.gate_up_bias_offset(layer) + self._gate_up_bias_nbytes

    def primary_spans(self, layer: int, row: int) -> list[tuple[int, int]]:
        """(offset, bytes) of everything that belongs to the primary in ``row``, its checksum too."""
        up, down = 2 * self.expert_size, self.hidden_size
        wide, narrow = up * self.hidden_size * _F32_BYTES, down * self.expert_size * _F32_BYTES
        spans = [(self.gate_up_offset(layer) + row * wide, wide), (self.down_offset(layer) + row * narrow, narrow)]
        if self.form.biases:
            spans.append((self.gate_up_bias_offset(layer) + row * up * _F32_BYTES, up * _F32_BYTES))
            spans.append((self.down_bias_offset(layer) + row * down * _F32_BYTES, down * _F32_BYTES))
        spans.append((self.checksums_offset + (layer * self.num_primaries + row) * 4, 4))
        return spans

    @property
    def bias_rows(self) -> int:
        """S, or 0 for experts without biases."""
        return self.num_rows if self.form.biases else 0

    @property
    def layer_nbytes(self) -> int:
        """Bytes of a layer: all of it lies together."""
        biases = self._gate_up_bias_nbytes + _aligned(self.bias_rows * self.hidden_size * _F32_BYTES)
        return self._gate_up_nbytes + self._down_nbytes + biases

    @property
    def _gate_up_nbytes(self) -> int:
        return _aligned(self.num_rows * 2 * self.expert_size * self.hidden_size * _F32_BYTES)

    @property
    def _down_nbytes(self) -> int:
        return _aligned(self.num_rows * self.hidden_size * self.expert_size * _F32_BYTES)

    @property
    def _gate_up_bias_nbytes(self) -> int:
        return _aligned(self.bias_rows * 2 * self.expert_size * _F32_BYTES)


def store_shapes(
    primaries_E: PrimariesVector,
    num_redundant_N: Sequence[int],
    *,
    num_layers: int,
    hidden_size: int,
    expert_size: int,
    form: ExpertForm = SILU_GATED,
) -> list[tuple[StoreLayout, StoreShape]]:
    """Layout and shape of every worker's store: what each can compute about all others. ``num_redundant_N``: R of each worker."""
    stores = []
    for rank, num_redundant in enumerate(num_redundant_N):
        layout = StoreLayout(primaries_E, rank, int(num_redundant))
        shape = StoreShape.of(
            layout, num_layers=num_layers, hidden_size=hidden_size, expert_size=expert_size, form=form
        )
        stores.append((layout, shape))
    return stores


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
