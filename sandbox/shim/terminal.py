"""Relay a session between an agent's terminal and its callers, one after the other (contract `terminal`).

The shim holds the master of the agent's pty. The caller's terminal stays in the caller's process. Without a caller the
session goes on: its output is read, and the end of it is kept for the next one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection
from typing import Protocol

from policy import errors
from sandbox.kernel.proc import pipes
from sandbox.run_io import DETACH, RESIZE, CallerStreams, StreamTotals
from sandbox.shim import relay
from sandbox.shim.agent_loop import AgentLoop
from sandbox.shim.recording import Recording
from sandbox.shim.relay import ByteCount, Relay, Sink
from sandbox.shim.scrollback import Scrollback


class Console(Protocol):
    """The terminal of an agent, which comes while its sandbox is made (kernel.runsc.console)."""

    master: int

    def fileno(self) -> int:
        """Return the descriptor to wait on until the terminal is there."""

    def poll(self) -> bool:
        """Whether the terminal is there."""

    def resize(self, rows: int, columns: int) -> None:
        """Set its size."""


class TerminalSession:
    """Relay one terminal (agent_loop.AgentSession). The relays begin when the agent runs and its terminal is there.

    ``left`` is called when the session goes on without its caller.
    """

    silent = False
    answer = b""

    def __init__(self, caller: CallerStreams, console: Console) -> None:
        self._caller: CallerStreams | None = caller if caller.stdin >= 0 else None
        self._console, self._stays, self._told = console, caller.stays, caller.told
        self.left: Callable[[], None] = lambda: None
        self.scrollback = Scrollback()
        self._in, self._out = ByteCount(), ByteCount()
        self._input: Relay | None = None
        self._output: Relay | None = None
        # Copies that end with the relays, and the descriptors of a caller that came later.
        self._ends: list[int] = []
        self._taken: list[int] = []
        self._begun = False
        self._recording = None
        if caller.size is not None and caller.recording >= 0:
            self._recording = Recording(caller.size)

    @property
    def totals(self) -> StreamTotals:
        """Return what was moved so far; the output as the agent wrote it."""
        made = None if self._recording is None else self._recording.sha256
        return StreamTotals(self._in.total, self._in.sha256, self._out.total, self._out.sha256, made)

    def attach(self, loop: AgentLoop) -> None:
        """Wait for the terminal, so that it has its size before the agent runs."""
        self._loop = loop
        loop.listen(self._console.fileno(), self._come)
        if self._caller is not None:
            self._hear(self._caller)

    def begin(self, intent: bytes) -> None:
        """Start the relays; a session has no intent."""
        self._begun = True
        if self._console.master >= 0 or self._console.poll():
            self._start()
        self._told()

    def read_early(self) -> None:
        """Do nothing: what the agent writes stays in its terminal until ``begin``."""

    def stop_input(self) -> None:
        """Relay no more input."""
        if self._input is not None:
            self._input.stop()

    def drained(self) -> Collection[int]:
        """Return the descriptors of the output that is still to be relayed."""
        self.stop_input()
        if self._output is None:
            return ()
        output = self._output.fds
        for fd in output:
            relay.make_room(fd)
        return output

    def check_free(self) -> None:
        """Check that a caller may attach now.

        Raises:
            errors.WrongStateError: Raised when the session has a caller, or the agent does not run yet.
        """
        if self._caller is not None:
            raise errors.WrongStateError(
                "the session is attached already", hint="detach it there (Ctrl-P Ctrl-Q), or end that command"
            )
        if self._output is None:
            raise errors.WrongStateError("the agent does not run yet", hint="ask again in a moment")

    def take(self, caller: CallerStreams) -> None:
        """Connect a later caller, which gets the end of what was shown. Its descriptors belong to the session then.

        Raises:
            errors.WrongStateError: Raised as by ``check_free``.
        """
        self.check_free()
        self._caller, self._taken = caller, [caller.stdin, caller.stdout, caller.resizes]
        self._hear(caller)
        if caller.size is not None:
            rows, columns = caller.size
            # The kernel reports no size that is the same, and a program that is told of one draws its screen anew.
            self._console.resize(rows, columns + 1 if columns < 2 else columns - 1)
            self._console.resize(rows, columns)
        self._disconnect()
        self._connect(self.scrollback.replay())

    def close(self) -> None:
        """Give the session's descriptors back."""
        for fd in (*self._ends, *self._taken):
            os.close(fd)
        self._ends, self._taken = [], []

    def _come(self) -> None:
        before = self._console.fileno()
        there = self._console.poll()
        if there or self._console.fileno() != before:
            self._loop.forget(before)
        if there:
            self._loop.forget(self._console.fileno())
            if self._begun:
                self._start()
        elif self._console.fileno() != before:
            self._loop.listen(self._console.fileno(), self._come)

    def _start(self) -> None:
        if self._output is None:
            self._connect()

    def _connect(self, first: bytes = b"") -> None:
        """Start the relays with the present caller, or with none."""
        caller, master = self._caller, self._console.master
        # One copy of the master for each direction: a relay closes its own.
        back = os.dup(master)
        self._ends = [back]
        copy = None
        if caller is None:
            sink = os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)
            self._ends.append(sink)
        else:
            to, gone, sink = os.dup(master), os.dup(caller.stdout), caller.stdout
            self._ends += [to, gone]
            self._input = Relay(caller.stdin, to, seen=self._in.feed, over=self._left)
            self._input.start(self._loop)
            # It is never readable: its event is that the pipe has no reader any more.
            self._loop.listen(gone, lambda: self._stops_reading(gone))
            if self._recording is not None:
                copy = Sink(caller.recording, self._recording.feed)
        self._output = Relay(back, sink, seen=self._saw_output, copy=copy)
        self._output.start(self._loop, first)

    def _disconnect(self) -> None:
        for one in (self._input, self._output):
            if one is not None:
                one.stop()
        self._input = None
        for fd in self._ends:
            self._loop.forget(fd)
            os.close(fd)
        self._ends = []

    def _hear(self, caller: CallerStreams) -> None:
        if caller.resizes >= 0:
            os.set_blocking(caller.resizes, False)
            self._loop.listen(caller.resizes, self._resize)
        if caller.line >= 0:
            self._loop.listen(caller.line, self._spoken)

    def _spoken(self) -> None:
        """Handle the caller's word: DETACH, or its leaving. A further byte means the same as its end of file."""
        assert self._caller is not None
        said = b""
        with contextlib.suppress(OSError):
            said = os.read(self._caller.line, 1)
        self._stays = self._stays or (said == DETACH and self._recording is None)
        if self._stays:
            self._left()
            return
        self._loop.forget(self._caller.line)
        if self._loop.error is None:
            self._loop.end(
                errors.KilledError("whoever asked for it went away", hint="ask with `--keep` to let it go on"),
                gently=False,
            )

    def _stops_reading(self, fd: int) -> None:
        self._loop.forget(fd)
        self._left()

    def _left(self) -> None:
        """Go on without the caller, where the session stays."""
        caller = self._caller
        if caller is None or not self._stays:
            return
        self._caller = None
        for fd in (caller.resizes, caller.line):
            if fd >= 0:
                self._loop.forget(fd)
        started = self._output is not None
        self._disconnect()
        for fd in (caller.stdin, caller.stdout, caller.resizes):
            pipes.shut(fd)
        for fd in self._taken:
            os.close(fd)
        self._taken = []
        self.left()
        if started:
            self._connect()

    def _resize(self) -> None:
        assert self._caller is not None
        data = pipes.read(self._caller.resizes)
        if data is None:
            return
        whole = len(data) - len(data) % RESIZE.size
        if not whole:
            self._loop.forget(self._caller.resizes)
            return
        # Only the last size counts.
        rows, columns = RESIZE.unpack_from(data, whole - RESIZE.size)
        self._console.resize(rows, columns)
        if self._recording is not None:
            self._recording.resize(rows, columns)

    def _saw_output(self, data: bytes) -> None:
        self._loop.spoke()
        self._out.feed(data)
        self.scrollback.feed(data)
