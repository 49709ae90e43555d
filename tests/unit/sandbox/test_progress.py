"""What takes long is said on a terminal, by the process that was started there, and nothing of it stays."""

from __future__ import annotations

import os
import select
import signal
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cryptography.hazmat.primitives.kdf import argon2

from policy.signing.keyfile import Argon2Parameters
from sandbox import checks, progress, recovery, rows
from sandbox.config import Config
from sandbox.supervisor import Supervisor
from sandbox.vault import sealing

GONE = b"\r\x1b[K"


class Far:
    """The other side of a terminal."""

    def __init__(self, fd: int) -> None:
        self.fd, self.seen = fd, b""

    def until(self, words: bytes) -> None:
        """Until it showed them."""
        end = time.monotonic() + 60
        while words not in self.seen:
            assert select.select((self.fd,), (), (), max(0.0, end - time.monotonic()))[0], self.seen
            self.seen += os.read(self.fd, 4096)

    def all(self) -> bytes:
        """All that it shows, once nobody writes any more."""
        while select.select((self.fd,), (), (), 0)[0]:
            self.seen += os.read(self.fd, 4096)
        return self.seen


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, Far]]:
    """A terminal, and its other side; nobody waits for a second."""
    far, near = os.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "AFTER_SECONDS", 0.0)
    monkeypatch.setattr(progress, "_EVERY_SECONDS", 0.01)
    yield near, Far(far)
    os.close(far)
    os.close(near)


def test_what_takes_long_is_said_with_its_best_words_and_leaves_nothing(terminal: tuple[int, Far]) -> None:
    near, far = terminal
    with progress.shown(near, "working"):
        far.until(b"working (0 s)\x1b[K")
        with progress.step("copying a house") as further:
            far.until(b"copying a house (")
            further("copying the roof")
            far.until(b"copying the roof (")
        far.seen = b""
        far.until(b"working (")
    assert far.all().endswith(GONE)
    assert b"\n" not in far.seen
    assert "progress" not in [thread.name for thread in threading.enumerate()]


def test_the_seconds_are_those_of_what_is_said(terminal: tuple[int, Far]) -> None:
    near, far = terminal
    screen = progress._Screen(near)
    screen.tell(progress._Step("working", began=time.monotonic() - 100.2))
    far.until(b"working (100 s)")
    screen.tell(progress._Step("a part of it"))
    far.until(b"a part of it (0 s)")


def test_of_what_is_quick_nothing_is_said(terminal: tuple[int, Far], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "AFTER_SECONDS", 3600.0)
    near, far = terminal
    looked = threading.Event()
    tell = progress._Screen.tell

    def seen(self: progress._Screen, step: progress._Step) -> None:
        tell(self, step)
        looked.set()

    monkeypatch.setattr(progress._Screen, "tell", seen)
    with progress.shown(near, "working"):
        assert looked.wait(60)
    assert far.all() == b""


def test_what_is_written_meanwhile_stands_on_lines_of_its_own(terminal: tuple[int, Far]) -> None:
    near, far = terminal
    with progress.shown(near, "working"):
        for n in range(20):
            far.until(b"working (")
            with progress.hushed(), progress.hushed():
                os.write(near, b"line %d\n" % n)
            far.until(b"line %d\r\n" % n)
            assert GONE + b"line %d\r\n" % n in far.seen
            far.seen = b""
        far.until(b"working (")
    assert far.all().endswith(GONE)


def test_nobody_speaks_into_a_question(terminal: tuple[int, Far]) -> None:
    near, far = terminal
    with progress.shown(near, "working"):
        far.until(b"working (")
        with progress.hushed():
            far.all()
            # Whoever says something holds the lock.
            assert held_by_another() == [True]
        assert far.all().endswith(GONE)
        far.seen = b""
        far.until(b"working (")


def held_by_another() -> list[bool]:
    """Whether the terminal is somebody else's, as another thread sees it."""
    found = list[bool]()

    def look() -> None:
        (screen,) = progress._screens
        got = screen.lock.acquire(blocking=False)
        found.append(not got)
        if got:
            screen.lock.release()

    looking = threading.Thread(target=look)
    looking.start()
    looking.join()
    return found


def test_a_line_too_long_for_the_terminal_is_cut(terminal: tuple[int, Far]) -> None:
    near, far = terminal
    termios.tcsetwinsize(near, (24, 20))
    with progress.shown(near, "w" * 100):
        far.until("| wwwwwwwwwwwwwwww…\x1b[K".encode())


@pytest.mark.parametrize("term", ["dumb", None])
def test_a_terminal_that_takes_no_line_back_is_told_nothing(
    terminal: tuple[int, Far], monkeypatch: pytest.MonkeyPatch, term: str | None
) -> None:
    monkeypatch.delenv("TERM")
    if term is not None:
        monkeypatch.setenv("TERM", term)
    near, far = terminal
    before = threading.active_count()
    with progress.shown(near, "working"):
        assert threading.active_count() == before
    assert far.all() == b""


def test_nothing_is_said_off_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    read, write = os.pipe()
    before = threading.active_count()
    with progress.shown(write, "working"), progress.step("anything"), progress.hushed():
        assert threading.active_count() == before
    os.close(write)
    assert os.read(read, 100) == b""
    os.close(read)


def test_a_forked_process_says_nothing_and_waits_for_nobody(terminal: tuple[int, Far]) -> None:
    """A keeper is forked while something is said: who says it is not there to let go of the lock."""
    near, far = terminal
    held, asked = threading.Event(), list[bool]()

    def hold(screen: progress._Screen) -> None:
        with screen.lock:
            held.set()
            time.sleep(0.1)  # the fork comes while it is held, or after; it waits in any case
            asked.append(True)

    with progress.shown(near, "working"):
        far.until(b"working (")
        holder = threading.Thread(target=hold, args=progress._screens)
        holder.start()
        assert held.wait(60)
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)
            mine = progress._screens[0].lock.acquire(blocking=False)
            with progress.step("work of a keeper"), progress.hushed():
                os.write(near, b"[keeper]")
            os._exit(0 if mine and asked else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        holder.join()
        # let go of here too: it is said again
        far.seen = b""
        far.until(b"working (")
    assert b"[keeper]" in far.all()
    assert b"work of a keeper" not in far.seen


def test_a_step_of_another_thread_is_not_what_goes_on(terminal: tuple[int, Far]) -> None:
    def work() -> None:
        with progress.step("aside") as further:
            further("aside still")
            assert "aside" not in [one.what for one in progress._steps]
            asked.append(True)

    asked = list[bool]()
    aside = threading.Thread(target=work)
    aside.start()
    aside.join()
    assert asked == [True]


def test_a_terminal_that_was_hung_up_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "AFTER_SECONDS", 0.0)
    far, near = os.openpty()
    screen = progress._Screen(near)
    os.close(far)
    screen.tell(progress._Step("working"))
    screen.clear()
    os.close(near)
    screen.tell(progress._Step("working"))


def test_a_machine_without_a_thread_left_stops_nobody(
    terminal: tuple[int, Far], monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = terminal

    def exhausted(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = set(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", exhausted)
        with progress.shown(near, "working"), progress.hushed():
            done = True
    assert done
    assert far.all() == b""
    assert set(os.listdir("/proc/self/fd")) <= before
    with progress.shown(near, "working"):
        far.until(b"working (")


def test_a_terminal_that_is_another_jobs_is_let_be(terminal: tuple[int, Far], monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = terminal
    screen = progress._Screen(near)
    monkeypatch.setattr(os, "tcgetpgrp", lambda fd: os.getpgrp() + 1)
    screen.tell(progress._Step("in the background"))
    monkeypatch.setattr(os, "tcgetpgrp", lambda fd: os.getpgrp())
    screen.tell(progress._Step("in front"))
    assert b"in front" in far.all()
    assert b"background" not in far.seen


def test_a_passphrase_that_is_made_a_key_of_is_said(terminal: tuple[int, Far], monkeypatch: pytest.MonkeyPatch) -> None:
    """What works there is C: a signal's handler would say it when it is over."""
    near, far = terminal
    real = argon2.Argon2id

    class Slow:
        def __init__(self, **parameters: Any) -> None:
            self.real = real(**parameters)

        def derive_into(self, *arguments: Any) -> None:
            far.until(b"opening the vault with its passphrase (")
            self.real.derive_into(*arguments)

    monkeypatch.setattr(sealing, "Argon2id", Slow)
    with progress.shown(near, "opening the vault"):
        key = sealing.passphrase_key(
            memoryview(b"p"), bytes(16), Argon2Parameters(memory_kib=8192, iterations=1, lanes=1)
        )
    with key:
        assert len(key) == sealing.KEY_BYTES


def test_a_start_that_clears_up_says_so(
    terminal: tuple[int, Far], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    near, far = terminal
    own = cast("Supervisor", SimpleNamespace(path=tmp_path, config=Config(), ledger=None, state=None, isolated=False))
    monkeypatch.setattr(recovery, "recover", lambda runs, **more: far.until(b"taking away what was left"))
    monkeypatch.setattr(rows, "cut_off", lambda ledger: None)
    with progress.shown(near, "the agent is at work"):
        Supervisor.recover(own)


def test_a_check_of_this_host_that_takes_long_is_named(
    terminal: tuple[int, Far], monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = terminal

    def slow(config: Config, deadline_seconds: float) -> checks.Finding:
        far.until(b"checking runsc live (")
        return checks.Finding(checks.Status.OK, "at last")

    monkeypatch.setattr(checks, "_TABLE", (("runsc live", True, "calls", slow),))
    with progress.shown(near, "checking this host"):
        assert checks.examine(Config(), deadline_seconds=1).enforceable


def test_whoever_has_just_written_is_not_talked_over(
    terminal: tuple[int, Far], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the step takes already; what was written is read in peace first."""
    near, far = terminal
    monkeypatch.setattr(progress, "AFTER_SECONDS", 1000.0)
    screen, long_ago = progress._Screen(near), time.monotonic() - 5000
    step = progress._Step("working", began=long_ago)
    screen.hush()
    screen.tell(step)
    assert far.all() == b""
    screen.quiet_since = long_ago
    screen.tell(step)
    far.until(b"working (5000 s)")
