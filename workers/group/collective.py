"""torch.distributed between the FFN workers of an epoch: rows are gathered and partial rows reduced among them.

``nccl`` between GPUs, each worker on one of its own; calls are enqueued on torch's current stream and wait for nothing on the
host. Every worker makes the same calls in the same order, or data is wrong in silence: only the sequencer leads here. ``gloo`` is
the same code between CPUs, for tests. One process has one such group at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import socket
from typing import Any, Literal

import torch
import torch.distributed as dist

from afore.core.errors import ConfigError, DeadlineExceeded, PeerLost
from afore.core.topology import FFN, member_name
from afore.workers.group.base import Meet

_log = logging.getLogger(__name__)

# torch's stubs do not re-export them, and a torch without torch.distributed has none.
_TCP_STORE: Any = getattr(dist, "TCPStore", None)
_PREFIX_STORE: Any = getattr(dist, "PrefixStore", None)
Backend = Literal["nccl", "gloo"]


class Collective:
    """One worker's part. Make it with ``join``."""

    def __init__(self, backend: Backend, rank: int, size: int) -> None:
        self.backend: Backend = backend
        self.rank = rank
        self.size = size
        self._left = False

    @classmethod
    async def join(
        cls,
        meet: Meet,
        *,
        backend: Backend,
        rank: int,
        size: int,
        epoch: int,
        timeout_s: float,
        ordinal: int | None,
        listen_at: str = "127.0.0.1",
    ) -> Collective:
        """Returns once all ``size`` workers are here. ``ordinal``: this worker's GPU. ``listen_at``: address of worker 0's store.

        Raises ``ConfigError`` where this process has a group already, or cannot listen; ``PeerLost``, ``DeadlineExceeded``.
        """
        if dist.is_initialized():
            raise ConfigError(
                "device.group", "this process has a torch.distributed group already", "one FFN worker a process"
            )
        patience = datetime.timedelta(seconds=timeout_s)
        name = member_name(FFN, rank)
        try:
            async with asyncio.timeout(timeout_s):
                store: Any
                if rank == 0:
                    store = _host_store(listen_at, patience)
                    await meet(store.port)
                else:
                    host, port = await meet(None)
                    store = await asyncio.to_thread(_TCP_STORE, host, port, is_master=False, timeout=patience)
                await asyncio.to_thread(_open, store, backend, rank, size, epoch, patience, ordinal)
        except TimeoutError:
            raise DeadlineExceeded(
                name,
                f"the {backend} group of {size} FFN workers did not come together within {timeout_s:g} s",
                "see the other workers' logs; NCCL_DEBUG=INFO says what NCCL tries; or use --device.group direct",
            ) from None
        except (RuntimeError, dist.DistError) as error:
            raise PeerLost(
                name,
                f"the {backend} group of {size} FFN workers cannot be opened: {_first_line(error)}",
                "NCCL_DEBUG=INFO says why; or use --device.group direct",
            ) from error
        _log.info("%s is in the %s group of %d FFN workers", name, backend, size)
        return cls(backend, rank, size)

    def gather(self, all_XD: torch.Tensor, own_XD: torch.Tensor) -> None:
        """all = the workers' ``own``, one behind the other by rank."""
        _gather_call()(all_XD, own_XD)

    def scatter_sum(self, own_XD: torch.Tensor, all_XD: torch.Tensor) -> None:
        """own = this worker's rows of the sum of the workers' ``all``."""
        _scatter_call()(own_XD, all_XD)

    def leave(self) -> None:
        """Gives it up: calls that still wait for others end. Idempotent."""
        if self._left:
            return
        self._left = True
        if self.backend == "nccl":
            # Where a peer is gone, a call of ours waits on the GPU for ever; giving up needs nobody's consent.
            with contextlib.suppress(AttributeError, RuntimeError):
                dist.group.WORLD.abort()  # type: ignore[union-attr]
        try:
            dist.destroy_process_group()
        except (RuntimeError, ValueError, AssertionError) as error:
            _log.warning("the %s group did not end in order: %s", self.backend, _first_line(error))


def nccl_missing() -> str:
    """Why torch cannot use NCCL here; empty where it can."""
    if not dist.is_available():
        return "this torch was built without torch.distributed"
    return "" if dist.is_nccl_available() else "this torch was built without NCCL"


def _open(
    store: Any, backend: str, rank: int, size: int, epoch: int, patience: datetime.timedelta, ordinal: int | None
) -> None:
    """In a thread of its own: it waits for the others."""
    device = None
    if ordinal is not None:
        torch.cuda.set_device(ordinal)  # of this thread
        device = torch.device("cuda", ordinal)
    dist.init_process_group(
        backend,
        store=_PREFIX_STORE(f"epoch-{epoch}", store),
        rank=rank,
        world_size=size,
        timeout=patience,
        device_id=device,
    )


def _host_store(host: str, patience: datetime.timedelta) -> Any:
    """Where the workers come together: on one address alone, at a free port."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family, backlog=512)
    except OSError as error:
        raise ConfigError(
            "topology.listen", f"nothing can listen at {host} ({error.strerror})", "give an address of this machine"
        ) from error
    port = listener.getsockname()[1]
    # The store closes the descriptor that it is given.
    return _TCP_STORE(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=patience,
        master_listen_fd=listener.detach(),
    )


def _gather_call() -> Any:
    """By whichever name this torch has it."""
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _scatter_call() -> Any:
    return getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
