"""A profile of this CPU for a checkpoint: each piece of work measured alone, medians of many rounds."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import torch

from afore.core.slots import contiguous_primaries
from afore.models.checkpoint import Checkpoint
from afore.scheduler.plan import PlannerConfig
from afore.scheduler.planner import Planner
from afore.tools.attention_bench import Bench
from afore.tools.plan_table import HIDDEN
from afore.workers.device.base import Pairs
from afore.workers.device.hardware import Chip, HardwareProfile, Number, Shape, Wires
from afore.workers.kernels import CpuKernels

TILE_TOKENS = 8
CONTEXT = 100
_ROUNDS = 30
_COPIED_BYTES = 64 << 20
_PLANNED_WORKERS = (2, 4, 8)


def measure_cpu(model: Path) -> HardwareProfile:
    """Takes about half a minute. Raises ``CheckpointError``."""
    torch.set_num_threads(1)
    machine = f"{platform.machine()}, one thread, float32"
    with Checkpoint(model) as checkpoint:
        spec = checkpoint.spec
        bench = Bench(checkpoint, rows=32, context=CONTEXT)
    few, many = (bench.measure(tokens, 20)[-1].layer_us for tokens in (4, 32))
    row_us = max(1e-3, (many - few) / 28)
    memory_gb_per_s = _memory_gb_per_s()
    tflops = _tflops()

    def given(value: float, why: str) -> Number:
        return Number(value=value, kind="given", source=why)

    def measured(value: float, what: str) -> Number:
        return Number(value=value, kind="measured", source=f"{what}; {machine}")

    from_model = f"{model.name}/config.json"
    dim = spec.kv_parts[0][1]
    shape = Shape(
        layers=given(spec.num_layers, from_model),
        dense_layers=given(spec.num_layers - spec.num_moe_layers, from_model),
        hidden=given(spec.hidden_size, from_model),
        expert=given(spec.expert_size, from_model),
        experts=given(spec.num_experts, from_model),
        top_k=given(spec.experts_per_token, from_model),
        shared_experts=given(float(spec.has_shared_experts), from_model),
        heads=given(spec.num_heads, from_model),
        kv_heads=given(spec.kv_parts[0][0], from_model),
        head_dim=given(dim, from_model),
        vocabulary=given(spec.vocab_size, from_model),
        weight_bytes=given(4, "float32"),
    )
    expert_weights = 3 * spec.hidden_size * spec.expert_size
    token_weights = spec.hidden_size * 2 * dim * (spec.num_heads + spec.kv_parts[0][0])
    token_weights += expert_weights * int(spec.has_shared_experts)
    fixed_us, tile_us = _experts_us(spec.num_experts, spec.experts_per_token, spec.hidden_size, spec.expert_size)
    copy_us = _copy_us(expert_weights * 4)
    link_gb_per_s = expert_weights * 4 / max(copy_us, 1e-3) / 1e3
    return HardwareProfile(
        name="cpu",
        about=f"this CPU ({machine}) with the model of {model.name}, each piece measured alone",
        shape=shape,
        chip=Chip(
            memory_gb=measured(psutil.virtual_memory().total / 1e9, "memory of the machine"),
            memory_gb_per_s=measured(memory_gb_per_s, "copying 64 MiB, read and written"),
            memory_efficiency=given(1, "the rate is what was reached"),
            tflops=measured(tflops, "a product of 512 x 512"),
            gemm_efficiency=measured(2 * expert_weights * TILE_TOKENS / tile_us / tflops / 1e6, "time of a tile"),
            dense_efficiency=measured(2 * token_weights / row_us / tflops / 1e6, "time of a row, 4 against 32"),
            tile_tokens=given(TILE_TOKENS, "the default on CPUs"),
            launch_us=given(0, "the pieces were measured with it"),
            layer_host_us=measured(fixed_us, "experts without tiles"),
            attention_host_us=measured(max(0.0, few - 4 * row_us), f"a layer without rows, context {CONTEXT}"),
            partition_us=measured(_partition_us(spec.num_experts, spec.experts_per_token), "32 rows"),
        ),
        wires=Wires(
            link_gb_per_s=measured(link_gb_per_s, "copying one expert"),
            link_efficiency=given(1, "the rate is what was reached"),
            message_us=Number(value=10, kind="inferred", source="a bell through an eventfd between two busy processes"),
            collective_us=given(0, "shared memory has no collectives"),
            copy_us=given(0, "the copy was measured with it"),
        ),
        planner_us={n: measured(_plan_us(spec.num_experts, n), "a plan, R = 8") for n in _PLANNED_WORKERS},
    )


def _median_us(do: Callable[[], object], rounds: int = _ROUNDS) -> float:
    do()
    times = []
    for _ in range(rounds):
        began_ns = time.perf_counter_ns()
        do()
        times.append(time.perf_counter_ns() - began_ns)
    return statistics.median(times) / 1e3


def _memory_gb_per_s() -> float:
    source = np.ones(_COPIED_BYTES // 4, dtype=np.float32)
    target = np.empty_like(source)
    return 2 * _COPIED_BYTES / _median_us(lambda: np.copyto(target, source), 7) / 1e3


def _tflops() -> float:
    left, right = torch.ones(512, 512), torch.ones(512, 512)
    return float(2 * 512**3 / _median_us(lambda: torch.mm(left, right)) / 1e6)


def _copy_us(nbytes: int) -> float:
    source = np.ones(nbytes // 4, dtype=np.float32)
    target = np.empty_like(source)
    return _median_us(lambda: np.copyto(target, source))


def _experts_us(experts: int, top_k: int, hidden: int, expert: int) -> tuple[float, float]:
    """(fixed, of each tile): two batches of full tiles, all experts on one worker."""
    rng = np.random.default_rng(0)
    gate_up_SFD = rng.standard_normal((experts, 2 * expert, hidden), dtype=np.float32)
    down_SDI = rng.standard_normal((experts, hidden, expert), dtype=np.float32)
    kernels = CpuKernels()
    rows_E = np.arange(experts, dtype=np.int32)
    no_shares = np.zeros((0, 4), dtype=np.int32)
    times, tiles = [], []
    for each in (1, 3):
        tokens = max(1, each * TILE_TOKENS * experts // top_k)
        ids_TK = (np.arange(tokens * top_k, dtype=np.int32) % experts).reshape(tokens, top_k)
        hidden_TD = rng.standard_normal((tokens, hidden), dtype=np.float32)
        weights_TK = np.full((tokens, top_k), 1 / top_k, dtype=np.float32)
        out_TD = np.empty_like(hidden_TD)
        pairs = Pairs.empty(tokens * top_k, experts)
        kernels.partition(ids_TK, no_shares, rows_E, 0, experts, experts, pairs)
        times.append(
            _median_us(lambda: kernels.grouped_mlp(hidden_TD, weights_TK, pairs, gate_up_SFD, down_SDI, out_TD))  # noqa: B023
        )
        tiles.append(float(np.sum(-(-np.diff(pairs.start_S1) // TILE_TOKENS))))
    tile_us = max(1e-3, (times[1] - times[0]) / (tiles[1] - tiles[0]))
    return max(0.0, times[0] - tile_us * tiles[0]), tile_us


def _partition_us(experts: int, top_k: int) -> float:
    kernels = CpuKernels()
    ids_TK = (np.arange(32 * top_k, dtype=np.int32) % experts).reshape(32, top_k)
    rows_E, pairs = np.arange(experts, dtype=np.int32), Pairs.empty(32 * top_k, experts)
    no_shares = np.zeros((0, 4), dtype=np.int32)
    return _median_us(lambda: kernels.partition(ids_TK, no_shares, rows_E, 0, experts, experts, pairs))


def _plan_us(experts: int, workers: int) -> float:
    config = PlannerConfig(num_experts=experts, num_workers=workers, slots_per_worker=8, tile_tokens=TILE_TOKENS)
    planner = Planner(config, contiguous_primaries(experts, workers))
    rng = np.random.default_rng(0)
    demands = rng.multinomial(256, rng.dirichlet(np.full(experts, 0.5), 40)).astype(np.int64)
    turn = iter(range(10**9))
    return _median_us(lambda: planner.plan(demands[next(turn) % 40], None, HIDDEN), 200)
