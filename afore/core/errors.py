"""One error tree: every message names who, what, and the remedy.

``AforeError`` is the root. Users' mistakes are ``ConfigError`` and ``CheckpointError`` (exit status 2 at the command line);
what another process or the network did is a ``TransportError``; what ended a request is a ``RequestError``.
"""

from __future__ import annotations

from typing import Any, ClassVar


def why_not(error: Exception) -> str:
    """What the system says of a file, without its number and the name, which our messages have already."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


class AforeError(Exception):
    """Root of every error that AFORE raises on purpose. Whole after a way between processes, fields and message."""

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception is made again from its message alone, which is not what the constructors below take.
        return _again, (type(self), self.args, self.__dict__)


def _again(kind: type[AforeError], args: tuple[Any, ...], fields: dict[str, Any]) -> AforeError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(fields)
    return error


class ConfigError(AforeError, ValueError):
    """A value that a user gave cannot be used. ``field`` is its dotted name, ``remedy`` what to write instead."""

    def __init__(self, field: str, problem: str, remedy: str = "") -> None:
        self.field = field
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"{field}: {problem}" + (f"; {remedy}" if remedy else ""))


class CheckpointError(AforeError):
    """A model directory cannot be read: ``path`` is the file or directory, ``remedy`` what mends it."""

    def __init__(self, path: str, problem: str, remedy: str = "") -> None:
        self.path = path
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"{path}: {problem}" + (f"; {remedy}" if remedy else ""))


class HostError(AforeError):
    """This machine lacks something a role needs (room or permission in /dev/shm, file descriptors, memory)."""

    def __init__(self, resource: str, problem: str, remedy: str = "") -> None:
        self.resource = resource
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"{resource}: {problem}" + (f"; {remedy}" if remedy else ""))


class TransportError(AforeError):
    """Something between two processes failed: ``peer`` (who), ``operation`` (what), ``hint`` (the remedy)."""

    kind: ClassVar[str] = "peer "
    """What ``peer`` is, in the message."""

    def __init__(self, peer: str, operation: str, hint: str = "") -> None:
        self.peer = peer
        self.operation = operation
        self.hint = hint
        super().__init__(f"{self.kind}{peer}: {operation}" + (f"; {hint}" if hint else ""))


class PeerLost(TransportError):
    """The peer's process or endpoint is gone; nothing more will come from it in this epoch."""


class PeerUnreachable(PeerLost):
    """The peer's machine answers no more: it may be down, or the network between; the process may still live."""


class DeadlineExceeded(TransportError, TimeoutError):
    """The operation did not finish before its deadline; the link stays usable unless the message says otherwise."""


class ClusterLost(PeerLost):
    """A cluster ended while it was being joined; ``peer`` is its name."""

    kind = "cluster "


class ClusterLate(DeadlineExceeded):
    """A cluster does not serve in time; ``peer`` is its name."""

    kind = "cluster "


class RegionRevoked(TransportError):
    """The region was closed by its owner, or belongs to an epoch that has ended."""


class LinkClosed(TransportError):
    """The link was closed on this side; connect again."""


class AccessRefused(TransportError, ValueError):
    """An offset, a length or a key that the region does not have: refused before a byte was written."""


class WireError(TransportError):
    """Bytes that are not a valid record: wrong magic, length, checksum or type. Nothing of it was used."""


class VersionMismatch(TransportError):
    """The two sides speak different wire versions; the message names both."""


class AuthenticationFailed(TransportError):
    """The peer could not prove that it knows the cluster's secret."""


class RoleLost(PeerLost):
    """A role of the topology died (``role`` is its name, such as ``ffn-2``); the epoch has ended."""

    kind = ""

    def __init__(self, role: str, reason: str, hint: str = "start the cluster again") -> None:
        self.role = role
        self.reason = reason
        super().__init__(role, reason, hint)


class PlanError(AforeError):
    """A plan breaks a rule of its own: validator and ring reader say which."""


class SlotError(AforeError):
    """A slot was used in a way that could read weights while they are written. Always a defect of AFORE."""


class DeviceError(AforeError):
    """Work on a device failed: ``work`` (span and target) raised the error that is this one's cause. What follows it is dropped."""

    def __init__(self, device: str, work: str, problem: str) -> None:
        self.device = device
        self.work = work
        self.problem = problem
        super().__init__(f"device {device}: {work}: {problem}")


class DeviceClosed(DeviceError):
    """The device was closed before the work was reached."""


class RequestError(AforeError):
    """A request ended without its tokens: ``request_id`` and why."""

    def __init__(self, request_id: str, problem: str, remedy: str = "") -> None:
        self.request_id = request_id
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"request {request_id}: {problem}" + (f"; {remedy}" if remedy else ""))


class PromptTooLong(RequestError):
    """Prompt and requested tokens do not fit the model's context or the KV cache."""


class QueueFull(RequestError):
    """As many requests wait as may wait; nothing is wrong with this one."""


class KVCacheFull(AforeError):
    """An attention worker has fewer free key/value blocks than a sequence needs; nothing was taken."""

    def __init__(self, *, needed: int, free: int, total: int) -> None:
        self.needed = needed
        self.free = free
        self.total = total
        super().__init__(f"key/value cache: {needed} blocks needed, {free} of {total} free; wait for a request to end")
