"""Clients that go away: their KV blocks come back, everybody else gets exact tokens."""

from __future__ import annotations

import asyncio
import json
import random

import httpx
import pytest

from afore.cluster import complete_all
from afore.models.bundle import bundled_prompts
from tests.serving.http.served import PATIENCE_S, SMALL, Served, metric, serving

pytestmark = pytest.mark.slow

LONG = {"prompt": "Hello", "max_tokens": 1000, "ignore_eos": True, "temperature": 0}
"""More than half of the cache: two of them do not fit at once."""


async def idle(http: httpx.AsyncClient) -> None:
    """Returns once nothing runs, nothing waits and no block is held."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            text = (await http.get("/metrics")).text
            names = ("afore_num_requests_running", "afore_num_requests_waiting", "afore_kv_cache_usage_perc")
            if not any(metric(text, name) for name in names):
                return


async def test_a_client_that_goes_away_frees_its_blocks() -> None:
    with serving(SMALL) as served:
        async with httpx.AsyncClient(base_url=served.url, timeout=PATIENCE_S) as http:
            for number in range(3):
                async with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as stream:
                    lines = stream.aiter_lines()
                    for _ in range(2 * number + 1):
                        await anext(lines)
                    text = (await http.get("/metrics")).text
                    assert 0 < metric(text, "afore_kv_cache_usage_perc") <= 1
                    assert metric(text, "afore_num_requests_running") == 1
                await idle(http)
            plain = asyncio.create_task(http.post("/v1/completions", json=LONG))
            while metric((await http.get("/metrics")).text, "afore_num_requests_running") == 0:
                pass
            plain.cancel()
            await asyncio.gather(plain, return_exceptions=True)
            await idle(http)
            text = (await http.get("/metrics")).text
            assert metric(text, 'afore_request_success_total{finished_reason="abort"}') == 4
            # The worker's own allocator has all of them back: this one needs them.
            whole = await http.post("/v1/completions", json={**LONG, "prompt": [5] * 980, "max_tokens": 40})
            assert whole.json()["usage"]["completion_tokens"] == 40


async def test_a_storm_of_clients_of_which_a_third_disconnects(served: Served) -> None:
    await storm(served, clients=45, seed=1)


async def storm(served: Served, *, clients: int, seed: int) -> None:
    """Streaming clients of mixed lengths at once; every third leaves at random. Raises where another's text is not exact."""
    prompts = [prompt.prompt for prompt in bundled_prompts()]
    dice = random.Random(seed)
    asks = [(prompts[number % len(prompts)], dice.randint(4, 24)) for number in range(clients)]
    leaves = [dice.randrange(1, most) if number % 3 == 2 else None for number, (_, most) in enumerate(asks)]
    different = sorted({prompt for prompt, _ in asks})
    outputs = await asyncio.to_thread(
        served.run, lambda: complete_all(served.cluster, different, max_new_tokens=24, ignore_eos=True)
    )
    expected = {prompt: [token.text for token in output] for prompt, output in zip(different, outputs, strict=True)}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=served.url, timeout=PATIENCE_S, limits=limits) as http:

        async def ask(number: int) -> str:
            prompt, most = asks[number]
            body = {"prompt": prompt, "max_tokens": most, "temperature": 0, "ignore_eos": True, "stream": True}
            text, count = "", 0
            async with http.stream("POST", "/v1/completions", json=body) as stream:
                assert stream.status_code == 200
                async for line in stream.aiter_lines():
                    if line.startswith("data: {"):
                        text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                        count += 1
                        if count == leaves[number]:
                            return ""
            assert count == most
            return text

        texts = await asyncio.gather(*map(ask, range(clients)))
        await idle(http)
    for text, (prompt, most), leave in zip(texts, asks, leaves, strict=True):
        if leave is None:
            # A last token within a character comes as U+FFFD; the tokens before it are as they were.
            assert text.rstrip("\ufffd") == "".join(expected[prompt][:most]).rstrip("\ufffd")


def main() -> None:
    """``python -m tests.serving.http.test_disconnects 200``: the same with more clients."""
    import sys

    with serving() as served:
        asyncio.run(storm(served, clients=int(sys.argv[1]), seed=int(sys.argv[2]) if len(sys.argv) > 2 else 0))


if __name__ == "__main__":
    main()
