"""Compiles the kernels once, side by side, before workers of the suite would each compile them: ``python -m tests.kernels``.

numba keeps them beside the sources, so that later runs take seconds.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context

POLICIES = ("afore", "afore-plus")


def compile_of(policy: str) -> None:
    """What a scheduler of ``policy`` calls; with the first one also what the other roles do."""
    from afore.scheduler.policies.registry import policy_kernels

    others: tuple[Callable[[], None], ...] = ()
    if policy == POLICIES[0]:
        from afore.models.fused_kernels import compile_fused_kernels
        from afore.workers.kernels import compile_kernels

        others = compile_kernels, compile_fused_kernels
    for compile_group in (*policy_kernels(policy), *others):
        compile_group()


def main() -> int:
    """Returns 0 when all are there; the status of a process that could not otherwise."""
    began_s = time.monotonic()
    sys.stdout.write("compiling kernels (some minutes the first time) ...\n")
    sys.stdout.flush()
    processes = [get_context("spawn").Process(target=compile_of, args=(policy,)) for policy in POLICIES]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    failed = [process.exitcode for process in processes if process.exitcode]
    if failed:
        return 1
    sys.stdout.write(f"kernels are there after {time.monotonic() - began_s:.0f} s on {os.cpu_count()} cores\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
