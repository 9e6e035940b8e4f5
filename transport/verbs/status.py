"""What a failed completion means: verbs' status as the project's error, naming peer, operation and remedy."""

from __future__ import annotations

from afore.core.errors import PeerLost, RegionRevoked, TransportError

SUCCESS, FLUSHED, REMOTE_ACCESS, RETRIES_EXCEEDED, NOT_READY_EXCEEDED = 0, 5, 10, 12, 13
NAMES = (
    "success", "local length error", "local queue pair error", "local EE context error", "local protection error",
    "flushed", "memory window bind error", "bad response", "local access error", "remote invalid request",
    "remote access error", "remote operation error", "transport retries exceeded", "receiver-not-ready retries exceeded",
    "local RDD violation", "remote invalid RD request", "remote aborted", "invalid EE context number",
    "invalid EE context state", "fatal error", "response timed out", "general error", "tag matching error",
    "tag matching rendezvous incomplete",
)  # fmt: skip
"""ibv_wc_status, by number."""


def status_name(status: int) -> str:
    """In words, with the number."""
    return f"{NAMES[status] if status < len(NAMES) else 'unknown status'} ({status})"


def link_error(peer: str, operation: str, status: int, *, revoked: bool = False, patience: str = "") -> TransportError:
    """The error that ends a link whose request failed; its queue pair takes no further request.

    ``operation`` says what was asked ("RDMA WRITE to region 7"), ``revoked`` whether the owner is known to have closed that region,
    ``patience`` how long the device tried.
    """
    failed = f"{operation} failed: {status_name(status)}"
    if status == REMOTE_ACCESS:
        if revoked:
            return RegionRevoked(peer, failed, "its region is closed: ask the owner for a new key, and connect again")
        return PeerLost(
            peer, failed, "the owner dropped the registration, or the two sides disagree on it; connect again"
        )
    if status == RETRIES_EXCEEDED:
        return PeerLost(
            peer,
            f"{failed}{f' after {patience}' if patience else ''}",
            "see whether the peer's host lives, and whether both GIDs reach each other (`python -m afore.tools.doctor`)",
        )
    if status == NOT_READY_EXCEEDED:
        return PeerLost(peer, failed, "it ran out of receives, which credits should prevent; connect again")
    return PeerLost(peer, failed, "connect again; where it comes again, see the device's error counters")
