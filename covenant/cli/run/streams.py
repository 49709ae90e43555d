"""Connect this process's stdin, stdout and stderr, or its terminal, to a session: as pipes that its shim may have.

A pipe of the caller is opened once more, so that the shim's settings do not reach the programs that share it. Anything
else (a file, a terminal, a socket) stays in this process, and a thread carries its bytes to a pipe of our own.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import stat
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from covenant.cli.run.detach_keys import DetachKeys
from policy import errors
from sandbox.run_io import RESIZE, CallerStreams
from sandbox.shim import escapes

_CHUNK: Final = 64 * 1024

Change = Callable[[bytes], bytes]
# What is passed on of what was typed, and whether the input ends with it.
Typed = Callable[[bytes], tuple[bytes, bool]]


def _unchanged(data: bytes) -> bytes:
    return data


class Carriers:
    """The threads between descriptors of the caller and pipes of our own."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stop_r, self._stop_w = _pipe()
        stack.callback(os.close, self._stop_r)
        self._writers: list[threading.Thread] = []
        # Nothing is shown before the terminal is prepared for it.
        self.prepared = threading.Event()

    def input(
        self, fd: int, typed: Typed = lambda data: (data, False), ended: Callable[[], None] = lambda: None
    ) -> int:
        """Return the pipe that what ``fd`` brings comes from, after ``typed``, which may end it.

        ``ended`` is called when ``fd`` brings no more.
        """
        read, write = _pipe()
        threading.Thread(target=self._carry_in, args=(fd, write, typed, ended), daemon=True).start()
        return read

    def output(self, fd: int, change: Change = _unchanged, last: Callable[[], bytes] = bytes) -> int:
        """Return the pipe whose bytes go to ``fd``, after ``change``; ``last`` returns what comes at the end."""
        read, write = _pipe()
        thread = threading.Thread(target=self._carry_out, args=(read, fd, change, last), daemon=True)
        thread.start()
        self._writers.append(thread)
        return write

    def shown(self, fd: int, *, raw: bool) -> int:
        """Return the pipe whose bytes go to ``fd``, unless ``raw`` without the sequences of ``escapes``."""
        if raw:
            return self.output(fd)
        escape_filter = escapes.EscapeFilter()
        return self.output(fd, escape_filter.feed, escape_filter.flush)

    def finish(self) -> None:
        """Stop reading the input, and wait until the output is written. The pipes' other ends are closed by now."""
        os.close(self._stop_w)
        self.prepared.set()
        for thread in self._writers:
            thread.join()

    def _carry_in(self, source: int, sink: int, typed: Typed, ended: Callable[[], None]) -> None:
        poll = select.poll()
        poll.register(source, select.POLLIN)
        poll.register(self._stop_r, select.POLLIN)
        with contextlib.suppress(OSError):
            # Looked at before each read: what a user types after the session belongs to the next program.
            while self._stop_r not in dict(poll.poll()):
                data = _read(source)
                if not data:
                    ended()
                    break
                passed, ends = typed(data)
                _write_all(sink, passed)
                if ends:
                    break
        os.close(sink)

    def _carry_out(self, source: int, sink: int, change: Change, last: Callable[[], bytes]) -> None:
        self.prepared.wait()
        with contextlib.suppress(OSError):
            while data := os.read(source, _CHUNK):
                _write_all(sink, change(data))
            _write_all(sink, last())
        os.close(source)  # when the sink is gone the agent gets EPIPE


class SessionPipes:
    """A session's pipes. ``streams`` are the ends for the shim.

    ``begin`` is called when it has them, and ``pause`` when the run was refused.

    ``detached`` says that the user has typed the keys that detach.
    """

    def __init__(
        self,
        streams: CallerStreams,
        begun: Callable[[], None] = lambda: None,
        paused: Callable[[], None] = lambda: None,
    ) -> None:
        self.streams, self._begun, self._paused = streams, begun, paused
        self._kept = [
            fd for fd in (streams.stdin, streams.stdout, streams.stderr, streams.resizes, streams.recording) if fd >= 0
        ]
        self._has_begun = False
        self._detaching: tuple[DetachKeys, Callable[[], None]] | None = None
        self.detached = False

    def detaches(self, keys: bytes, leave: Callable[[], None]) -> None:
        """Let these keys detach from now on. ``leave`` is called then, by the thread that reads them."""
        self._detaching = (DetachKeys(keys), leave) if keys else None

    def typed(self, data: bytes) -> tuple[bytes, bool]:
        """Return what is passed on of this input, and whether the user has detached."""
        if self._detaching is None:
            return data, False
        keys, leave = self._detaching
        passed, self.detached = keys.feed(data)
        if self.detached:
            leave()
        return passed, self.detached

    def pause(self) -> bool:
        """Take back ``begin`` after a run that was refused. False: its shim has the streams, and no other run can."""
        if self._has_begun:
            self._has_begun = False
            self._paused()
        return bool(self._kept)

    def begin(self) -> None:
        """Prepare the terminal, if there is one: from now on the agent writes to it."""
        if not self._has_begun:
            self._has_begun = True
            self._begun()

    def release(self) -> None:
        """Close our copies of the shim's ends, which the shim has by now."""
        while self._kept:
            os.close(self._kept.pop())


@contextlib.contextmanager
def connected(*, raw_output: bool) -> Iterator[SessionPipes]:
    """Connect stdin, stdout and stderr to pipes. At the end all output is written.

    Without ``raw_output`` the sequences of ``escapes`` are taken out of what goes to a terminal.
    """
    with contextlib.ExitStack() as stack:
        carriers = Carriers(stack)
        carriers.prepared.set()
        stdin = _opened_again(0, os.O_RDONLY)
        outputs = [_opened_again(fd, os.O_WRONLY) for fd in (1, 2)]
        if outputs[0] >= 0:
            # The reader's end of file comes with the agent's, and not with the end of this process.
            null = os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(null, 1)
            os.close(null)
        stdin = carriers.input(0) if stdin < 0 else stdin
        stdout, stderr = (
            carriers.shown(fd, raw=raw_output or not os.isatty(fd)) if own < 0 else own
            for fd, own in zip((1, 2), outputs, strict=True)
        )
        connection = SessionPipes(CallerStreams(stdin, stdout, stderr))
        try:
            yield connection
        finally:
            connection.release()
            carriers.finish()


def has_terminal() -> bool:
    """Whether stdin and stdout are a terminal."""
    return os.isatty(0) and os.isatty(1)


@contextlib.contextmanager
def terminal(*, raw_output: bool, record: Path | None = None, keep: bool = False) -> Iterator[SessionPipes]:
    """Connect the terminal. It is in raw mode from ``begin`` to the end, and in its own mode again at every end.

    Without ``raw_output`` the sequences of ``escapes`` are taken out of what the agent writes. ``record`` is the file
    of a recording, which must not exist yet. With ``keep`` the session goes on when this process leaves it.

    Raises:
        errors.UsageError: Raised when the file cannot be made.
    """
    with contextlib.ExitStack() as stack:
        file = -1 if record is None else _new_file(record)
        if file >= 0:
            stack.callback(os.close, file)
        settings = termios.tcgetattr(0)
        stack.callback(_restore, settings)
        for number in (signal.SIGTERM, signal.SIGHUP):
            stack.callback(signal.signal, number, signal.signal(number, _interrupted))
        carriers = Carriers(stack)
        resizes, sizes = _pipe()
        os.set_blocking(sizes, False)
        stack.callback(os.close, sizes)
        stack.callback(signal.signal, signal.SIGWINCH, signal.signal(signal.SIGWINCH, lambda *_: _tell_size(sizes)))
        stdout = carriers.shown(1, raw=raw_output)
        columns, rows = os.get_terminal_size(1)
        recording = carriers.output(file) if file >= 0 else -1
        own: list[SessionPipes] = []
        stdin = carriers.input(0, lambda data: own[0].typed(data) if own else (data, False), _hang_up)
        streams = CallerStreams(stdin, stdout, size=(rows, columns), resizes=resizes, recording=recording, stays=keep)

        def prepare() -> None:
            tty.setraw(0, termios.TCSADRAIN)
            carriers.prepared.set()

        connection = SessionPipes(streams, prepare, lambda: _restore(settings))
        own.append(connection)
        try:
            yield connection
        finally:
            connection.release()
            carriers.finish()


def _new_file(path: Path) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as e:
        raise errors.UsageError(
            f"the recording `{path}` cannot be made: {e.strerror}", hint="name a file that does not exist yet"
        ) from e


def _tell_size(sizes: int) -> None:
    # The terminal or the session is gone, or the pipe takes no more: the next size replaces this one.
    with contextlib.suppress(OSError):
        columns, rows = os.get_terminal_size(1)
        os.write(sizes, RESIZE.pack(min(rows, 65_535), min(columns, 65_535)))


def _interrupted(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _hang_up() -> None:
    """End this process's part of a session whose terminal is gone. A terminal in raw mode ends in no other way."""
    os.kill(os.getpid(), signal.SIGHUP)


def _read(fd: int) -> bytes:
    """Read what is there. A terminal that is gone, or a socket that was reset, brings nothing."""
    with contextlib.suppress(OSError):
        return os.read(fd, _CHUNK)
    return b""


def _restore(settings: list[Any]) -> None:
    with contextlib.suppress(termios.error):  # the terminal is gone
        termios.tcsetattr(0, termios.TCSADRAIN, settings)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _opened_again(fd: int, flags: int) -> int:
    """Open the pipe behind ``fd`` once more. Returns -1 where it is no pipe, or cannot be opened."""
    try:
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            return -1
        # Not blocking: an open for writing would wait for a reader.
        return os.open(f"/proc/self/fd/{fd}", flags | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return -1


def _pipe() -> tuple[int, int]:
    return os.pipe2(os.O_CLOEXEC)
