"""Check a terminal session with a real pty: its master comes late, sizes and keys go in, output comes out."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator

import pytest

from policy import errors
from sandbox.run_io import RESIZE, CallerStreams, ContainerIO, Limits
from sandbox.shim.agent_loop import AgentLoop
from sandbox.shim.recording import Recording
from sandbox.shim.terminal import TerminalSession
from tests.doubles.run_parts import Handle, Observer
from tests.unit.sandbox.shim.test_stream import Caller

LIMITS = Limits(60.0, 60.0, "clock", 0.5)


class PtyConsole:
    """A console whose master is there at the second look, as runsc's comes with a connection of its own."""

    def __init__(self) -> None:
        self.made, self.slave = pty.openpty()
        self.master = -1
        self._looks = 0
        self._size = (24, 80)
        self._read, self._write = os.pipe()
        os.write(self._write, b"x")

    def fileno(self) -> int:
        return self._read

    def poll(self) -> bool:
        self._looks += 1
        if self._looks > 1:
            self.master = self.made
            self.resize(*self._size)
        return self.master >= 0

    def resize(self, rows: int, columns: int) -> None:
        self._size = rows, columns
        fcntl.ioctl(self.made, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))

    def close(self) -> None:
        for fd in (self.made, self._read, self._write):
            os.close(fd)


class TerminalCaller(Caller):
    """A caller with a terminal."""

    def __init__(self, *, records: bool = False) -> None:
        super().__init__()
        resizes, self.sizes = os.pipe()
        self.streams = CallerStreams(
            self.streams.stdin,
            self.streams.stdout,
            size=(24, 80),
            resizes=resizes,
            recording=self.streams.stderr if records else -1,
        )
        if records:
            self.reads(self.stderr)

    def joined(self) -> None:
        self.close(self.streams.recording)
        super().joined()


@contextlib.contextmanager
def terminal_child(code: str) -> Iterator[tuple[ContainerIO, PtyConsole]]:
    """A child in a pty of its own, with pipes beside it for its runtime."""
    console = PtyConsole()
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=console.slave,
        stdout=console.slave,
        stderr=console.slave,
        start_new_session=True,
    )
    os.close(console.slave)
    pairs = [os.pipe() for _ in range(4)]
    (_, in_w), (out_r, _), (err_r, _), (started_r, started_w) = pairs
    os.write(started_w, b"1")
    pidfd = os.pidfd_open(process.pid)
    try:
        yield (
            ContainerIO(
                stdin=in_w,
                stdout=out_r,
                stderr=err_r,
                pidfd=pidfd,
                started=started_r,
                has_started=lambda: bool(os.read(started_r, 1)),
                handle=Handle(process.terminate, process.kill),
                observer=Observer(),
            ),
            console,
        )
    finally:
        process.kill()
        process.wait()
        for fd in (pidfd, *(fd for pair in pairs for fd in pair)):
            os.close(fd)
        console.close()


@pytest.fixture
def caller() -> Iterator[TerminalCaller]:
    made = TerminalCaller()
    yield made
    made.joined()
    for fd in (made.stdin, made.stdout, made.stderr, made.sizes, made.streams.resizes):
        made.close(fd)


def run(code: str, caller: TerminalCaller, *, limits: Limits = LIMITS) -> AgentLoop:
    with terminal_child(code) as (channel, console):
        session = TerminalSession(caller.streams, console)
        loop = AgentLoop(channel, session, b"", limits)
        with contextlib.closing(session):
            loop.run()
    return loop


def test_terminal_echoes_and_answers(caller: TerminalCaller) -> None:
    caller.writes(b"ada\r", ends=False)
    caller.reads(caller.stdout)
    done = run("print('hello ' + input('name? '))", caller)
    caller.joined()
    assert done.error is None
    shown = caller.read[caller.stdout]
    assert shown.endswith(b"hello ada\r\n")
    totals = done.session.totals
    assert totals is not None
    assert (totals.in_bytes, totals.in_sha256) == (4, hashlib.sha256(b"ada\r").hexdigest())
    assert (totals.out_bytes, totals.out_sha256) == (len(shown), hashlib.sha256(shown).hexdigest())
    assert totals.recording_sha256 is None


def test_terminal_has_last_size(caller: TerminalCaller) -> None:
    os.write(caller.sizes, RESIZE.pack(1, 1) + RESIZE.pack(50, 150))
    caller.reads(caller.stdout)
    code = "import os, time\nwhile os.get_terminal_size().lines != 50: time.sleep(0.01)\nprint(os.get_terminal_size())"
    done = run(code, caller)
    caller.joined()
    assert done.error is None
    assert b"columns=150, lines=50" in caller.read[caller.stdout]


def test_terminal_flood_to_stopped_reader_ends_by_deadline(caller: TerminalCaller) -> None:
    done = run("import os\nwhile True: os.write(1, b'x' * 65536)", caller, limits=Limits(60.0, 0.5, "clock", 0.2))
    assert isinstance(done.error, errors.DeadlineError)
    assert done.ended_at < 100


def test_terminal_that_caller_leaves_runs_on(caller: TerminalCaller) -> None:
    """The end of the caller's keys is none of the agent's terminal: what ends a session is its client's socket."""
    caller.close(caller.stdin)
    caller.reads(caller.stdout)
    done = run("import time\ntime.sleep(0.3)\nprint('still here')", caller)
    caller.joined()
    assert done.error is None
    assert caller.read[caller.stdout] == b"still here\r\n"


def test_terminal_recording_is_what_was_digested() -> None:
    caller = TerminalCaller(records=True)
    caller.reads(caller.stdout)
    done = run("for n in range(2000): print(n, '\\u00fc' * 40)", caller)
    caller.joined()
    written, totals = caller.read[caller.stderr], done.session.totals
    assert totals is not None
    assert totals.recording_sha256 == hashlib.sha256(written).hexdigest()
    _, *events = [json.loads(line) for line in written.splitlines()]
    assert "".join(text for _, _, text in events).encode() == caller.read[caller.stdout]
    for fd in (caller.stdin, caller.stdout, caller.stderr, caller.sizes, caller.streams.resizes):
        caller.close(fd)


def test_recording_without_reader_does_not_hold_session() -> None:
    caller = TerminalCaller(records=False)
    read, write = os.pipe()
    os.close(read)
    caller.streams = CallerStreams(
        caller.streams.stdin, caller.streams.stdout, size=(24, 80), resizes=caller.streams.resizes, recording=write
    )
    caller.reads(caller.stdout)
    done = run("print('x' * 100_000)", caller)
    caller.joined()
    assert done.error is None
    assert len(caller.read[caller.stdout]) == 100_002
    for fd in (caller.stdin, caller.stdout, caller.stderr, caller.sizes, caller.streams.resizes):
        caller.close(fd)


def test_recording_keeps_cut_characters_and_drops_clipboard() -> None:
    one = Recording((24, 80))
    written = one.feed(b"\x1b]52;c;")
    for byte in "eA==\x07gr\u00fc\u00df".encode():
        written += one.feed(bytes([byte]))
    one.resize(30, 100)
    written += one.feed(b"\xff") + one.feed(b"")
    header, *events = [json.loads(line) for line in written.splitlines()]
    assert (header["width"], header["height"]) == (80, 24)
    assert "".join(text for _, kind, text in events if kind == "o") == "\x18gr\u00fc\u00df\ufffd"
    assert [text for _, kind, text in events if kind == "r"] == ["100x30"]
    assert one.sha256 == hashlib.sha256(written).hexdigest()
