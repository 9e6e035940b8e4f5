"""Parts of a GPU check that run more than kernels: NCCL's calls, attention on the GPU, and whole clusters that share it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Literal

import torch

from afore.core.clock import WallClock
from afore.core.config import BatchOptions, CostOptions, DeviceOptions, PlannerOptions, RunConfig
from afore.core.errors import AforeError
from afore.core.topology import Topology
from afore.workers.device.cuda.driver import Driver, load_driver

TOKENS = 12
MARGIN = 1e-4
"""Of a logit: two tokens that are nearer are a tie, which other kernels may break the other way."""
PROMPTS = 16
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


def run_serving() -> dict[str, Any]:
    """The bundled model by 2 attention, 4 FFN and a prefill process that share the GPU: rows stay in its memory."""
    return serve_somehow("cuda")


def run_hosted() -> dict[str, Any]:
    """The same with attention and prefill on CPUs: rows go up to the FFN workers."""
    return serve_somehow("cpu")


def serve_somehow(attention: Literal["cpu", "cuda"]) -> dict[str, Any]:
    """Serves with the kernels that are measured to be the fastest; where that cannot be, with torch's, and says so."""
    try:
        return serve("cuda", attention)
    except AforeError as error:
        return {**serve("cuda", attention, kernels="torch"), "not_by_our_kernels": str(error)}


def serve(
    name: Literal["cpu", "cuda"], attention: Literal["cpu", "cuda"], *, kernels: Literal["auto", "torch"] = "auto"
) -> dict[str, Any]:
    """Serves prompts while experts move; raises where tokens are not those of transformers, or nothing moved."""
    from afore.cluster import Cluster, complete_all
    from afore.models.bundle import bundled_model_path, bundled_prompts
    from afore.models.reference import Reference
    from afore.models.tokenizer import Tokenizer

    config = RunConfig(
        topology=Topology(attention=2, ffn=4),
        device=DeviceOptions(name=name, attention=attention, kernels=kernels),
        planner=PlannerOptions(tile_tokens=16),
        costs=CostOptions(tile_us=1000.0, copy_us=1.0, window_us=10_000.0, adapt=False),
        batch=BatchOptions(max_num_seqs=32, kv_blocks=KV_BLOCKS),
    )
    tokenizer = Tokenizer(bundled_model_path())
    texts = [tokenizer.encode(prompt.prompt) for prompt in bundled_prompts()][:PROMPTS]

    async def answer() -> tuple[list[list[int]], dict[str, Any]]:
        async with Cluster.start(config.topology, config=config) as cluster:
            outputs = await complete_all(cluster, texts, max_new_tokens=TOKENS)
            return [[token.id for token in output] for output in outputs], await cluster.stats()

    ours, stats = asyncio.run(answer())
    found = compare(Reference(bundled_model_path()), texts, ours)
    if not stats["migration"]["copies"]:
        raise RuntimeError("no expert was copied, so nothing was shown of copies")
    return {
        **found,
        "experts_copied": stats["migration"]["copies"],
        "pairs_on_replicas": stats["counters"].get("replica_pairs", 0),
        "topology": config.topology.describe(),
        "attention_on": attention,
        "kernels": kernels,
    }


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
