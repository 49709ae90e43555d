"""gVisor's own word that the container has started: a trace session with one point, read from a socket.

``runsc run`` does not say when the first process runs, and nothing inside the sandbox may be trusted to say it. A
pod-init trace session with the point ``container/start`` sends one message to a SEQPACKET socket of ours at that
moment (gvisor pkg/sentry/seccheck/sinks/remote: handshake, then a header of size, type and dropped count).
tests/kernel/test_gvisor.py fails with a runsc that says it otherwise. A run that is observed (``covenant learn``) has
more points in its session.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from policy import data, errors
from policy.learn.observed import SeenAccess
from sandbox.kernel import small_files
from sandbox.kernel.net import unix_address
from sandbox.kernel.runsc import trace_points

# How often the sentry tries to send a message of an observed run, 10 ms apart, before it drops it: the agent waits.
_RETRIES = 3000
# Read at most so many messages in one turn.
_AT_ONCE = 512
# protobuf Handshake{version: 1}, what the sink sends first and expects back
_HANDSHAKE = b"\x08\x01"
_SOCKET = "trace.sock"
# What runsc is told of it, in the same directory.
CONFIG = "pod-init.json"


class StartTrace:
    """A listening socket in ``directory``; ``fileno`` is readable whenever ``poll`` has something to do.

    ``saw`` is called with each access to files and programs, once the container has started, and with one
    that is `lost` where the sentry could not send some.
    """

    def __init__(self, directory: Path, *, saw: Callable[[SeenAccess], None] | None = None) -> None:
        self._saw, self._running, self._dropped = saw, False, 0
        self._reader = trace_points.TraceReader()
        self._directory = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        # runsc is told the same address, and connects while the run goes on: our descriptor, by our number, until then.
        address = unix_address.through(self._directory, _SOCKET, process=os.getpid())
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._connection: socket.socket | None = None
        self._greeted = False
        self._epoll = select.epoll()
        try:
            self._listener.bind(address)
            self._listener.listen(1)
            self._listener.setblocking(False)
            self._epoll.register(self._listener.fileno(), select.EPOLLIN)
        except OSError as e:
            self.close()
            raise errors.KernelError(f"trace socket: {e.strerror}") from e
        self.config = directory / CONFIG
        small_files.put(self.config, json.dumps(_session(address, () if saw is None else _points())).encode())

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._epoll.fileno()

    def poll(self) -> bool:
        """Take what has arrived. Returns True once, when the container has started. Never blocks."""
        if self._connection is None:
            with contextlib.suppress(BlockingIOError):
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                self._connection = connection
                self._epoll.register(connection.fileno(), select.EPOLLIN)
            return False
        try:
            message = self._connection.recv(1 << 20)
            if message and not self._greeted:
                self._greeted = True
                self._connection.send(_HANDSHAKE)
                return False
        except BlockingIOError:
            return False
        except ConnectionError:
            message = b""
        if not message:
            # The sandbox ended before it started its container; the exit is reported elsewhere.
            self._epoll.unregister(self._connection.fileno())
            return False
        if len(message) < trace_points.HEADER.size:
            return False
        self._running = trace_points.HEADER.unpack_from(message)[1] == trace_points.CONTAINER_START
        return self._running

    def drain(self, most: int | None = _AT_ONCE) -> None:
        """Take what an observed run sends after its start, ``most`` messages of it. Never blocks."""
        taken = 0
        while self._running and self._saw is not None and self._connection is not None and taken != most:
            try:
                message = self._connection.recv(1 << 20)
            except BlockingIOError:
                return
            except ConnectionError:
                message = b""
            if len(message) < trace_points.HEADER.size:
                self._running = False
                self._epoll.unregister(self._connection.fileno())
                return
            taken += 1
            dropped = trace_points.HEADER.unpack_from(message)[2]
            if dropped != self._dropped:
                self._dropped = dropped
                self._saw(SeenAccess("lost", ""))
            if (found := self._reader.parsed(message)) is not None:
                self._saw(found)

    @property
    def watches(self) -> Mapping[int, Callable[[], None]]:
        """Return the watch of an observed run, none for another."""
        return {} if self._saw is None else {self.fileno(): self.drain}

    def close(self) -> None:
        """Take the last messages of an observed run, and give the descriptors back.

        The socket's file goes with its directory.
        """
        self.drain(None)
        self._epoll.close()
        self._listener.close()
        if self._connection is not None:
            self._connection.close()
        os.close(self._directory)


def _points() -> tuple[dict[str, Any], ...]:
    """Return the points of an observed run beside the start of its container."""
    return tuple(trace_points.points(data.syscalls(os.uname().machine).numbers))


def _session(endpoint: str, more: tuple[dict[str, Any], ...]) -> dict[str, object]:
    retries = _RETRIES if more else 3
    sink = {"name": "remote", "config": {"endpoint": endpoint, "retries": retries}}
    return {"trace_session": {"name": "Default", "points": [{"name": "container/start"}, *more], "sinks": [sink]}}
