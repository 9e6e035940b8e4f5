"""However a prompt is cut into chunks, every family leaves the same keys, values and logits: windows, latents and sinks too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from afore.models.bundle import bundled_model_path
from afore.models.checkpoint import Checkpoint
from afore.models.families import FAMILIES
from afore.models.kv import KVLayout, KVStorage
from afore.models.loading import load_whole_model
from afore.models.prefill import Prefilled
from afore.models.prefill_modules import TransformersPrefill
from afore.models.random_families import random_family_checkpoint
from afore.models.reference import Reference

CLOSE = 2e-5
"""Sums of float32 in another order."""
CUTS = [[29], [1] * 29, [5, 5, 5, 5, 5, 4], [16, 13], [3, 1, 20, 5], [28, 1]]
"""Chunks of a prompt of 29 tokens, which is longer than every window of the small families (6 to 9)."""


def prefill_of(path: Path) -> TransformersPrefill:
    with Checkpoint(path) as checkpoint:
        return TransformersPrefill(load_whole_model(checkpoint))


def prompts_of(seed: int, count: int = 2, length: int = 29) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 256, size=length).tolist() for _ in range(count)]


def in_chunks(prefill: TransformersPrefill, prompts: list[list[int]], cut: list[int]) -> list[list[Prefilled]]:
    """All prompts' chunks, chunk by chunk in turns, as a worker interleaves them."""
    runs = [prefill.start() for _ in prompts]
    outputs: list[list[Prefilled]] = [[] for _ in prompts]
    start = 0
    for length in cut:
        for run, prompt, output in zip(runs, prompts, outputs, strict=True):
            output.append(run.feed(prompt[start : start + length]))
        start += length
    return outputs


@pytest.mark.slow
@pytest.mark.parametrize("model_type", FAMILIES)
def test_chunks_leave_what_the_whole_prompt_leaves(tmp_path: Path, model_type: str) -> None:
    path = random_family_checkpoint(tmp_path, model_type, seed=len(model_type))
    prefill, prompts = prefill_of(path), prompts_of(seed=1)
    layout = KVLayout.for_model(prefill.spec, num_blocks=8, block_tokens=4)
    blocks = (6, 7, 0, 3, 2, 1, 4, 5)
    for cut in CUTS:
        for prompt, chunks in zip(prompts, in_chunks(prefill, prompts, cut), strict=True):
            whole = prefill.run(prompt)
            assert [chunk.start for chunk in chunks] == [0, *np.cumsum(cut)[:-1]]
            np.testing.assert_allclose(chunks[-1].logits_V, whole.logits_V, atol=CLOSE)
            assert np.argmax(chunks[-1].logits_V) == np.argmax(whole.logits_V)
            caches = []
            for parts in ([whole], chunks):
                storage = KVStorage.allocate(layout)
                for offset, data in (write for part in parts for write in part.pack(layout, blocks)):
                    storage.write(offset, data)
                caches.append(storage)
            for planes, expected in zip(caches[1].planes, caches[0].planes, strict=True):
                for plane, expected_plane in zip(planes, expected, strict=True):
                    torch.testing.assert_close(plane, expected_plane, atol=CLOSE, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [32, 100])
def test_a_long_prompt_of_the_bundled_model_chooses_the_references_token(chunk: int) -> None:
    prefill, reference = prefill_of(bundled_model_path()), Reference(bundled_model_path())
    for prompt in prompts_of(seed=2, count=2, length=251):
        cut = [chunk] * (len(prompt) // chunk) + [len(prompt) % chunk]
        (chunks,) = in_chunks(prefill, [prompt], cut)
        assert [int(np.argmax(chunks[-1].logits_V))] == reference.generate(prompt, 1, ignore_eos=True)
