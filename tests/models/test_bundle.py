from __future__ import annotations

from collections import Counter

import afore.models.bundle as bundle
from afore.models.checkpoint import Checkpoint
from afore.models.loading import verify_checkpoint
from afore.models.tokenizer import Tokenizer


def test_the_bundled_model_is_whole(bundled: Checkpoint) -> None:
    verify_checkpoint(bundled)
    assert (bundled.spec.num_experts, bundled.spec.experts_per_token, bundled.spec.num_moe_layers) == (128, 8, 3)
    assert bundled.spec.eos_ids == (2,)


def test_the_prompts_are_eight_of_each_domain_and_of_many_lengths(tokenizer: Tokenizer) -> None:
    prompts = bundle.bundled_prompts()
    assert Counter(prompt.domain for prompt in prompts) == {"math": 8, "chat": 8, "code": 8, "web": 8}
    assert len({prompt.id for prompt in prompts}) == 32
    lengths = [len(tokenizer.encode(prompt.prompt)) for prompt in prompts]
    assert min(lengths) >= 10
    assert max(lengths) <= 200
    assert len(set(lengths)) > 20
    assert all(1 <= prompt.max_new_tokens <= 64 for prompt in prompts)
    assert all(
        p.prompt.startswith("Question: ") and p.prompt.endswith("\nAnswer:") for p in prompts if p.domain == "math"
    )
    assert all(
        p.prompt.startswith("User: ") and p.prompt.endswith("\nAssistant:") for p in prompts if p.domain == "chat"
    )
