"""Parts of a GPU check that run more than kernels: NCCL's calls, attention on the GPU, and whole clusters that share it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Mapping
from typing import Any, Literal

import torch

from afore.core.clock import WallClock
from afore.core.config import BatchOptions, CostOptions, DeviceOptions, PlannerOptions, RunConfig
from afore.core.errors import AforeError
from afore.core.topology import Topology
from afore.tools.gpu_claims import ClaimFailed
from afore.tools.gpu_heard import overhearing, used_of
from afore.tools.gpu_ipc import ipc_missing
from afore.workers.device.cuda.driver import Driver, load_driver

TOKENS = 12
MARGIN = 1e-4
"""Of a logit: two tokens that are nearer are a tie, which other kernels may break the other way."""
PROMPTS = 16
RETRY_S = 40.0
"""What a second attempt needs at least."""
EAGER = CostOptions(tile_us=1000.0, copy_us=1.0, window_us=10_000.0, adapt=False)
"""Costs by which copying always pays, so that experts move."""
Device = Literal["cpu", "cuda"]
KV_BLOCKS = 160
"""Of each attention worker: containers often have little room in /dev/shm."""


def run_group() -> dict[str, Any]:
    """NCCL's calls as FFN workers make them, on the model stream; with one GPU, in a group of one."""
    from afore.workers.group.collective import nccl_missing

    if missing := nccl_missing():
        raise RuntimeError(missing)
    return asyncio.run(_group_of_one(load_driver(name="group"), on_gpu=True))


async def _group_of_one(driver: Driver, *, on_gpu: bool) -> dict[str, Any]:
    from afore.workers.gpu_place import GpuPlace
    from afore.workers.group.collective import Collective

    async def meet(port: int | None) -> tuple[str, int]:
        return "127.0.0.1", port or 0

    place = GpuPlace(driver, WallClock(), name="group", ordinal=0, on_gpu=on_gpu, current=None if on_gpu else _nothing)
    collective = await Collective.join(
        meet,
        backend="nccl" if on_gpu else "gloo",
        rank=0,
        size=1,
        epoch=0,
        timeout_s=30,
        ordinal=0 if on_gpu else None,
    )
    try:
        rows, width = 64, 512
        stream = place.device.model_stream
        with place.device.current_model_stream():
            own, every = (place.memory.tensor((rows, width), torch.float32) for _ in range(2))
            begin, end = driver.create_event(), driver.create_event()
            own.normal_()
            every.zero_()
            collective.gather(every, own)
            driver.record(begin, stream.handles.stream)
            collective.gather(every, own)
            collective.scatter_sum(own, every)
            driver.record(end, stream.handles.stream)
            driver.synchronise(end)
            if not torch.equal(own, every):
                raise RuntimeError("rows changed on their way through a group of one")
        found = {
            "workers": 1,
            "rows": rows,
            "bytes_a_row": width * 4,
            "gather_and_reduce_us": driver.elapsed_us(begin, end),
        }
        for event in (begin, end):
            driver.destroy_event(event)
        return found
    finally:
        collective.leave()
        place.close()


def run_attention() -> dict[str, Any]:
    """The bundled model's attention on the GPU, experts on the CPU, in one process: tokens are those of transformers."""
    return asyncio.run(decode_with_attention(load_driver(name="attention"), on_gpu=True))


async def decode_with_attention(driver: Driver, *, on_gpu: bool, prompts: int = 6) -> dict[str, Any]:
    """Prefill and decoding through the GPU's attention and prefill models. ``on_gpu`` False: the driver's memory is the host's."""
    from afore.models.bundle import bundled_model_path, bundled_prompts
    from afore.models.checkpoint import Checkpoint
    from afore.models.kv import KVLayout
    from afore.models.loading import load_dense_model, load_whole_model
    from afore.models.local import LocalExperts
    from afore.models.reference import Reference
    from afore.models.tokenizer import Tokenizer
    from afore.tools.gpu_decode import GpuDecoder
    from afore.workers.gpu_place import GpuPlace

    place = GpuPlace(
        driver, WallClock(), name="attention", ordinal=0, on_gpu=on_gpu, current=None if on_gpu else _nothing
    )
    tokenizer = Tokenizer(bundled_model_path())
    texts = [tokenizer.encode(prompt.prompt) for prompt in bundled_prompts()][:prompts]
    try:
        with Checkpoint(bundled_model_path()) as checkpoint:
            layout = KVLayout.for_model(checkpoint.spec, num_blocks=KV_BLOCKS)
            decoder = GpuDecoder(
                place, load_dense_model(checkpoint), load_whole_model(checkpoint), LocalExperts(checkpoint), layout
            )
        ours = [await decoder.generate(text, TOKENS) for text in texts]
        decoder.close()
    finally:
        place.close()
    return {"layer_awaits": decoder.layers, **compare(Reference(bundled_model_path()), texts, ours)}


def run_serving(limit_s: float) -> dict[str, Any]:
    """The bundled model by 2 attention, 4 FFN and a prefill process that share the GPU: rows stay in its memory."""
    return serve_here("cuda", limit_s)


def run_hosted(limit_s: float) -> dict[str, Any]:
    """The same with attention and prefill on CPUs: rows go up to the FFN workers, between which experts move."""
    return serve_here("cpu", limit_s)


def serve_here(attention: Device, limit_s: float) -> dict[str, Any]:
    """Serves on this GPU. Where no process reads another one's memory, all workers are in one, which needs no handles."""
    begin = time.monotonic()
    driver = load_driver(name="serving")
    driver.retain_context(0)
    try:
        missing = ipc_missing(driver)
    finally:
        driver.release_context(0)
    left_s = limit_s - (time.monotonic() - begin)
    found = serve_somehow("cuda", attention, left_s, inproc=bool(missing))
    return found | ({"processes": f"one: no CUDA IPC, because {missing}"} if missing else {})


def serve_somehow(name: Device, attention: Device, limit_s: float, *, inproc: bool = False) -> dict[str, Any]:
    """Serves with the kernels that are measured to be the fastest; where that cannot be, with torch's, and says so."""
    begin = time.monotonic()
    try:
        return serve(name, attention, limit_s=limit_s, inproc=inproc)
    except AforeError as error:
        left_s = limit_s - (time.monotonic() - begin)
        if left_s < RETRY_S:
            raise
        print(f"again, with torch's kernels: {error}", file=sys.stderr, flush=True)
        again = serve(name, attention, kernels="torch", limit_s=left_s, inproc=inproc)
        return {**again, "not_by_our_kernels": str(error)}


def serve(
    name: Device,
    attention: Device,
    *,
    kernels: Literal["auto", "torch"] = "auto",
    limit_s: float,
    inproc: bool = False,
    prompts: int = PROMPTS,
    costs: CostOptions = EAGER,
) -> dict[str, Any]:
    """Serves prompts while experts move. Raises ``RuntimeError`` where tokens are not those of transformers, or it takes too long;
    ``ClaimFailed`` where no expert moved, no pair ran on one that did, or rows did not come by the group that they should.
    """
    from afore.models.bundle import bundled_model_path, bundled_prompts
    from afore.models.reference import Reference
    from afore.models.tokenizer import Tokenizer

    config = RunConfig(
        topology=Topology(attention=2, ffn=4),
        device=DeviceOptions(name=name, attention=attention, kernels=kernels),
        planner=PlannerOptions(tile_tokens=16),
        costs=costs,
        batch=BatchOptions(max_num_seqs=32, kv_blocks=KV_BLOCKS),
    )
    tokenizer = Tokenizer(bundled_model_path())
    texts = [tokenizer.encode(prompt.prompt) for prompt in bundled_prompts()][:prompts]
    with overhearing() as heard:
        try:
            ours, stats = asyncio.run(_answer(config, texts, limit_s, inproc=inproc))
        except TimeoutError as error:
            raise RuntimeError(f"not served within {limit_s:.0f} s; roles said what stands above") from error
    used = used_of(heard.text)
    found = {
        **compare(Reference(bundled_model_path()), texts, ours),
        "experts_copied": stats["migration"]["copies"],
        "pairs": stats["counters"].get("pairs", 0),
        "pairs_on_replicas": stats["counters"].get("replica_pairs", 0),
        "targets_on_primaries_alone": stats["counters"].get("primaries_only", 0),
        "topology": config.topology.describe(),
        "workers_are": "tasks of one process" if inproc else "processes",
        "attention_on": attention,
        "kernels_asked_for": kernels,
        "used": used,
    }
    check_claims(found, {"cuda": "ipc", "cpu": "hosted"}[attention] if name == "cuda" else "")
    return found


def check_claims(found: Mapping[str, Any], group: str) -> None:
    """Raises ``ClaimFailed`` that names what was not shown. ``group``: by which rows must have come; empty: any."""
    failed = []
    if not found["experts_copied"]:
        failed.append("no expert was copied, so nothing is shown of copies")
    if not found["pairs_on_replicas"]:
        failed.append(
            f"none of {found['pairs']} pairs ran on a replica, so nothing is shown of experts that have moved"
        )
    groups = found["used"].get("group", [])
    if group and groups != [group]:
        failed.append(f"rows came by {', '.join(groups) or 'a group that nobody named'}, not by {group}")
    if failed:
        raise ClaimFailed("; ".join(failed), found)


async def _answer(
    config: RunConfig, texts: list[list[int]], limit_s: float, *, inproc: bool
) -> tuple[list[list[int]], dict[str, Any]]:
    from afore.cluster import Cluster, complete_all
    from afore.serving.start import running_processes

    clock = WallClock()
    running: contextlib.AbstractAsyncContextManager[Any]
    if inproc:
        from afore.serving.inproc import running_inproc

        running = running_inproc(config, clock)
    else:
        running = running_processes(config, clock, log_level="info")
    async with asyncio.timeout(limit_s), Cluster.over(running, config, clock) as cluster:
        outputs = await complete_all(cluster, texts, max_new_tokens=TOKENS)
        return [[token.id for token in output] for output in outputs], await cluster.stats()


def compare(reference: Any, prompts: list[list[int]], ours: list[list[int]]) -> dict[str, Any]:
    """Counts of answers that are those of transformers. Raises ``RuntimeError`` for others."""
    exact, ties, wrong = 0, 0, []
    for index, (prompt, mine) in enumerate(zip(prompts, ours, strict=True)):
        difference = reference.first_difference(prompt, mine, reference.generate(prompt, TOKENS))
        exact += difference is None
        if difference is not None and difference.margin < MARGIN:
            ties += 1
        elif difference is not None:
            wrong.append(f"prompt {index}: {difference}")
    if wrong:
        raise RuntimeError(f"{len(wrong)} of {len(prompts)} answers are not transformers': {'; '.join(wrong[:3])}")
    return {"prompts": len(prompts), "tokens_each": TOKENS, "exact": exact, f"ties_below_{MARGIN:g}_of_a_logit": ties}


def _nothing(handle: int) -> contextlib.AbstractContextManager[object]:
    """Streams of the stand-in for a driver are nothing to torch."""
    return contextlib.nullcontext()
