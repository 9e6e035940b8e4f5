"""A whole AFORE cluster in this process: an answer as it grows, and between its tokens the plans that move experts.

    python docs/examples/quickstart.py

Every role (engine, prefill, attention, FFN workers, scheduler) runs as a task of this process. Leave out ``inproc=True`` and each
becomes a process of its own; nothing else changes.
"""

from __future__ import annotations

import asyncio

from afore import Cluster, Topology
from afore.models.bundle import bundled_prompts

PROMPT = "Question: What is 3 * 4?\nAnswer:"
NEW_TOKENS = 12


async def main() -> None:
    topology = Topology(attention=1, ffn=2, redundant_slots=4)
    async with Cluster.start(topology, inproc=True) as cluster:
        watching = asyncio.create_task(print_plans(cluster))
        # Seven other requests share the microbatches, so that there is a load to even out.
        others = [asyncio.create_task(answer(cluster, other.prompt)) for other in bundled_prompts()[:28:4]]
        text = ""
        async for token in cluster.generate(PROMPT, max_new_tokens=NEW_TOKENS):
            text += token.text
            print(f"token {token.index:>2}: {token.text!r}")
        await asyncio.gather(*others)
        watching.cancel()
        tile = (await cluster.imbalance())["tile"]
        copies = (await cluster.stats())["migration"]["copies"]
    print(f"answer: {text.strip()}")
    print(f"tile imbalance: {tile['before']:.2f} before, {tile['after']:.2f} after, bound {tile['bound']:.2f}")
    print(f"expert copies: {copies}")


async def answer(cluster: Cluster, prompt: str) -> list[int]:
    """The token ids of one whole answer."""
    return [token.id async for token in cluster.generate(prompt, max_new_tokens=NEW_TOKENS)]


async def print_plans(cluster: Cluster) -> None:
    """One line for each plan that moves experts, as it is published."""
    async for plan in cluster.plans():
        if plan.copies:
            moves = ", ".join(f"expert {expert} → ffn-{worker}" for expert, worker, _slot in plan.copies)
            print(
                f"plan {plan.sequence:>3}: layer {plan.layer}, microbatch {plan.microbatch}, step {plan.step}: most loaded "
                f"worker {plan.max_tiles_before} → {plan.max_tiles_after} tiles (bound {plan.bound_tiles}); {moves}"
            )


if __name__ == "__main__":
    asyncio.run(main())
