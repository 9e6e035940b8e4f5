"""Where the workers of a cluster with GPUs are, and what follows: who reads rows where, and by which group. Imports no torch.

Decided from the configuration and from what the driver shows, the same on every worker of a machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from afore.core.config import RunConfig
from afore.core.errors import ConfigError
from afore.core.topology import ATTENTION, FFN
from afore.scheduler.policies.registry import policy_wants_predictions
from afore.workers.device.cuda.ipc import HandleTable

ROWS = "rows"
"""Label of an attention worker's region with the handle of its rows."""
ROWS_NBYTES = HandleTable.nbytes(1)
Reaches = Callable[[int, int], bool]
"""Whether one GPU reads another one's memory."""


def attention_on_gpu(config: RunConfig) -> bool:
    """Whether attention and prefill workers compute on GPUs: by default where FFN workers do."""
    where = config.device.attention
    return where == "cuda" or (where == "auto" and config.device.name == "cuda")


def gpus_of(config: RunConfig, role: str, count: int) -> list[int]:
    """The GPU of every worker of a role on this machine, which shows ``count``: each role takes them in turn.

    Raises ``ConfigError`` for one that is not there.
    """
    gpus = config.device.gpus or tuple(range(count))
    chosen = [gpus[rank % len(gpus)] for rank in range(config.topology.count(role))]
    for ordinal in chosen:
        if not 0 <= ordinal < count:
            raise ConfigError("device.gpus", f"there is no GPU {ordinal}: {count} are visible", "see nvidia-smi -L")
    return chosen


def ffn_together(config: RunConfig) -> bool:
    """Whether all FFN workers are on one machine, as far as the configuration says."""
    topology = config.topology
    if topology.nodes is not None:
        return len({topology.node_of(FFN, rank) for rank in range(topology.ffn)}) == 1
    return not topology.spread


def rows_apart(config: RunConfig, count: int | None = None, reaches: Reaches | None = None) -> str:
    """Why attention workers' rows cannot lie in their GPUs' memory; empty where they can.

    ``count``, ``reaches``: what the driver shows; None where it was not asked: then the configuration alone decides.
    """
    if not attention_on_gpu(config):
        return "attention is on CPUs"
    if config.device.name != "cuda":
        return "FFN workers are on CPUs"
    if config.topology.spread:
        return "workers may be on several machines"
    if config.record_ids or config.record_wire is not None:
        return f"{'record_ids' if config.record_ids else 'record_wire'} needs them on the host"
    if policy_wants_predictions(config.policy) == "transitions":
        return f"policy {config.policy} needs the ids on the host"
    if count is not None and reaches is not None:
        used = sorted({*gpus_of(config, ATTENTION, count), *gpus_of(config, FFN, count)})
        for left, right in itertools.permutations(used, 2):
            if not reaches(left, right):
                return f"GPU {left} does not reach GPU {right}"
    return ""


def group_of(config: RunConfig, count: int, reaches: Reaches, nccl_missing: str) -> tuple[str, str]:
    """(``nccl``, ``ipc`` or ``hosted``; why) for the FFN workers of this machine's GPUs.

    ``nccl_missing``: why torch has no NCCL; empty where it has. Raises ``ConfigError`` for a group that cannot be.
    """
    wanted, size = config.device.group, config.topology.ffn
    apart = rows_apart(config, count, reaches)
    alone = ("hosted", apart) if apart else ("ipc", "they read rows in the attention workers' GPU memory")
    gpus = gpus_of(config, FFN, count) if ffn_together(config) else []
    shared = next((gpu for gpu in gpus if gpus.count(gpu) > 1), None)
    obstacle = nccl_missing or (f"several of them share GPU {shared}" if shared is not None else "")
    if wanted == "nccl":
        if obstacle:
            raise ConfigError("device.group", f"nccl cannot be: {obstacle}", "leave it at auto")
        return "nccl", "as asked for"
    if wanted == "direct" or size == 1 or obstacle:
        return alone[0], f"{obstacle}; {alone[1]}" if obstacle and size > 1 and wanted == "auto" else alone[1]
    return "nccl", "each has a GPU of its own"
