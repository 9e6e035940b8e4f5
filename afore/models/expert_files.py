"""How a family's routed experts lie in its files, and how one of them is read out into gate|up rows and down.

Two ways are in use: three tensors an expert, or one fused tensor a layer of which an expert is a slice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from afore.models.expert_form import ExpertForm

if TYPE_CHECKING:
    import torch


class TensorSource(Protocol):
    """A checkpoint's tensors by name."""

    def read(self, name: str) -> torch.Tensor: ...

    def read_slice(self, name: str, index: int) -> torch.Tensor:
        """Row ``index`` of a tensor, without reading the others."""
        ...


@dataclass(frozen=True, slots=True)
class ExpertTensors:
    """One expert as read: gate and up [I, D], down [D, I], and the biases [I], [I], [D] of those that have them.

    ``names`` are those of the tensors that the parts were read of, part by part: gate, up, down, then the biases.
    """

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    names: tuple[str, ...]
    gate_bias: torch.Tensor | None = None
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


class ExpertFiles(Protocol):
    """The routed experts of one family on disk. ``layer`` is the model's layer index."""

    @property
    def fused(self) -> bool:
        """Whether the files hold the very tensors that the module holds."""
        ...

    def shapes(
        self, layer: int, *, num_experts: int, hidden_size: int, expert_size: int, form: ExpertForm
    ) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all tensors of a layer's routed experts."""
        ...

    def read(self, source: TensorSource, layer: int, expert: int, form: ExpertForm) -> ExpertTensors:
        """One expert. Raises ``CheckpointError``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PerExpertFiles:
    """Three tensors an expert: what nearly every family publishes."""

    prefix: str = "model.layers.{layer}.mlp.experts.{expert}."
    gate: str = "gate_proj.weight"
    up: str = "up_proj.weight"
    down: str = "down_proj.weight"
    fused: bool = False

    def names(self, layer: int, expert: int) -> tuple[str, str, str]:
        """Of gate [I, D], up [I, D] and down [D, I]."""
        prefix = self.prefix.format(layer=layer, expert=expert)
        return prefix + self.gate, prefix + self.up, prefix + self.down

    def shapes(
        self, layer: int, *, num_experts: int, hidden_size: int, expert_size: int, form: ExpertForm
    ) -> dict[str, tuple[int, ...]]:
        """See ``ExpertFiles``."""
        shapes: dict[str, tuple[int, ...]] = {}
        for expert in range(num_experts):
            gate, up, down = self.names(layer, expert)
            shapes[gate] = shapes[up] = (expert_size, hidden_size)
            shapes[down] = (hidden_size, expert_size)
        return shapes

    def read(self, source: TensorSource, layer: int, expert: int, form: ExpertForm) -> ExpertTensors:
        """See ``ExpertFiles``."""
        names = self.names(layer, expert)
        gate, up, down = (source.read(name) for name in names)
        return ExpertTensors(gate, up, down, names)


PER_EXPERT = PerExpertFiles()
"""As most families call them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InterleavedFiles:
    """Fused tensors with biases, matrices [in, out], gate in the even columns and up in the odd ones (gpt-oss)."""

    prefix: str = "model.layers.{layer}.mlp.experts."
    fused: bool = True

    def shapes(
        self, layer: int, *, num_experts: int, hidden_size: int, expert_size: int, form: ExpertForm
    ) -> dict[str, tuple[int, ...]]:
        """See ``ExpertFiles``."""
        assert form.biases, "interleaved experts have biases"
        prefix = self.prefix.format(layer=layer)
        return {
            prefix + "gate_up_proj": (num_experts, hidden_size, 2 * expert_size),
            prefix + "gate_up_proj_bias": (num_experts, 2 * expert_size),
            prefix + "down_proj": (num_experts, expert_size, hidden_size),
            prefix + "down_proj_bias": (num_experts, hidden_size),
        }

    def read(self, source: TensorSource, layer: int, expert: int, form: ExpertForm) -> ExpertTensors:
        """See ``ExpertFiles``."""
        prefix = self.prefix.format(layer=layer)
        gate_up, down = prefix + "gate_up_proj", prefix + "down_proj"
        gate_up_bias, down_bias = gate_up + "_bias", down + "_bias"
        gate_up_DF, bias_F = source.read_slice(gate_up, expert), source.read_slice(gate_up_bias, expert)
        return ExpertTensors(
            gate_up_DF[:, 0::2].T,
            gate_up_DF[:, 1::2].T,
            source.read_slice(down, expert).T,
            (gate_up, gate_up, down, gate_up_bias, gate_up_bias, down_bias),
            bias_F[0::2],
            bias_F[1::2],
            source.read_slice(down_bias, expert),
        )
