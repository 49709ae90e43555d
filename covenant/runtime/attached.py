"""A terminal of a session that this process is attached to: three pipes whose other ends the run's shim has.

What the agent writes passes the filter of ``covenant attach`` (sandbox.shim.escapes) here, so that no later reader can
leave it out.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import anyio

from policy import errors
from sandbox.run_io import RESIZE
from sandbox.shim import escapes

# The filter needs up to 1 ms for each KiB of sequences, in which the daemon does nothing else.
_CHUNK: Final = 8 * 1024
# An agent that reads no input for so long gets no more of it.
INPUT_SECONDS: Final = 10.0


class AttachmentPipes:
    """The pipes of one attachment. ``theirs`` are the ends for the supervisor, in the order of its request."""

    def __init__(self) -> None:
        self.theirs: list[int] = []
        self._ours: list[int] = []
        for mine_writes in (True, False, True):
            read, write = os.pipe2(os.O_CLOEXEC)
            self._ours.append(write if mine_writes else read)
            self.theirs.append(read if mine_writes else write)
            os.set_blocking(self._ours[-1], False)
        self.stdin, self.stdout, self.sizes = self._ours

    def release(self) -> None:
        """Close the supervisor's ends, of which it has copies: each end of file comes from the run's shim."""
        while self.theirs:
            os.close(self.theirs.pop())

    def close(self) -> None:
        """Close all ends, which detaches. Who waits for one of them is told: its number may be another's soon."""
        self.release()
        self.stdin = self.stdout = self.sizes = -1
        while self._ours:
            anyio.notify_closing(self._ours[-1])
            os.close(self._ours.pop())


class AttachedTerminal:
    """A live attachment to the terminal of ``run_id``. ``ended`` waits for the run's record."""

    def __init__(self, run_id: str, pipes: AttachmentPipes, ended: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
        self.run_id, self.ended = run_id, ended
        self._pipes = pipes
        self._filter = escapes.EscapeFilter()
        self._lock = anyio.Lock()

    async def read(self) -> bytes | None:
        """Wait for output, and return what may be shown of it; None at its end. May be cancelled without a loss."""
        while True:
            await anyio.wait_readable(self._pipes.stdout)
            try:
                data = os.read(self._pipes.stdout, _CHUNK)
            except BlockingIOError:
                continue
            if not data:
                return self._filter.flush() or None
            if shown := self._filter.feed(data):
                return shown

    async def write(self, data: bytes) -> None:
        """Type ``data``.

        Raises:
            errors.ServiceError: the agent does not read, or the session has ended.
        """
        with anyio.move_on_after(INPUT_SECONDS):
            async with self._lock:
                await self._write(data)
            return
        raise errors.ServiceError("the agent reads no input", hint="wait until it does, and type again")

    async def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._pipes.stdin, view) :]
            except BlockingIOError:
                await self._room()
            except OSError:
                raise errors.ServiceError("the session has ended") from None

    async def _room(self) -> None:
        with contextlib.suppress(anyio.ClosedResourceError):  # the next write says so
            await anyio.wait_writable(self._pipes.stdin)

    def resize(self, rows: int, columns: int) -> None:
        """Tell the agent's terminal its new size. One that the pipe has no room for is lost: the next replaces it."""
        with contextlib.suppress(OSError):
            os.write(self._pipes.sizes, RESIZE.pack(rows, columns))
