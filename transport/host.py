"""What the kernel refused, as the mistake a user made and the setting that mends it."""

from __future__ import annotations

import errno

from afore.core.errors import HostError

DESCRIPTORS_REMEDY = "raise the limit on open files (ulimit -n)"
TABLE_FULL = (errno.EMFILE, errno.ENFILE)


def host_error(error: OSError, resource: str, problem: str, remedy: str) -> HostError:
    """The ``HostError`` for ``error``: ``resource`` and ``remedy``, unless it is a full table of descriptors or memory."""
    problem = f"{problem}: {error.strerror}"
    if error.errno in TABLE_FULL:
        return HostError("file descriptors", problem, DESCRIPTORS_REMEDY)
    if error.errno == errno.ENOMEM:
        return HostError("memory", problem, "free some memory, or raise vm.max_map_count or the cgroup's limit")
    return HostError(resource, problem, remedy)
