"""Whether one process reads another one's GPU memory here, tried: containers and virtual machines have refused it.

``python -m afore.tools.gpu_ipc HANDLE`` is the other process: it opens a megabyte and prints the sum of its bytes.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable, Sequence

import numpy as np

from afore.tools.ending import end_with
from afore.workers.device.cuda.driver import IPC_HANDLE_NBYTES, Driver, Span, load_driver
from afore.workers.device.cuda.errors import CudaError

NBYTES = 1 << 20
CHILD_S = 40.0
ALLOCATION = 2 << 20
"""A whole block of the driver's: a smaller one shares its with others, and a handle opens all of it."""
Reader = Callable[[str], str]
"""What another process prints for a handle. Raises ``RuntimeError`` with its last words."""


def ipc_missing(driver: Driver, read: Reader | None = None) -> str:
    """Why another process cannot read this one's GPU memory; empty where it can. The GPU's context must be current."""
    stream, device, host = driver.create_stream(0), driver.allocate(ALLOCATION), driver.allocate_pinned(NBYTES)
    try:
        values = np.ctypeslib.as_array((ctypes.c_uint8 * NBYTES).from_address(host))
        values[:] = np.random.default_rng(1).integers(0, 256, NBYTES)
        _copy(driver, Span(device, host, NBYTES), stream)
        try:
            handle = driver.export(device).hex()
        except CudaError as error:
            return str(error)
        try:
            found = (read or _read_in_child)(handle)
        except RuntimeError as error:
            return str(error)
        expected = str(int(values.astype(np.int64).sum()))
        return "" if found == expected else f"another process read {found!r}, not {expected}"
    finally:
        driver.free(device)
        driver.free_pinned(host)
        driver.destroy_stream(stream)


def sum_of(driver: Driver, handle: str) -> int:
    """The sum of another process's bytes. Raises ``CudaError``."""
    stream, host = driver.create_stream(0), driver.allocate_pinned(NBYTES)
    try:
        address = driver.open(bytes.fromhex(handle[: 2 * IPC_HANDLE_NBYTES]))
        try:
            _copy(driver, Span(host, address, NBYTES), stream)
        finally:
            driver.shut(address)
        return int(np.ctypeslib.as_array((ctypes.c_uint8 * NBYTES).from_address(host)).astype(np.int64).sum())
    finally:
        driver.free_pinned(host)
        driver.destroy_stream(stream)


def _copy(driver: Driver, span: Span, stream: int) -> None:
    event = driver.create_event()
    driver.copy([span], stream)
    driver.record(event, stream)
    driver.synchronise(event)
    driver.destroy_event(event)


def _read_in_child(handle: str) -> str:
    try:
        child = subprocess.run(
            [sys.executable, "-m", "afore.tools.gpu_ipc", handle],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=CHILD_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"another process has not read it within {CHILD_S:.0f} s") from error
    if child.returncode != 0:
        raise RuntimeError(" ".join(child.stderr.split())[-500:] or f"another process ended with {child.returncode}")
    return child.stdout.split()[-1] if child.stdout.split() else ""


def main(argv: Sequence[str] | None = None) -> int:
    """The other process."""
    (handle,) = sys.argv[1:] if argv is None else argv
    driver = load_driver()
    driver.retain_context(0)
    try:
        print(sum_of(driver, handle))
    except CudaError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        driver.release_context(0)
    return 0


if __name__ == "__main__":
    end_with(main)
