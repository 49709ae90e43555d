"""gVisor's own word that the container has started: a trace session with one point, read from a socket.

``runsc run`` does not say when the first process runs, and nothing inside the sandbox may be trusted to say it. A
pod-init trace session with the point ``container/start`` sends one message to a SEQPACKET socket of ours at that
moment (gvisor pkg/sentry/seccheck/sinks/remote: handshake, then a header of size, type and dropped count).
tests/kernel/test_gvisor.py fails with a runsc that says it otherwise.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
from pathlib import Path

from policy import errors
from sandbox.kernel import small_files
from sandbox.kernel.net import unix_address

# pkg/sentry/seccheck/points/common.proto: MESSAGE_CONTAINER_START
_CONTAINER_START = 1
_HEADER = struct.Struct("<HHI")
# protobuf Handshake{version: 1}, what the sink sends first and expects back
_HANDSHAKE = b"\x08\x01"
_SOCKET = "trace.sock"
# What runsc is told of it, in the same directory.
CONFIG = "pod-init.json"


class StartTrace:
    """A listening socket in ``directory``; ``fileno`` is readable whenever ``poll`` has something to do."""

    def __init__(self, directory: Path) -> None:
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
        small_files.put(self.config, json.dumps(_session(address)).encode())

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
        return len(message) >= _HEADER.size and _HEADER.unpack_from(message)[1] == _CONTAINER_START

    def close(self) -> None:
        """Give the descriptors back; the socket's file goes with its directory."""
        self._epoll.close()
        self._listener.close()
        if self._connection is not None:
            self._connection.close()
        os.close(self._directory)


def _session(endpoint: str) -> dict[str, object]:
    sink = {"name": "remote", "config": {"endpoint": endpoint, "retries": 3}}
    return {"trace_session": {"name": "Default", "points": [{"name": "container/start"}], "sinks": [sink]}}
