"""What is looked at before anything is started: policy, checkpoint, lengths, memory."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import numpy as np

from afore.core.config import RunConfig
from afore.core.errors import ConfigError, HostError
from afore.core.slots import contiguous_primaries
from afore.core.topology import ATTENTION, FFN, PREFILL, Topology
from afore.models.budget import MemoryBudget, memory_budget
from afore.models.checkpoint import Checkpoint
from afore.models.config import ModelSpec
from afore.models.fused_forms import describe_path, kernel_path
from afore.models.loading import verify_checkpoint
from afore.scheduler.policies.registry import check_policy
from afore.scheduler.role import build_policy, check_adopts, planner_config, seeded_costs
from afore.scheduler.traces.beside import ids_path
from afore.scheduler.warm_start import warm_copies
from afore.serving.door import request_limits
from afore.serving.spec import checkpoint_path
from afore.transport.layouts import layouts_for
from afore.workers.device.cuda.places import attention_on_gpu, ffn_together, gpus_of, group_of
from afore.workers.device.cuda.probe import Found
from afore.workers.kv_layout import kv_layout

SHARED_MEMORY = "/dev/shm"
DESCRIPTORS_OWN = 64
"""Files that a process opens for itself: the interpreter, weights, an event loop, its HTTP clients beside these."""
DESCRIPTORS_PER_MEMBER = 8
"""Files that one more member costs the process that has the most of them: channel, links, rings, doorbells, mapped regions."""


def check(config: RunConfig) -> Found | None:
    """Refuses what cannot run, before anything is started: the policy, the checkpoint, kernels and lengths it does not have.

    Returns the GPUs where any are asked for. Raises ``ConfigError`` or ``CheckpointError``.
    """
    check_descriptors(config.topology)
    check_policy(config.policy)
    if config.device.name == "emulated":
        raise ConfigError("device.name", f"{config.device.name} is for virtual time", "leave it at cpu")
    on_gpus = config.device.name == "cuda" or attention_on_gpu(config)
    # With workers on several machines each looks at its own GPUs: this machine may need none.
    found = check_gpus(config) if on_gpus and not config.topology.spread else None
    for field in ("trace", "record_wire"):
        _check_directory(field, getattr(config, field))
    check_record(config.record)
    if config.record is not None and config.record_ids:
        for rank in range(config.topology.attention):
            check_record(str(ids_path(config.record, rank)))
    with Checkpoint(checkpoint_path(config)) as checkpoint:
        verify_checkpoint(checkpoint)
        kernel_path(config.kernels, checkpoint.family, checkpoint.config, config.dtype)
        request_limits(config, checkpoint.spec)
        check_policy_and_start(config, checkpoint.spec)
    return found


def check_gpus(config: RunConfig) -> Found:
    """Refuses workers on GPUs where there are none, or not those that are asked for. Asks in a child of its own.

    Raises ``HostError``, ``ConfigError``.
    """
    # Only here: nobody else needs the GPU's modules.
    from afore.workers.device.cuda.kernels import check_tile, triton_implementation
    from afore.workers.device.cuda.probe import find_gpus

    if attention_on_gpu(config) and config.kernels == "fused":
        raise ConfigError(
            "kernels", "the fused kernels are the CPU's", "leave it at auto, or add --device.attention cpu"
        )
    found = find_gpus()
    if config.device.name == "cuda":
        check_tile(config.planner.tile_tokens)
        if config.device.kernels in ("triton", "grouped"):  # auto takes torch's where there is no Triton
            triton_implementation()
        _group(config, found)
    return found


def _group(config: RunConfig, found: Found) -> tuple[str, str]:
    from afore.workers.group.collective import nccl_missing

    def reaches(ordinal: int, peer: int) -> bool:
        return ordinal == peer or peer in found.gpus[ordinal].reaches

    return group_of(config, len(found.gpus), reaches, nccl_missing())


def describe_gpus(config: RunConfig, found: Found | None) -> list[str]:
    """Which GPUs workers take, and how FFN workers get their rows, a line each; nothing without GPUs."""
    if found is None:
        return []
    lines = []
    for role in (ATTENTION, PREFILL) if attention_on_gpu(config) else ():
        gpus = sorted(set(gpus_of(config, role, len(found.gpus))))
        lines.append(f"GPUs of {config.topology.count(role)} {role}: {', '.join(map(str, gpus))}")
    if config.device.name == "cuda":
        group, why = _group(config, found)
        gpus = sorted(set(gpus_of(config, FFN, len(found.gpus)))) if ffn_together(config) else []
        on = f" on GPU {', '.join(map(str, gpus))}" if gpus else ""
        lines.append(f"group of {config.topology.ffn} ffn{on}: {group} ({why})")
    return lines


def _check_directory(field: str, directory: str | None) -> None:
    if directory is None:
        return
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        usable = bool(directory) and os.access(directory, os.W_OK)
    except (OSError, ValueError):
        usable = False
    if not usable:
        raise ConfigError(field, f"{directory!r} is no directory that can be written", "give another")


def check_policy_and_start(config: RunConfig, spec: ModelSpec) -> None:
    """The policy, and the trace that its slots are filled by. Raises ``ConfigError``."""
    policy = build_policy(config, spec, seeded_costs(config, spec))
    if config.warm_start is not None:
        check_adopts(policy)
        primaries_E = contiguous_primaries(spec.num_experts, config.topology.ffn)
        warm_copies(config.warm_start, planner_config(config, spec), primaries_E, spec.num_moe_layers)


def check_record(file: str | None) -> None:
    """Refuses a file that no recording can become. Raises ``ConfigError``."""
    if file is None:
        return
    path = Path(file)
    try:
        usable = bool(path.name) and not path.is_dir() and os.access(path.parent, os.W_OK)
    except (OSError, ValueError):
        usable = False
    if not usable:
        raise ConfigError("record", f"{file!r} is no file that can be written", "name one in a directory that is there")


def check_descriptors(topology: Topology) -> None:
    """Refuses a limit on open files below what the largest process of the topology opens, after raising it as far as it goes.

    Raises ``HostError``.
    """
    needed = DESCRIPTORS_OWN + DESCRIPTORS_PER_MEMBER * len(topology.members())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise HostError(
            "file descriptors",
            f"this shell allows {hard} open files and a role may need {needed}",
            f"ulimit -n {needed}, as root where the shell refuses, or start fewer roles",
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _budget(config: RunConfig) -> MemoryBudget:
    topology = config.topology
    with Checkpoint(checkpoint_path(config)) as checkpoint:
        primaries_E = contiguous_primaries(checkpoint.spec.num_experts, topology.ffn)
        return memory_budget(
            checkpoint,
            primaries_per_worker=np.bincount(primaries_E, minlength=topology.ffn).tolist(),
            slots_per_worker=topology.slots_N,
            kv_layout=kv_layout(config, checkpoint.spec),
        )


def check_shared_memory(config: RunConfig) -> None:
    """Refuses a run whose experts, KV caches and exchanges do not fit into what /dev/shm has free now. Raises ``HostError``,
    ``ConfigError`` for a fabric that processes cannot use.

    Whoever comes in between is noticed when a role registers its regions: this is only the clear word beforehand.
    """
    if config.topology.fabric == "loopback":
        raise ConfigError("topology.fabric", "loopback does not reach other processes", "use shm or auto")
    topology, budget = config.topology, _budget(config)
    with Checkpoint(checkpoint_path(config)) as checkpoint:
        layouts = layouts_for(config, checkpoint.spec)
    needed = (
        topology.attention * (budget.attention_kv + layouts.exchange.nbytes)
        + (0 if config.device.name == "cuda" else sum(budget.ffn_weights_N))
        + layouts.mailbox.nbytes
        + layouts.ring.nbytes
        + layouts.feedback.nbytes
    )
    status = os.statvfs(SHARED_MEMORY)
    free = status.f_bavail * status.f_frsize
    if needed > free:
        raise HostError(
            SHARED_MEMORY,
            f"the topology needs {_mib(needed)} there and {_mib(free)} are free",
            "lower batch.kv_blocks or topology.redundant_slots, remove what is there, or enlarge it "
            f"(mount -o remount,size={-(-needed // 2**30) + 1}G {SHARED_MEMORY})",
        )


def describe_memory(config: RunConfig) -> list[str]:
    """What each role will take, one line each, from the checkpoint's headers alone. Raises ``CheckpointError``."""
    topology, budget = config.topology, _budget(config)
    ffn = budget.ffn_weights_N
    ffn_range = _mib(max(ffn)) if min(ffn) == max(ffn) else f"{_mib(min(ffn))} to {_mib(max(ffn))}"
    return [
        f"memory of {topology.attention} attention: {_mib(budget.attention_weights)} of weights and "
        f"{_mib(budget.attention_kv)} of KV cache each",
        f"memory of {topology.ffn} ffn: {ffn_range} of experts each (primaries and redundant slots)",
        f"memory of {topology.prefill} prefill: {_mib(budget.prefill_weights)} of weights each",
    ]


def describe_kernels(config: RunConfig) -> str:
    """What attention workers will compute with, one line; says why not the fused kernels. Raises ``CheckpointError``."""
    if attention_on_gpu(config):
        return f"kernels of {config.topology.attention} attention: modules on GPUs, attention by sdpa"
    with Checkpoint(checkpoint_path(config)) as checkpoint:
        path = describe_path(config.kernels, checkpoint.family, checkpoint.config, config.dtype)
    return f"kernels of {config.topology.attention} attention: {path}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB" if nbytes < 2**30 else f"{nbytes / 2**30:.1f} GiB"
