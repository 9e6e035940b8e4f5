"""Partition and experts on a GPU held against the CPU's, without a test framework: bare machines have none."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from afore.core.demand import count_demand, demand_crc
from afore.core.slots import StoreLayout, contiguous_primaries
from afore.models.expert_form import SILU_GATED, Activation, ExpertForm
from afore.tools.gpu_bench import Bench
from afore.workers.device.base import Pairs
from afore.workers.device.cuda.demand_check import CrcTable
from afore.workers.device.cuda.pair_plan import fill_plan, plan_words
from afore.workers.kernels import grouped_mlp_reference
from afore.workers.partition import partition_reference

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
"""Largest difference from float64, as a part of the largest output."""


class PartitionCase:
    """Random tokens and a random plan for one of four workers, on a bench. ``planned`` False: the plan is for another demand."""

    def __init__(
        self,
        bench: Bench,
        numbers: np.random.Generator,
        rank: int,
        *,
        tokens: int,
        experts: int,
        top_k: int,
        planned: bool,
    ) -> None:
        table = CrcTable.of(experts)
        self.layout = layout = StoreLayout(contiguous_primaries(experts, 4), rank, 2)
        first_redundant = len(layout.primary_experts)
        self.ids_TK = np.stack([numbers.permutation(experts)[:top_k] for _ in range(tokens)]).astype(np.int32)
        foreign = numbers.permutation([e for e in range(experts) if layout.row_E[e] < 0])[:2]
        shares = sorted((int(e), rank, slot, int(numbers.integers(1, tokens))) for slot, e in enumerate(foreign))
        shares_X4 = np.array(shares, dtype=np.int32)
        crc = demand_crc(count_demand(self.ids_TK, experts)) ^ (0 if planned else 1)
        plan_X = np.zeros(plan_words(experts), dtype=np.int32)
        fill_plan(plan_X, shares_X4, layout.row_E, rank, layout.num_rows, first_redundant, crc)
        used = shares_X4 if planned else np.zeros((0, 4), dtype=np.int32)
        self.expected = partition_reference(self.ids_TK, used, layout.row_E, rank, layout.num_rows, first_redundant)
        where = bench.device
        with bench.on_compute():
            self.pair_P, place_P = (torch.zeros(self.ids_TK.size, dtype=torch.int32, device=where) for _ in range(2))
            self.summary_X = torch.zeros(layout.num_rows + 3, dtype=torch.int32, device=where)
            arguments = (
                torch.from_numpy(self.ids_TK).to(where),
                torch.from_numpy(plan_X).to(where),
                torch.from_numpy(table.words_EB).to(where),
                table.zero,
                experts,
                layout.num_rows,
                first_redundant,
                self.pair_P,
                place_P,
                self.summary_X,
            )
        self.enqueue: Callable[[], None] = partial(bench.implementation.partition, *arguments)


def check_partition(
    bench: Bench, *, cases: int = 12, tokens: int = 64, experts: int = 128, top_k: int = 8
) -> dict[str, Any]:
    """Random plans over four workers, planned for this demand and for another: the same pairs in the same order."""
    numbers = np.random.default_rng(7)
    for case in range(cases):
        rank, planned = case % 4, case % 3 != 2
        one = PartitionCase(bench, numbers, rank, tokens=tokens, experts=experts, top_k=top_k, planned=planned)
        with bench.on_compute():
            one.enqueue()
            *start_S1, mismatched, unknown = one.summary_X.tolist()
            pairs = one.pair_P.tolist()
        rows = range(one.layout.num_rows)
        found = [[divmod(place, top_k) for place in pairs[start_S1[s] : start_S1[s + 1]]] for s in rows]
        if found != one.expected or bool(mismatched) == planned or unknown != -1:
            raise RuntimeError(f"case {case}: the GPU's share of worker {rank} is not the CPU's")
    return {
        "cases": cases,
        "tokens": tokens,
        "experts": experts,
        "kernel": bench.implementation.name,
        "difference": "none: the same pairs in the same order",
    }


def partition_time(
    bench: Bench, *, tokens: int = 64, experts: int = 128, top_k: int = 8, repeats: int = 10
) -> dict[str, Any]:
    """What the exact share of a target takes."""
    one = PartitionCase(bench, np.random.default_rng(7), 0, tokens=tokens, experts=experts, top_k=top_k, planned=True)
    took_us = bench.time_us(one.enqueue, bench.compute, repeats=repeats)
    return {"kernel": bench.implementation.name, "tokens": tokens, "top_k": top_k, "partition_us": took_us}


def check_experts(
    bench: Bench, *, hidden: int = 512, expert: int = 192, rows: int = 12, tokens: int = 96
) -> list[dict[str, Any]]:
    """Every kernel that applies, both types and forms, several tiles, against float64."""
    found = []
    forms = (("silu", SILU_GATED), ("clamped, biases", ExpertForm(activation=Activation.CLAMPED, biases=True)))
    dtypes = TOLERANCES if bench.on_gpu else {torch.float32: TOLERANCES[torch.float32]}
    for dtype, tolerance in dtypes.items():
        ways = bench.ways(dtype, (hidden, expert))
        for label, form in forms:
            for way in ways:
                for tile in (16, 64):
                    off = _off(bench, way.experts, dtype, form, tile, hidden, expert, rows, tokens)
                    if not off <= tolerance:
                        raise RuntimeError(
                            f"{way.name}, {dtype}, {label}, M_tile {tile}: {off:.2e} of the largest output off"
                        )
                    found.append(
                        {
                            "kernel": way.name,
                            "dtype": str(dtype).removeprefix("torch."),
                            "form": label,
                            "tile_tokens": tile,
                            "largest_difference": off,
                            "tolerance": tolerance,
                        }
                    )
    return found


def _off(
    bench: Bench,
    launch: Any,
    dtype: torch.dtype,
    form: ExpertForm,
    tile: int,
    hidden: int,
    expert: int,
    rows: int,
    tokens: int,
) -> float:
    numbers = np.random.default_rng(tile)
    top_k, places = 4, tokens * 4

    def pick(*shape: int, scale: float) -> torch.Tensor:
        return torch.from_numpy(numbers.standard_normal(shape, dtype=np.float32) * scale).to(dtype)

    gate_up, down = pick(rows, 2 * expert, hidden, scale=hidden**-0.5), pick(rows, hidden, expert, scale=expert**-0.5)
    bias = pick(rows, 2 * expert, scale=0.1), pick(rows, hidden, scale=0.1)
    hidden_TD = numbers.standard_normal((tokens, hidden), dtype=np.float32)
    weight_TK = numbers.random((tokens, top_k), dtype=np.float32)
    pairs = Pairs.empty(places, rows)
    pairs.count = places * 3 // 4
    chosen = numbers.permutation(places)[: pairs.count].astype(np.int32)
    pairs.token_P[: pairs.count], pairs.k_P[: pairs.count] = np.divmod(chosen, top_k)
    pairs.start_S1[1:] = np.sort(numbers.integers(0, pairs.count + 1, rows))
    pairs.start_S1[-1] = pairs.count
    place = np.full(places, -1, dtype=np.int32)
    place[chosen] = np.arange(pairs.count)
    pair = np.zeros(places, dtype=np.int32)
    pair[: pairs.count] = chosen
    biases = (bias[0].float().numpy(), bias[1].float().numpy()) if form.biases else None
    expected_TD = grouped_mlp_reference(
        hidden_TD, weight_TK, pairs, gate_up.float().numpy(), down.float().numpy(), form, biases
    )
    where = bench.device
    with bench.on_compute():
        out_TD = torch.full((tokens, hidden), float("nan"), device=where)
        launch(
            torch.from_numpy(hidden_TD).to(where),
            torch.from_numpy(weight_TK).to(where),
            torch.from_numpy(pair).to(where),
            torch.from_numpy(place).to(where),
            torch.from_numpy(pairs.start_S1).to(where),
            gate_up.to(where),
            down.to(where),
            (bias[0].to(where), bias[1].to(where)) if form.biases else None,
            torch.full((places, expert), float("nan"), dtype=dtype, device=where),
            torch.full((places, hidden), float("nan"), device=where),
            out_TD,
            form,
            tile,
        )
        out = out_TD.cpu().numpy()
    return float(np.abs(out - expected_TD).max() / np.abs(expected_TD).max())
