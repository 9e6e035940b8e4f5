"""A role process in an interpreter of its own: ``python -m afore.serving.alone SPEC_FD LIFELINE_FD``.

For roles on GPUs: CUDA that anybody initialised in the fork server, some library's question for GPUs suffices, is of no use in its
children. The description comes through a pipe, because a command line is everybody's to read.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, NoReturn

from afore.core.topology import ATTENTION, FFN, PREFILL


def is_alone(spec: dict[str, Any]) -> bool:
    """Whether a process of this description must not be what the fork server was."""
    device = spec["config"]["device"]
    experts = device["name"] == "cuda"
    attention = device["attention"] == "cuda" or (device["attention"] == "auto" and experts)
    return any((role == FFN and experts) or (role in (ATTENTION, PREFILL) and attention) for role, _ in spec["roles"])


def become_alone(spec: dict[str, Any], lifeline: int) -> NoReturn:
    """In a forked child: this process starts anew, with the same number. Raises ``OSError``."""
    description = json.dumps(spec).encode()
    read, write = os.pipe()
    os.write(write, description)  # a few kilobytes, which a pipe holds
    os.close(write)
    for descriptor in (read, lifeline):
        os.set_inheritable(descriptor, True)
    arguments = [sys.executable, "-m", "afore.serving.alone", str(read), str(lifeline)]
    os.execv(sys.executable, arguments)


def main(argv: list[str]) -> int:
    """The process's life; returns its exit status."""
    read, lifeline = map(int, argv)
    with open(read, "rb") as pipe:
        spec = json.loads(pipe.read())
    os.set_inheritable(lifeline, False)
    import torch

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    from afore.serving.process import run_process
    from afore.serving.spec import ProcessSpec

    return run_process(ProcessSpec.from_json(spec), lifeline=lifeline)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
