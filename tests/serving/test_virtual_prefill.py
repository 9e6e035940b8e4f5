"""Chunked prefill and tiny caches in virtual time: the real roles, exact times, prescribed tokens."""

from __future__ import annotations

import dataclasses
import random

import pytest

from afore.core.config import BatchOptions
from afore.core.errors import RoleLost
from afore.core.topology import Topology
from afore.serving.virtual import Ask, Emulation, run_emulated
from tests.serving.virtual_cases import FFN_BOUND, QUIET, SMALL, SPEC, prescribed

pytestmark = pytest.mark.slow

CHUNK, LONG = 100, 2000
CHUNK_US = 1000.0
"""What a whole chunk costs."""
PREFILL = dataclasses.replace(FFN_BOUND, name="ten microseconds a token", prefill_token_us=CHUNK_US / CHUNK)
EMULATION = dataclasses.replace(QUIET, record=True, profiles={"prefill": PREFILL})


def first_tokens_us(asks: list[Ask], chunk: int, emulation: Emulation = EMULATION) -> list[float]:
    """Time of each request's first token after its submission; checks all tokens."""
    topology = dataclasses.replace(SMALL.topology, prefill=1)
    batch = BatchOptions(max_num_seqs=12, block_tokens=16, kv_blocks=200, prefill_chunk_tokens=chunk)
    config = dataclasses.replace(SMALL, topology=topology, batch=batch)
    run = run_emulated(config, asks, emulation)
    assert run.tokens == prescribed(asks, config)
    firsts = {r.args["request"]: r.start_ns for r in run.log.records("token", "client") if r.args["index"] == 0}
    began_ns = min(r.start_ns for r in run.log.records("prefill", "prefill"))
    return [(firsts[number] - began_ns) / 1e3 - ask.at_us for number, ask in enumerate(asks)]


def ask(length: int, new_tokens: int, at_us: float = 0.0) -> Ask:
    prompt = tuple((5 * j + length) % SPEC.vocab_size for j in range(length))
    return Ask(prompt=prompt, max_new_tokens=new_tokens, at_us=at_us)


def test_short_prompts_do_not_wait_for_a_long_one() -> None:
    """A prompt of 20 chunks, and short ones of a tenth of a chunk that come while it runs."""
    asks = [ask(LONG, 4), *(ask(8 + n, 4, 500.0 + 2500.0 * n) for n in range(6))]
    chunked, whole = first_tokens_us(asks, CHUNK), first_tokens_us(asks, 0)
    assert max(chunked[1:]) < 2.5 * CHUNK_US
    assert max(whole[1:]) > 15 * CHUNK_US
    # The long one pays for what the short ones took, and nothing else.
    assert chunked[0] < whole[0] + 6 * 0.2 * CHUNK_US


def test_a_stream_of_short_prompts_does_not_starve_a_long_one() -> None:
    """Short ones come as fast as prefill can run them."""
    asks = [ask(LONG, 2), *(ask(CHUNK - 1, 1, 1000.0 * n) for n in range(60))]
    chunked = first_tokens_us(asks, CHUNK)
    assert chunked[0] < 2.2 * LONG / CHUNK * CHUNK_US


def test_the_deadline_of_a_prompt_is_for_each_chunk() -> None:
    """A prompt that takes twice the deadline."""
    token_us = 2 * SMALL.times.step_s * 1e6 / LONG
    slow = dataclasses.replace(PREFILL, prefill_token_us=token_us)
    emulation = dataclasses.replace(EMULATION, profiles={"prefill": slow})
    assert first_tokens_us([ask(LONG, 1)], CHUNK, emulation)[0] > 1.9 * SMALL.times.step_s * 1e6
    with pytest.raises(RoleLost, match=r"prefill-0.*the next chunk of a prompt has not come"):
        first_tokens_us([ask(LONG, 1)], 0, emulation)


@pytest.mark.parametrize("seed", range(6))
def test_tiny_caches_and_chunks_change_no_token(seed: int) -> None:
    """More requests than the caches hold, some of which are left by their clients; steps and prefills run side by side."""
    numbers = random.Random(seed)
    topology = Topology(attention=numbers.randint(1, 2), ffn=2, microbatches=numbers.randint(1, 3), prefill=2)
    batch = BatchOptions(
        max_num_seqs=12, block_tokens=2, kv_blocks=20, prefill_chunk_tokens=numbers.choice([0, 1, 3, 8])
    )
    config = dataclasses.replace(SMALL, topology=topology, batch=batch)
    slow = dataclasses.replace(PREFILL, prefill_us=numbers.choice([1.0, 200.0]))
    asks = [
        Ask(
            prompt=tuple(numbers.randrange(256) for _ in range(numbers.randint(1, 16))),
            max_new_tokens=numbers.randint(1, 24),
            at_us=numbers.uniform(0, 2000),
            leaves_after=numbers.choice([None, None, None, 1, 7]),
        )
        for _ in range(20)
    ]
    run = run_emulated(config, asks, dataclasses.replace(EMULATION, profiles={"prefill": slow}), seed=seed)
    for ask, tokens, expected in zip(asks, run.tokens, prescribed(asks, config), strict=True):
        assert tokens == (expected if ask.leaves_after is None else expected[: ask.leaves_after])
    prefills = sum(record.args["tokens"] for record in run.log.records("prefill", "prefill"))
    assert prefills > sum(len(ask.prompt) for ask in asks), "nobody was preempted"
