"""The fork server: imports everything once, then forks role processes on request, so that nine roles are up in seconds.

Run by the supervisor as ``python -m afore.serving.zygote FD POLICY`` in a session of its own, with one end of a socket pair.
Requests and reports are JSON lines:

    supervisor → zygote   {"check": {…RunConfig…}}   {"fork": {…ProcessSpec…}}
    zygote → supervisor   {"progress": text}   {"ready": pid}   {"checked": {"memory": [lines]} or {"refused": [error, parts]}}
                          {"forked": name, "pid": n}   {"exited": name, "pid": n, "status": n}

It has no event loop and no threads, so a fork copies nothing that could be held. When the supervisor is gone (end of file), it ends
its children and itself; when it is gone itself, each child's lifeline (a pipe only the zygote holds open) ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from typing import Any

KILL_AFTER_S = 3.0
"""How long children have to end after SIGTERM before SIGKILL."""


def main(fd: int, policy: str) -> int:
    """The zygote's life, for a cluster of that policy. Returns its exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the supervisor, which ends us in order
    connection = socket.socket(fileno=fd)
    from afore.serving.preload import preload

    preload(policy, lambda what: connection.sendall(json.dumps({"progress": what}).encode() + b"\n"))
    return _Zygote(connection).run()


class _Zygote:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._names: dict[int, str] = {}
        self._lifeline_read, self._lifeline_write = os.pipe2(os.O_CLOEXEC)
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._pending = b""

    def run(self) -> int:
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_terminate)
        try:
            self._send({"ready": os.getpid()})
            while True:
                requests = self._connection.fileno()
                readable, _, _ = select.select([requests, self._wake_read], [], [])
                if self._wake_read in readable:
                    os.read(self._wake_read, 4096)
                    self._reap()
                if requests in readable and not self._serve_requests():
                    return 0
        except (BrokenPipeError, ConnectionResetError, _Terminated):
            return 0
        finally:
            self._end_children()

    def _on_terminate(self, *_: object) -> None:
        raise _Terminated

    def _serve_requests(self) -> bool:
        data = self._connection.recv(1 << 16)
        if not data:
            return False
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            request = json.loads(line)
            if "check" in request:
                self._send({"checked": _check(request["check"])})
            else:
                self._fork(request["fork"])
        return True

    def _fork(self, spec: dict[str, Any]) -> None:
        _flush()
        # SIGTERM is for the zygote's loop: a child that is not yet itself must not take it for that.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        pid = os.fork()
        if pid == 0:
            self._become(spec)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        self._names[pid] = spec["name"]
        self._send({"forked": spec["name"], "pid": pid})

    def _become(self, spec: dict[str, Any]) -> None:
        """In the child: drops what is the zygote's, runs the roles, never returns."""
        status = 70
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            self._connection.close()
            for fd in (self._lifeline_write, self._wake_read, self._wake_write):
                os.close(fd)
            from afore.serving.alone import become_alone, is_alone

            if is_alone(spec):
                become_alone(spec, self._lifeline_read)
            from afore.serving.process import run_process
            from afore.serving.spec import ProcessSpec

            status = run_process(ProcessSpec.from_json(spec), lifeline=self._lifeline_read)
        finally:
            with contextlib.suppress(OSError, ValueError):
                _flush()
            os._exit(status)

    def _reap(self) -> None:
        while self._names:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            name = self._names.pop(pid)
            self._send({"exited": name, "pid": pid, "status": os.waitstatus_to_exitcode(status)})

    def _end_children(self) -> None:
        for pid in self._names:
            os.kill(pid, signal.SIGTERM)
        give_up = time.monotonic() + KILL_AFTER_S
        killed = False
        while self._names:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid:
                self._names.pop(pid, None)
                continue
            if time.monotonic() > give_up and not killed:
                killed = True
                for left in self._names:
                    os.kill(left, signal.SIGKILL)
            select.select([], [], [], 0.01)

    def _send(self, message: dict[str, Any]) -> None:
        self._connection.sendall(json.dumps(message).encode() + b"\n")


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # None where the shell closed it.
        if stream is not None:
            stream.flush()


def _check(data: dict[str, Any]) -> dict[str, Any]:
    from afore.core.errors import CheckpointError, ConfigError, HostError
    from afore.serving.checks import (
        check,
        check_shared_memory,
        describe_gpus,
        describe_kernels,
        describe_memory,
    )
    from afore.serving.spec import config_from_json

    try:
        config = config_from_json(data)
        found = check(config)
        check_shared_memory(config)
        return {"memory": [*describe_memory(config), describe_kernels(config), *describe_gpus(config, found)]}
    except ConfigError as error:
        return {"refused": ["ConfigError", error.field, error.problem, error.remedy]}
    except CheckpointError as error:
        return {"refused": ["CheckpointError", error.path, error.problem, error.remedy]}
    except HostError as error:
        return {"refused": ["HostError", error.resource, error.problem, error.remedy]}
    except Exception as error:
        # Whatever else it is, it comes from what was given; without an answer the launcher would wait for one.
        problem = f"it cannot be checked: {type(error).__name__}: {' '.join(str(error).split())}"
        return {
            "refused": ["ConfigError", "configuration", problem, "leave out what is not needed, one option at a time"]
        }


class _Terminated(Exception):
    """SIGTERM: leave the loop."""


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
