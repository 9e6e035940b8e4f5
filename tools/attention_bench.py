"""``python -m afore.tools.attention_bench``: what an attention worker computes, by ``transformers``' modules and by fused kernels.

Both paths run the same steps over caches of their own in this process, taking turns, so that what else the machine does falls on
both. Nothing is sent and no expert is computed: the routed sum is zero. Medians over layers and steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from afore.core.clock import WallClock
from afore.core.errors import AforeError, ConfigError
from afore.models.attention import AttentionModel, StepBatch
from afore.models.attention_fused import FusedAttention
from afore.models.attention_modules import TransformersAttention
from afore.models.bundle import bundled_model_path
from afore.models.checkpoint import Checkpoint
from afore.models.fused_forms import why_not_fused
from afore.models.fused_weights import take_weights
from afore.models.kv import KVLayout, KVStorage
from afore.models.loading import load_dense_model
from afore.tools.ending import end_with

EXAMPLE = """example:
  python -m afore.tools.attention_bench --tokens 1 8 32 --context 100
  python -m afore.tools.attention_bench --model DIRECTORY --json - | jq '.cases[].ratio'
"""
BLOCK_TOKENS = 16
PIECES = ("attend", "combine", "dense", "begin", "logits")


@dataclass(frozen=True, slots=True)
class Case:
    """Median microseconds of one path at one T."""

    path: str
    tokens: int
    context: int
    layer_us: float
    """``attend`` and ``combine`` of one MoE layer together."""
    pieces_us: dict[str, float]
    """Of each call; ``begin`` and ``logits`` once a step, ``dense`` of one dense layer."""


class Bench:
    """The paths of one model, each over a cache of its own with the same blocks scattered over it."""

    def __init__(self, checkpoint: Checkpoint, *, rows: int, context: int) -> None:
        """Raises ``CheckpointError``."""
        self._spec = checkpoint.spec
        blocks = -(-(context + 1) // BLOCK_TOKENS)
        layout = KVLayout.for_model(checkpoint.spec, num_blocks=rows * blocks, block_tokens=BLOCK_TOKENS)
        self.models: dict[str, AttentionModel] = {
            "modules": TransformersAttention(load_dense_model(checkpoint), KVStorage.allocate(layout))
        }
        self.reason = why_not_fused(checkpoint.family, checkpoint.config)
        if self.reason is None:
            weights = take_weights(load_dense_model(checkpoint))
            self.models["fused"] = FusedAttention(weights, KVStorage.allocate(layout))
        self._rng = np.random.default_rng(0)
        self._tables_TB = self._rng.permutation(rows * blocks).reshape(rows, blocks).astype(np.int32)
        self._context = context
        self._clock = WallClock()

    def measure(self, tokens: int, steps: int) -> list[Case]:
        """All paths at one T."""
        times: dict[str, dict[str, list[int]]] = {path: defaultdict(list) for path in self.models}
        for step in range(steps + 2):
            batch = StepBatch(
                self._rng.integers(0, self._spec.vocab_size, tokens),
                np.full(tokens, self._context, dtype=np.int64),
                self._tables_TB[:tokens],
            )
            for path, model in self.models.items():
                for piece, nanoseconds in self._step(model, batch):
                    if step >= 2:  # the first ones warm caches
                        times[path][piece].append(nanoseconds)
        return [self._case(path, tokens, pieces) for path, pieces in times.items()]

    def _case(self, path: str, tokens: int, pieces: dict[str, list[int]]) -> Case:
        medians = {piece: statistics.median(pieces[piece]) / 1e3 for piece in PIECES if pieces[piece]}
        layers = [attend + combine for attend, combine in zip(pieces["attend"], pieces["combine"], strict=True)]
        return Case(path, tokens, self._context, statistics.median(layers) / 1e3, medians)

    def _step(self, model: AttentionModel, batch: StepBatch) -> Iterator[tuple[str, int]]:
        """Name and nanoseconds of every call of one step."""
        now = self._clock.now_ns
        zero_TD = np.zeros((batch.num_tokens, self._spec.hidden_size), dtype=np.float32)
        start = now()
        state = model.begin(batch)
        yield "begin", now() - start
        for layer in model.layers():
            start = now()
            if layer.moe_ordinal is None:
                model.dense(state, layer.index)
                yield "dense", now() - start
                continue
            model.attend(state, layer.moe_ordinal)
            middle = now()
            model.combine(state, layer.moe_ordinal, zero_TD)
            end = now()
            yield "attend", middle - start
            yield "combine", end - middle
        start = now()
        model.logits(state)
        yield "logits", now() - start


def result(bench: Bench, cases: Sequence[Case], model: str) -> dict[str, Any]:
    """What ``--json`` writes."""
    modules_us = {case.tokens: case.layer_us for case in cases if case.path == "modules"}
    rows = [{**asdict(case), "ratio": modules_us[case.tokens] / case.layer_us} for case in cases]
    return {"model": model, "why_not_fused": bench.reason, "cases": rows}


def table(measured: dict[str, Any]) -> str:
    """The same for people."""
    lines = [f"median µs; {measured['model']}", f"{'path':8} {'T':>4} {'layer':>9} {'ratio':>7}   pieces"]
    for case in measured["cases"]:
        pieces = ", ".join(f"{name} {us:,.0f}" for name, us in case["pieces_us"].items())
        lines.append(
            f"{case['path']:8} {case['tokens']:>4} {case['layer_us']:>9,.1f} {case['ratio']:>6.1f}x   {pieces}"
        )
    if measured["why_not_fused"] is not None:
        lines.append(f"not fused: {measured['why_not_fused']}")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = argparse.ArgumentParser(
        prog="python -m afore.tools.attention_bench",
        description="Median microseconds of the attention side of one layer, by modules and by fused kernels.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("--model", default=None, help="directory of a checkpoint; none takes the bundled model")
    options.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32], help="rows of a microbatch (T)")
    options.add_argument("--context", type=int, default=100, help="cached positions of each row")
    options.add_argument("--steps", type=int, default=60, help="decode steps of each path at each T")
    options.add_argument("--json", default=None, help='write the result to this file; "-" means standard output')
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    given = parser().parse_args(argv)
    try:
        for name in ("context", "steps"):
            if getattr(given, name) < 1:
                raise ConfigError(f"--{name}", f"{getattr(given, name)} is below 1", "give 1 or more")
        if min(given.tokens) < 1:
            raise ConfigError("--tokens", f"{min(given.tokens)} is below 1", "give 1 or more")
        torch.set_num_threads(1)
        model = str(given.model or bundled_model_path())
        with Checkpoint(model) as checkpoint:
            longest = checkpoint.spec.max_positions
            if given.context >= longest:
                raise ConfigError("--context", f"the model ends at {longest} positions", "give fewer")
            bench = Bench(checkpoint, rows=max(given.tokens), context=given.context)
        cases = [case for tokens in given.tokens for case in bench.measure(tokens, given.steps)]
        measured = result(bench, cases, model)
        if given.json not in (None, "-"):
            with open(given.json, "w", encoding="utf-8") as file:
                json.dump(measured, file, indent=2)
    except AforeError as error:
        print(f"attention_bench: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"attention_bench: {given.json} cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    print(json.dumps(measured, indent=2) if given.json == "-" else table(measured))
    return 0


if __name__ == "__main__":
    end_with(main)
