"""What is looked at before anything is started: policy, checkpoint, lengths, memory."""

from __future__ import annotations

import numpy as np

from afore.core.config import RunConfig
from afore.core.slots import contiguous_primaries
from afore.models.budget import memory_budget
from afore.models.checkpoint import Checkpoint
from afore.models.loading import verify_checkpoint
from afore.scheduler.policies.registry import check_policy
from afore.serving.door import request_limits
from afore.serving.spec import checkpoint_path
from afore.workers.kv_layout import kv_layout


def check(config: RunConfig) -> None:
    """Refuses what cannot run, before anything is started: the policy's name, the checkpoint, lengths it does not have.

    Raises ``ConfigError`` or ``CheckpointError``.
    """
    check_policy(config.policy)
    with Checkpoint(checkpoint_path(config)) as checkpoint:
        verify_checkpoint(checkpoint)
        request_limits(config, checkpoint.spec)


def describe_memory(config: RunConfig) -> list[str]:
    """What each role will take, one line each, from the checkpoint's headers alone. Raises ``CheckpointError``."""
    topology = config.topology
    with Checkpoint(checkpoint_path(config)) as checkpoint:
        primaries_E = contiguous_primaries(checkpoint.spec.num_experts, topology.ffn)
        budget = memory_budget(
            checkpoint,
            primaries_per_worker=np.bincount(primaries_E, minlength=topology.ffn).tolist(),
            slots_per_worker=topology.slots_N,
            kv_layout=kv_layout(config, checkpoint.spec),
        )
    ffn = budget.ffn_weights_N
    ffn_range = _mib(max(ffn)) if min(ffn) == max(ffn) else f"{_mib(min(ffn))} to {_mib(max(ffn))}"
    return [
        f"memory of {topology.attention} attention: {_mib(budget.attention_weights)} of weights and "
        f"{_mib(budget.attention_kv)} of KV cache each",
        f"memory of {topology.ffn} ffn: {ffn_range} of experts each (primaries and redundant slots)",
        f"memory of {topology.prefill} prefill: {_mib(budget.prefill_weights)} of weights each",
    ]


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB" if nbytes < 2**30 else f"{nbytes / 2**30:.1f} GiB"
