"""Take the terminal of a container from runsc: it connects to a socket of ours and sends the master of a new pty.

runsc sends it before it starts the sandbox (gvisor pkg/console, ``--console-socket``). A size that is set on the master
reaches the guest, with SIGWINCH (real agents, tried; tests/kernel/test_contract_terminal.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import termios
from pathlib import Path
from typing import Final

from policy import errors
from sandbox.kernel.net import unix_address

_SOCKET: Final = "console.sock"
_WINSIZE = struct.Struct("4H")


class ConsoleSocket:
    """A listening socket in ``directory``, and the terminal that came over it. ``address`` is for runsc."""

    def __init__(self, directory: Path, size: tuple[int, int]) -> None:
        self._size = size
        self.master = -1
        self._connection: socket.socket | None = None
        self._directory = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self.address = unix_address.through(self._directory, _SOCKET, process=os.getpid())
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            self._listener.bind(self.address)
            self._listener.listen(1)
        except OSError as e:
            self.close()
            raise errors.KernelError(f"console socket: {e.strerror}") from e

    def fileno(self) -> int:
        """Return the descriptor to wait on; it changes with each ``poll``."""
        return (self._connection or self._listener).fileno()

    def poll(self) -> bool:
        """Take what has come. Returns whether the terminal is there; its size is set then. Never blocks."""
        if self.master >= 0:
            return True
        with contextlib.suppress(BlockingIOError):
            if self._connection is None:
                self._connection, _ = self._listener.accept()
                self._connection.setblocking(False)
            # runsc sends the name of the terminal with it.
            _, fds, _, _ = socket.recv_fds(self._connection, 4096, 1)
            if fds:
                self.master = fds[0]
                os.set_inheritable(self.master, False)
                self.resize(*self._size)
        return self.master >= 0

    def resize(self, rows: int, columns: int) -> None:
        """Set the size of the terminal, or the size that it will have."""
        self._size = rows, columns
        if self.master >= 0:
            fcntl.ioctl(self.master, termios.TIOCSWINSZ, _WINSIZE.pack(rows, columns, 0, 0))

    def close(self) -> None:
        """Give the descriptors back; the socket's file goes with its directory."""
        self._listener.close()
        if self._connection is not None:
            self._connection.close()
        os.close(self._directory)
        if self.master >= 0:
            os.close(self.master)
