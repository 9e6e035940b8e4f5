"""The process in which ``transformers`` decodes for a comparison: one JSON command a line on stdin, one answer a line on stdout.

Its own process, so that neither side's threads, allocator or garbage are the other's; it sleeps in ``read`` while the other runs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from afore.models.quiet import no_progress_bar


class StepTimes(BaseStreamer):
    """When each step's tokens were there; the first call brings the prompt."""

    def __init__(self) -> None:
        self.steps_ns: list[int] = []
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """Called by ``generate`` with the prompt, then with each step's tokens."""
        if self._prompt_seen:
            self.steps_ns.append(time.monotonic_ns())
        self._prompt_seen = True

    def end(self) -> None:
        """Called after the last step."""


class OwnLengths(StoppingCriteria):
    """Ends each row of a batch at its own number of tokens; ``generate`` goes on while a row is left."""

    def __init__(self, prompt_tokens: int, max_tokens: Sequence[int]) -> None:
        self._ends = torch.tensor(max_tokens) + prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        """(B,) bool: which rows are done."""
        return input_ids.shape[1] >= self._ends


class Rival:
    """``transformers``' model of a checkpoint, and batched greedy decoding with it."""

    def __init__(self, path: str, threads: int) -> None:
        torch.set_num_threads(threads)
        with no_progress_bar():
            self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
        eos = self._model.generation_config.eos_token_id
        self._eos: list[int] = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        # As for the reference of the tests: what a checkpoint's own generation settings ask for is left out.
        self._model.generation_config = GenerationConfig()

    def run(
        self, implementation: str, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], ignore_eos: bool
    ) -> dict[str, Any]:
        """Decodes all prompts as one batch, padded on the left, ``max_tokens`` of each; times from before padding to lists."""
        self._model.set_experts_implementation(implementation)
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=max(max_tokens),
            eos_token_id=None if ignore_eos else self._eos or None,
            pad_token_id=0,
            use_cache=True,
        )
        times = StepTimes()
        cpu_s = time.process_time()
        start_ns = time.monotonic_ns()
        longest = max(map(len, prompts))
        ids = torch.zeros((len(prompts), longest), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        # Rows that all end together need none: the plain call stays what it is.
        own = min(max_tokens) < max(max_tokens)
        stopping = {"stopping_criteria": StoppingCriteriaList([OwnLengths(longest, max_tokens)])} if own else {}
        with torch.inference_mode():
            output = self._model.generate(
                ids, attention_mask=mask, generation_config=config, streamer=times, **stopping
            )
        rows: list[list[int]] = output[:, longest:].tolist()
        end_ns = time.monotonic_ns()
        ends = [] if ignore_eos else self._eos
        tokens = [cut_at_end(row[:most], ends) for row, most in zip(rows, max_tokens, strict=True)]
        return {
            "tokens": tokens,
            "wall_s": (end_ns - start_ns) / 1e9,
            "decode_s": (end_ns - times.steps_ns[0]) / 1e9,
            "decode_tokens": sum(map(len, tokens)) - len(tokens),
            "cpu_s": time.process_time() - cpu_s,
        }


def cut_at_end(row: Sequence[int], eos: Sequence[int]) -> list[int]:
    """A row without the padding behind its end token, which stays."""
    for position, token in enumerate(row):
        if token in eos:
            return list(row[: position + 1])
    return list(row)


def main() -> None:
    """Serves until stdin ends."""
    # Answers go where the parent reads; what libraries print goes to standard error.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    path, threads = sys.argv[1], int(sys.argv[2])
    rival = Rival(path, threads)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(rival.run(**json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
