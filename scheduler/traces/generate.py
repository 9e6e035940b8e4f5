"""Targets out of real routing, as a server's microbatches would demand them; the same seed makes the same targets.

They come in the order in which M microbatches in flight run: step by step, layer by layer, microbatch by microbatch.
"""

from __future__ import annotations

from afore.scheduler.traces.corpus import CountCorpus, TokenCorpus
from afore.scheduler.traces.count_workload import CountWorkload
from afore.scheduler.traces.shape import Shape
from afore.scheduler.traces.token_workload import TokenWorkload


def workload_of(corpus: TokenCorpus | CountCorpus, shape: Shape) -> TokenWorkload | CountWorkload:
    """The generator for what is known."""
    return TokenWorkload(corpus, shape) if isinstance(corpus, TokenCorpus) else CountWorkload(corpus, shape)
