"""A cache too small for its requests: the real model, real roles, and every answer as if nobody else were there."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from afore.core.config import BatchOptions
from afore.core.topology import Topology
from afore.models.bundle import bundled_model_path, bundled_prompts
from afore.models.reference import Reference
from afore.models.tokenizer import Tokenizer
from tests.serving.http.served import CONFIG, Served, metric, serving

pytestmark = pytest.mark.slow

NEW_TOKENS = 40
TIGHT = dataclasses.replace(
    CONFIG,
    topology=Topology(attention=2, ffn=2, microbatches=2, redundant_slots=2),
    batch=BatchOptions(max_num_seqs=16, block_tokens=4, kv_blocks=40, prefill_chunk_tokens=16),
)
"""160 tokens of cache a worker, eight requests that end with 60 to 100 tokens each."""
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.9, "top_p": 0.95, "seed": 11},
    {"temperature": 1.0, "top_k": 40, "seed": 5, "repetition_penalty": 1.3},
    {"temperature": 0, "repetition_penalty": 1.2},
)


def prompts() -> list[list[int]]:
    tokenizer = Tokenizer(bundled_model_path())
    return [tokenizer.encode(prompt.prompt)[:60] for prompt in bundled_prompts()[:16]]


def answer(served: Served, body: dict[str, Any]) -> dict[str, Any]:
    """The choice, and the usage."""
    common = {"max_tokens": NEW_TOKENS, "ignore_eos": True, "logprobs": 2}
    reply = httpx.post(f"{served.url}/v1/completions", json={**common, **body}, timeout=300).json()
    (choice,) = reply["choices"]
    return {**choice, "usage": reply["usage"]}


def preemptions(served: Served) -> float:
    return metric(httpx.get(f"{served.url}/metrics").text, "afore_num_preemptions_total")


def test_preempted_requests_answer_as_if_they_were_alone() -> None:
    """Greedy, sampled, with repetition penalty; every second one with a stop string out of the middle of its answer."""
    texts = prompts()
    bodies = [{"prompt": ids, **SAMPLINGS[index % len(SAMPLINGS)]} for index, ids in enumerate(texts)]
    with serving(TIGHT) as served:
        for body in bodies[4:]:
            body["stop"] = answer(served, body)["text"][-20:-12]
        expected = [answer(served, body) for body in bodies]
        assert preemptions(served) == 0, "one request at a time needs nobody to go"
        with ThreadPoolExecutor(len(bodies)) as threads:
            answers = list(threads.map(lambda body: answer(served, body), bodies))
        assert preemptions(served) > 5
        assert metric(httpx.get(f"{served.url}/metrics").text, "afore_kv_cache_usage_perc") == 0
    for ours, alone in zip(answers, expected, strict=True):
        logprobs, known = ours.pop("logprobs"), alone.pop("logprobs")
        assert ours == alone
        assert logprobs["tokens"] == known["tokens"]
        assert logprobs["text_offset"] == known["text_offset"]
        assert logprobs["token_logprobs"] == pytest.approx(known["token_logprobs"], abs=1e-3)
    assert {ours["finish_reason"] for ours in answers} == {"stop", "length"}
    reference, tokenizer = Reference(bundled_model_path()), Tokenizer(bundled_model_path())
    tokens = reference.generate(texts[0], NEW_TOKENS, ignore_eos=True)
    assert answers[0]["text"] == tokenizer.decode(tokens)
