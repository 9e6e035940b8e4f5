"""Everything a role process imports and compiles, done once in the zygote before it forks."""

from __future__ import annotations

import gc
from collections.abc import Callable

IMPORTING = "loading torch"
MODELS = "loading models"
KERNELS = "loading kernels"


def preload(policy: str, tell: Callable[[str], None]) -> None:
    """Imports the roles, loads compiled kernels, and freezes the heap so that forks share it. ``tell`` hears what comes next.

    Of the planners only the policy's is compiled: another one's would take a minute of the first start for nothing.

    One torch thread is set before any torch operation: a parent that ever ran a parallel region makes its children hang in theirs.
    """
    tell(IMPORTING)
    import numpy.ma  # numba imports it at the first call of any kernel: 20 ms in each forked role
    import torch

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)

    from afore.core.config import RunConfig
    from afore.models.bundle import bundled_model_path
    from afore.models.checkpoint import Checkpoint
    from afore.models.fused_kernels import compile_fused_kernels
    from afore.models.loading import load_dense_model
    from afore.scheduler.policies.registry import policy_kernels
    from afore.serving import process
    from afore.workers.kernels import compile_kernels

    del RunConfig, process, numpy
    groups = (*policy_kernels(policy), compile_kernels, compile_fused_kernels)
    for number, compile_group in enumerate(groups, start=1):
        tell(f"{KERNELS} ({number} of {len(groups)})")
        compile_group()
    tell(MODELS)
    # transformers resolves modules lazily: building a small model once pulls in what every role needs.
    with Checkpoint(bundled_model_path()) as checkpoint:
        load_dense_model(checkpoint, torch.float32)
    gc.collect()
    gc.freeze()
