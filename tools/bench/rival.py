"""``transformers`` in a process of its own, as one side of a comparison."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from afore.core.clock import deadline
from afore.core.errors import HostError, RoleLost
from afore.tools.bench.ab import Outcome

IMPLEMENTATIONS: Final = ("grouped_mm", "batched_mm", "eager")
"""transformers' ways to run experts on a CPU, the likeliest first."""
LINE_BYTES: Final = 64 << 20
READY_US: Final = 180e6
RUN_US: Final = 600e6
NAME: Final = "transformers"


class RivalProcess:
    """One process with one number of threads."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @classmethod
    @contextlib.asynccontextmanager
    async def start(cls, model: str, threads: int) -> AsyncIterator[RivalProcess]:
        """Loads ``model``. Waiting threads sleep (``OMP_WAIT_POLICY``): on shared cores spinning ones would slow both sides."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "afore.tools.bench.rival_child",
            model,
            str(threads),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE_BYTES,
            start_new_session=True,  # Ctrl-C is the parent's to handle
            env={
                **os.environ,
                "OMP_NUM_THREADS": str(threads),
                "OMP_WAIT_POLICY": "PASSIVE",
                "TOKENIZERS_PARALLELISM": "false",
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            },
        )
        try:
            rival = cls(process)
            await rival._answer("loading the model", READY_US)
            yield rival
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def run(
        self, implementation: str, prompts: Sequence[Sequence[int]], *, max_tokens: Sequence[int], ignore_eos: bool
    ) -> Outcome:
        """Decodes all prompts as one batch, at most ``max_tokens`` of each.

        Raises ``RoleLost`` when the process ends, ``DeadlineExceeded``.
        """
        command = {
            "implementation": implementation,
            "prompts": [list(prompt) for prompt in prompts],
            "max_tokens": list(max_tokens),
            "ignore_eos": ignore_eos,
        }
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            async with deadline(READY_US, peer=NAME, operation="taking a command"):
                await self._process.stdin.drain()
        answer = await self._answer(f"decoding with {implementation}", RUN_US)
        tokens = tuple(tuple(row) for row in answer.pop("tokens"))
        return Outcome(tokens=tokens, **answer)

    async def _answer(self, operation: str, timeout_us: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        async with deadline(timeout_us, peer=NAME, operation=operation):
            line = await self._process.stdout.readline()
        if not line:
            raise RoleLost(NAME, f"its process ended while {operation}", "its message stands above")
        answer = json.loads(line)
        if not isinstance(answer, dict):
            raise HostError(NAME, f"answered {line[:100]!r}")
        return answer
