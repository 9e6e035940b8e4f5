"""The shapes of everything that several roles write into or map, computed by each of them from the same two things.

One formula in one place: roles that disagree by a byte would read garbage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from afore.core.config import RunConfig
from afore.transport.exchange import ExchangeLayout
from afore.transport.feedback import FeedbackLayout
from afore.transport.input_mirror import MirrorLayout
from afore.transport.mailbox import MailboxLayout
from afore.transport.ring_layout import RingLayout


class ModelShape(Protocol):
    """The numbers of a model that the wire depends on; ``ModelSpec`` has them."""

    @property
    def num_experts(self) -> int: ...

    @property
    def experts_per_token(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Layouts:
    """Shapes of the regions of one run."""

    mailbox: MailboxLayout
    """Scheduler's "mailbox": demand vectors; and its "predictions", where the policy wants them."""
    ring: RingLayout
    """Scheduler's "ring": plans."""
    exchange: ExchangeLayout
    """Each attention worker's "exchange": its inputs and the replies to them."""
    feedback: FeedbackLayout
    """Scheduler's "feedback"."""
    mirror: MirrorLayout
    """"inputs" of the lead of a node with FFN workers: what attention workers of other nodes write."""


def ring_slots(num_microbatches: int) -> int:
    """Entries the ring holds. Each microbatch has one target in flight; the rest is room for COPIES and ABORT entries, and for a
    reader that falls behind without stopping the writer at once.
    """
    return max(16, 4 * num_microbatches + 8)


def layouts_for(config: RunConfig, model: ModelShape) -> Layouts:
    """The shapes that ``config`` and ``model`` ask for. Raises ``ConfigError`` for one that cannot be."""
    topology = config.topology
    exchange = ExchangeLayout(
        num_microbatches=topology.microbatches,
        num_ffn=topology.ffn,
        max_tokens=config.max_tokens_per_worker,
        hidden=model.hidden_size,
        top_k=model.experts_per_token,
    )
    return Layouts(
        mailbox=MailboxLayout(topology.attention, topology.microbatches, model.num_experts),
        ring=RingLayout(
            num_readers=topology.ffn,
            num_slots=ring_slots(topology.microbatches),
            num_attention=topology.attention,
            max_shares=sum(topology.slots_N),
            # Baselines do not plan by B; what they copy at once is spread over entries of this size.
            max_copies=max(config.copy_budget, 8, topology.ffn),
            num_experts=model.num_experts,
            num_redundant=max(topology.slots_N),
        ),
        exchange=exchange,
        feedback=FeedbackLayout(num_workers=topology.ffn),
        mirror=MirrorLayout(topology.attention, exchange),
    )
