"""What the CUDA driver's error codes mean here: the mistake that was made, and what mends it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from afore.core.errors import DeviceError

_MEANINGS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "CUDA_ERROR_OUT_OF_MEMORY": (
            "the GPU's memory is full",
            "lower topology.redundant_slots or batch.kv_blocks, start fewer workers on this GPU, or end what else runs there",
        ),
        "CUDA_ERROR_NO_DEVICE": ("no GPU is visible", "see nvidia-smi and CUDA_VISIBLE_DEVICES"),
        "CUDA_ERROR_INVALID_DEVICE": ("there is no such GPU", "give a device.gpus that nvidia-smi lists"),
        "CUDA_ERROR_DEVICE_UNAVAILABLE": (
            "another process holds the GPU for itself",
            "end it, or set its compute mode to default (nvidia-smi -c 0)",
        ),
        "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": (
            "the driver's library is of another version than its kernel module",
            "restart the machine after a driver update, or mount the host's libcuda into the container",
        ),
        "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": ("the driver is older than the kernels", "update the NVIDIA driver"),
        "CUDA_ERROR_NOT_INITIALIZED": (
            "CUDA was not initialised in this process",
            "open the device in the role's own process: a forked child cannot use its parent's CUDA",
        ),
        "CUDA_ERROR_DEINITIALIZED": ("the driver is shutting down", "close the device before the interpreter ends"),
        "CUDA_ERROR_INVALID_CONTEXT": (
            "the call was made without the device's context",
            "use a device from the event loop's thread only",
        ),
        "CUDA_ERROR_INVALID_HANDLE": (
            "a stream, event or mapping was used after it was closed, or belongs to another GPU",
            "this is a defect; report it with the trace",
        ),
        "CUDA_ERROR_INVALID_VALUE": (
            "an address, length or flag lies outside what was allocated",
            "this is a defect; report it with the trace",
        ),
        "CUDA_ERROR_ILLEGAL_ADDRESS": (
            "a kernel touched memory that is not its own; nothing on this GPU can go on",
            "start the cluster again; repeat with device.kernels torch, and report what differs",
        ),
        "CUDA_ERROR_LAUNCH_FAILED": (
            "a kernel ended abnormally",
            "start the cluster again; see dmesg for Xid messages",
        ),
        "CUDA_ERROR_LAUNCH_TIMEOUT": ("a kernel took longer than a display allows", "use a GPU without a display"),
        "CUDA_ERROR_ECC_UNCORRECTABLE": (
            "the GPU's memory has failed",
            "take the GPU out of service; see nvidia-smi -q",
        ),
        "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED": (
            "these two GPUs cannot reach each other's memory",
            "copies go through host memory; see nvidia-smi topo -p2p r",
        ),
        "CUDA_ERROR_TOO_MANY_PEERS": ("the GPU has as many peers as it can have", "spread workers over fewer GPUs"),
        "CUDA_ERROR_MAP_FAILED": (
            "memory of another process could not be mapped",
            "start both with the same visible GPUs, in one container or with shared IPC (--ipc=host)",
        ),
        "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED": (
            "the memory is registered already",
            "register a region once in each process",
        ),
        "CUDA_ERROR_NOT_PERMITTED": (
            "the system forbids it",
            "raise ulimit -l, and let containers lock memory (--ulimit memlock=-1)",
        ),
        "CUDA_ERROR_NOT_SUPPORTED": ("this GPU or driver cannot do it", "update the driver"),
        "CUDA_ERROR_MPS_CONNECTION_FAILED": ("the MPS server does not answer", "start it again, or stop using MPS"),
    }
)
_UNKNOWN = ("the driver refused", "look the code up in the CUDA driver API's documentation")


class CudaError(DeviceError):
    """A driver call failed: ``code`` is the driver's name for it."""

    def __init__(self, device: str, operation: str, code: str) -> None:
        self.code = code
        mistake, remedy = meaning(code)
        super().__init__(device, operation, f"{mistake} ({code}); {remedy}")


def meaning(code: str) -> tuple[str, str]:
    """(the mistake, the remedy) of a driver's error code."""
    return _MEANINGS.get(code, _UNKNOWN)
