"""gVisor's debug log from an agent's first instruction on, and not while gVisor starts.

What the filter refuses is said at the level ``debug`` alone (sandbox.kernel.runsc.debug_log), and at that level gVisor
also writes out its own filter, instruction by instruction, before it loads it: 100 KiB, and 3 of the 185 milliseconds
of processor that a run takes (ADR 0054). So it starts one level above, and is told to say more once its own filter
stands, over the socket on which ``runsc`` itself asks it (gvisor pkg/sentry/control Logging.Change, pkg/urpc: one JSON
document each way).

Until then the agent must not run, or what is refused to it first is not told. It is held by its own stdout: a pipe that
is full. The tries of a run (sandbox.probes.preload) begin with a wait until it can be written to, before the program's
first instruction, and what fills the pipe is taken out once gVisor has answered. Where nothing waits like that, gVisor
is told when it starts.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from pathlib import Path
from typing import Final

from policy import errors
from sandbox.kernel.net import unix_address

_REQUEST: Final = {"method": "Logging.Change", "arg": {"SetLevel": True, "Level": "debug"}}
# Of an answer, which has fifty: each piece of it is looked at with all that came before.
_ANSWER_BYTES: Final = 4096


class Raising:
    """The log of one sandbox, whose agent is held at ``stdout``, the end of its pipe that is read from.

    INVARIANT: nobody reads from ``stdout`` before ``poll`` has said True.
    """

    def __init__(self, stdout: int, root: Path, container: str) -> None:
        """Fill the pipe; before anything inside can run.

        Raises:
            errors.KernelError: it cannot be filled.
        """
        self._stdout, self._root, self._name = stdout, root, f"runsc-{container}.sock"
        self._asked: socket.socket | None = None
        self._answer = b""
        try:
            self._filled = _fill(stdout)
        except OSError as e:
            raise errors.KernelError(f"the agent's stdout cannot be filled: {e.strerror}") from e

    def ask(self) -> None:
        """Ask gVisor for more, once it has said that its container starts.

        Raises:
            errors.KernelError: it cannot be asked.
        """
        try:
            self._asked = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            # It may be stopped by whoever revokes the run: nobody is waited for here.
            self._asked.setblocking(False)
            with unix_address.within(self._root, self._name) as address:
                self._asked.connect(address)
            self._asked.send(json.dumps(_REQUEST).encode())
        except (ConnectionError, FileNotFoundError):
            self.close()
        except OSError as e:
            raise errors.KernelError(f"the sandbox cannot be asked for its log: {e.strerror}") from e

    @property
    def asking(self) -> bool:
        """Whether an answer is waited for: neither did it come, nor has the sandbox ended."""
        return self._asked is not None

    def fileno(self) -> int:
        """Readable once gVisor has answered, or has ended."""
        assert self._asked is not None
        return self._asked.fileno()

    def poll(self) -> bool:
        """Take what has arrived; never blocks. True once the log is on, and the agent goes on.

        Raises:
            errors.KernelError: it refuses.
        """
        if self._asked is None:
            return False
        try:
            piece = self._asked.recv(_ANSWER_BYTES)
        except BlockingIOError:
            return False
        except ConnectionError:
            piece = b""
        self._answer += piece
        try:
            answer = json.loads(self._answer)
        except (ValueError, RecursionError):
            if not piece:
                self.close()  # it has ended
            if len(self._answer) < _ANSWER_BYTES:
                return False
            answer = None
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise errors.KernelError("the sandbox does not say what its filter refuses", hint="run `covenant doctor`")
        # INVARIANT: nobody stays connected. A sandbox that ends waits ten seconds for whoever still is.
        self.close()
        self._let_go()
        return True

    def _let_go(self) -> None:
        left = self._filled
        while left:
            try:
                piece = os.read(self._stdout, left)
            except BlockingIOError:
                piece = b""
            if not piece:
                raise errors.KernelError("somebody else reads the agent's stdout")
            left -= len(piece)

    def close(self) -> None:
        """Give the descriptor back."""
        asked, self._asked = self._asked, None
        if asked is not None:
            asked.close()


def _fill(stdout: int) -> int:
    """Leave no room in a pipe, of which this is the end that is read; how many bytes that took."""
    writer = os.open(f"/proc/self/fd/{stdout}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        filled = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                filled += os.write(writer, bytes(fcntl.fcntl(writer, fcntl.F_GETPIPE_SZ)))
        return filled
    finally:
        os.close(writer)
