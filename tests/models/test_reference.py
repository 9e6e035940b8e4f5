from __future__ import annotations

from pathlib import Path

import pytest
import torch

from afore.models.bundle import bundled_model_path
from afore.models.checkpoint import Checkpoint
from afore.models.reference import Reference, random_checkpoint, reference_generate


@pytest.mark.slow
def test_a_difference_is_reported_with_the_references_own_margin(
    bundled_reference: Reference, prompts_ids: list[list[int]]
) -> None:
    prompt = prompts_ids[0]
    expected = bundled_reference.generate(prompt, 8)
    assert bundled_reference.first_difference(prompt, expected, expected) is None
    logits_V = bundled_reference.logits([*prompt, *expected[:5]])
    best = torch.topk(logits_V, 3)
    assert int(best.indices[0]) == expected[5]
    third = int(best.indices[2])
    difference = bundled_reference.first_difference(prompt, [*expected[:5], third, 17], expected)
    assert difference is not None
    assert (difference.position, difference.ours, difference.reference) == (5, third, expected[5])
    assert difference.margin == pytest.approx(float(best.values[0] - best.values[2]))
    assert difference.top2_margin == pytest.approx(float(best.values[0] - best.values[1]))
    assert difference.resume_ids == (*prompt, *expected[:6])
    assert bundled_reference.generate(difference.resume_ids, 2) == expected[6:8]


@pytest.mark.slow
def test_an_output_that_ends_early_or_late_differs(bundled_reference: Reference, prompts_ids: list[list[int]]) -> None:
    expected = bundled_reference.generate(prompts_ids[1], 4)
    for ours in (expected[:3], [*expected, 9]):
        difference = bundled_reference.first_difference(prompts_ids[1], ours, expected)
        assert difference is not None
        assert difference.position == min(len(ours), len(expected))
        assert difference.margin == float("inf")


@pytest.mark.slow
def test_generation_ends_at_the_end_token_unless_it_is_ignored(tmp_path: Path) -> None:
    path = random_checkpoint(tmp_path, seed=1)
    free = Reference(path).generate([3, 4, 5], 12, ignore_eos=True)
    assert len(free) == 12
    path = random_checkpoint(tmp_path, seed=1, eos_token_id=free[4])
    stopped = Reference(path).generate([3, 4, 5], 12)
    assert stopped == free[: free.index(free[4]) + 1]
    assert Reference(path).generate([3, 4, 5], 12, ignore_eos=True) == free


@pytest.mark.slow
def test_threads_and_prompts_are_left_as_they_were(prompts_ids: list[list[int]]) -> None:
    torch.set_num_threads(2)
    try:
        tokens = reference_generate(bundled_model_path(), prompts_ids[:2], [2, 3])
        assert list(map(len, tokens)) == [2, 3]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_random_checkpoints_are_a_function_of_their_seed(tmp_path: Path) -> None:
    torch.manual_seed(5)
    drawn = torch.rand(1)
    torch.manual_seed(5)
    paths = [random_checkpoint(tmp_path / str(i), seed=seed) for i, seed in enumerate((1, 1, 2))]
    assert torch.equal(torch.rand(1), drawn), "the caller's own generator is untouched"
    tensors = []
    for path in paths:
        with Checkpoint(path) as checkpoint:
            tensors.append(checkpoint.read("model.layers.1.mlp.gate.weight"))
            bias = checkpoint.read("model.layers.1.mlp.gate.e_score_correction_bias")
    assert torch.equal(tensors[0], tensors[1])
    assert not torch.equal(tensors[0], tensors[2])
    assert float(tensors[0].std()) == pytest.approx(0.3, rel=0.1)
    assert float(bias.abs().max()) > 0.01


def test_a_random_checkpoint_may_carry_the_bundled_tokenizer(tmp_path: Path) -> None:
    path = random_checkpoint(tmp_path, tokenizer=True)
    with Checkpoint(path) as checkpoint:
        assert checkpoint.spec.vocab_size == 4096
    assert (path / "tokenizer.json").exists()
