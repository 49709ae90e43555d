"""Check that long-running verbs show a spinner on a terminal, erase it, and block no other process."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cryptography.hazmat.primitives.kdf import argon2

from covenant.cli import common, spinner
from policy.signing.keyfile import Argon2Parameters
from sandbox import doctor, progress
from sandbox.attest import live_runs
from sandbox.audit import run_events
from sandbox.config import Config
from sandbox.runner import recovery
from sandbox.supervisor import Supervisor
from sandbox.vault import sealing
from tests.cli_kit import call

# rich removes the line: it moves the cursor up and erases the line.
GONE = b"\x1b[1A\x1b[2K"
CLI = Path(common.__file__).parent


class Far:
    """The other side of a terminal."""

    def __init__(self, fd: int) -> None:
        self.fd, self.seen = fd, b""

    def until(self, words: bytes) -> None:
        """Read until the terminal shows the words."""
        end = time.monotonic() + 60
        while words not in self.seen:
            assert select.select((self.fd,), (), (), max(0.0, end - time.monotonic()))[0], self.seen
            self.seen += os.read(self.fd, 4096)

    def all(self) -> bytes:
        """Return the terminal's whole output after the last write."""
        while select.select((self.fd,), (), (), 0)[0]:
            self.seen += os.read(self.fd, 4096)
        return self.seen


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, Far]]:
    """Make a terminal with its other side; the spinner's first line has no delay."""
    far, near = os.openpty()
    termios.tcsetwinsize(near, (24, 80))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(spinner, "AFTER_SECONDS", 0.0)
    monkeypatch.setattr(spinner, "EVERY_SECONDS", 0.01)
    yield near, Far(far)
    os.close(far)
    os.close(near)


def test_long_work_is_shown_and_leaves_nothing(terminal: tuple[int, Far]) -> None:
    near, far = terminal
    with spinner.shown("working", fd=near):
        far.until(b"working (0 s)")
        with progress.step("copying a house") as further:
            far.until(b"copying a house (")
            further("copying the roof")
            far.until(b"copying the roof (")
        far.seen = b""
        far.until(b"working (")
    assert far.all().endswith(GONE)
    assert "spinner" not in [thread.name for thread in threading.enumerate()]


def test_seconds_are_those_of_step(terminal: tuple[int, Far]) -> None:
    near, far = terminal
    with spinner.shown("working", fd=near):
        step = progress.current()
        assert step is not None
        step.began -= 100.2
        far.until(b"working (100 s)")
        with progress.step("a part of it"):
            far.until(b"a part of it (0 s)")


def test_markup_and_frames_are_plain_text(terminal: tuple[int, Far]) -> None:
    near, far = terminal
    with spinner.shown("[bold]x[/bold] :smile:", fd=near):
        far.until(b"[bold]x[/bold] :smile: (")
    # The cursor is never hidden: a killed process could not show it again.
    assert b"\x1b[?25" not in far.all()


def test_quick_work_shows_nothing(terminal: tuple[int, Far], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spinner, "AFTER_SECONDS", 3600.0)
    near, far = terminal
    with spinner.shown("working", fd=near):
        assert "spinner" in [thread.name for thread in threading.enumerate()]
    assert far.all() == b""


def test_long_line_is_cut(terminal: tuple[int, Far]) -> None:
    near, far = terminal
    termios.tcsetwinsize(near, (24, 20))
    with spinner.shown("w" * 100, fd=near):
        far.until("w…".encode())
    shown = max((len(word) for word in re.findall(rb"w+", far.all())), default=0)
    assert 0 < shown <= 20


@pytest.mark.parametrize("term", ["dumb", None])
def test_dumb_terminal_shows_nothing(
    terminal: tuple[int, Far], monkeypatch: pytest.MonkeyPatch, term: str | None
) -> None:
    monkeypatch.delenv("TERM")
    if term is not None:
        monkeypatch.setenv("TERM", term)
    near, far = terminal
    before = threading.active_count()
    with spinner.shown("working", fd=near):
        assert threading.active_count() == before
    assert far.all() == b""


def test_pipe_and_json_show_nothing(terminal: tuple[int, Far]) -> None:
    near, far = terminal
    read, write = os.pipe()
    before = threading.active_count()
    with spinner.shown("working", fd=write), spinner.shown("working", quiet=True, fd=near):
        assert threading.active_count() == before
    os.close(write)
    assert os.read(read, 100) == b""
    os.close(read)
    assert far.all() == b""


def test_forked_process_shows_and_waits_for_nothing(terminal: tuple[int, Far]) -> None:
    """A shim is forked while the line is drawn: it has no thread that would release a lock."""
    near, far = terminal
    held, asked = threading.Event(), list[bool]()

    def hold() -> None:
        with spinner.DRAWING:
            held.set()
            time.sleep(0.1)  # the fork comes while the lock is held or after; the test waits in both cases
            asked.append(True)

    with spinner.shown("working", fd=near):
        far.until(b"working (")
        holder = threading.Thread(target=hold)
        holder.start()
        assert held.wait(60)
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)
            free = spinner.DRAWING.acquire(blocking=False)
            with progress.step("work of a keeper"):
                os.write(near, b"[keeper]")
            os._exit(0 if free and asked else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        holder.join()
        far.seen = b""
        far.until(b"working (")
    assert b"work of a keeper" not in far.all()


def test_step_of_another_thread_is_not_shown() -> None:
    def work() -> None:
        with progress.step("aside") as further:
            further("aside still")
            asked.append(progress.current())

    asked = list[progress.Step | None]()
    aside = threading.Thread(target=work)
    aside.start()
    aside.join()
    assert asked == [None]


def test_hung_up_terminal_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    far, near = os.openpty()
    gone = spinner._Terminal(near)
    os.close(far)
    assert gone.write("x") == 1
    os.close(near)
    assert gone.write("x") == 1


def test_machine_without_thread_stops_nobody(terminal: tuple[int, Far], monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = terminal

    def exhausted(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = set(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", exhausted)
        with spinner.shown("working", fd=near):
            done = True
    assert done
    assert far.all() == b""
    assert set(os.listdir("/proc/self/fd")) <= before
    with spinner.shown("working", fd=near):
        far.until(b"working (")


def test_terminal_of_another_job_is_let_be(terminal: tuple[int, Far], monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = terminal
    made = spinner._Terminal(near)
    monkeypatch.setattr(os, "tcgetpgrp", lambda fd: os.getpgrp() + 1)
    made.write("in the background")
    monkeypatch.setattr(os, "tcgetpgrp", lambda fd: os.getpgrp())
    made.write("in front")
    assert b"in front" in far.all()
    assert b"background" not in far.seen


def test_rich_is_imported_for_long_wait_only() -> None:
    """In a process with a terminal of its own, only the drawing thread imports rich."""
    code = (
        "import os, sys, time; from covenant.cli import main, spinner\n"
        "far, near = os.openpty(); os.environ['TERM'] = 'xterm'\n"
        "spinner.AFTER_SECONDS = float(sys.argv[1])\n"
        "with spinner.shown('working', fd=near):\n"
        "    while not spinner.AFTER_SECONDS and b'working' not in os.read(far, 4096): pass\n"
        "print('rich' in sys.modules)"
    )
    found = [
        subprocess.run([sys.executable, "-c", code, after], capture_output=True, text=True, timeout=60).stdout
        for after in ("3600", "0")
    ]
    assert found == ["False\n", "True\n"]


def test_verbs_write_through_common_alone() -> None:
    past = {"echo", "secho", "prompt", "confirm", "getpass", "echo_via_pager", "print", "input"}
    found = []
    for path in sorted(CLI.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = node.func
                name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
                stream = isinstance(called, ast.Attribute) and ast.unparse(called.value).startswith("sys.std")
                if name in past or (stream and name in {"write", "writelines", "read", "readline"}):
                    found.append(f"{path.name}: {ast.unparse(node.func)}")
    # `python -m covenant.cli.help` writes docs/errors.md and is not a verb. rich writes a table into memory.
    assert sorted(set(found)) == [
        "common.py: click.confirm",
        "common.py: click.echo",
        "common.py: click.prompt",
        "common.py: sys.stdin.buffer.read",
        "common.py: sys.stdin.buffer.readline",
        "help.py: print",
        "terminal.py: in_memory.print",
    ]


def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said = list[str]()

    @contextlib.contextmanager
    def step(what: str) -> Iterator[object]:
        said.append(what)
        yield said.append

    monkeypatch.setattr(progress, "step", step)
    return said


def test_attesting_says_how_far_it_is(covenant_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from covenant.cli.audit import commands

    said = steps(monkeypatch)
    monkeypatch.setattr(live_runs, "live", lambda runs: ["one", "two"])
    monkeypatch.setattr(live_runs, "answer", lambda state, run, started: None)
    monkeypatch.setattr(commands, "started_policies", dict)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    call("attest", "--all")
    assert said[1:] == ["reading the kernel back: run 1 of 2", "reading the kernel back: run 2 of 2"]


def test_checking_log_says_which(covenant_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from covenant.cli.audit import proofs, read_logs

    said = steps(monkeypatch)
    logs = [read_logs.LogBytes(name, Path(name), b"x" * 2048, b"", None, None, ()) for name in ("supervisor", "daemon")]
    monkeypatch.setattr(read_logs, "read_logs", lambda: logs)
    monkeypatch.setattr(proofs, "report", lambda log: (_ for _ in ()).throw(KeyError) if log.name == "daemon" else log)
    call("audit", "verify")
    assert said == ["reading the log", "checking the supervisor log, 2 KiB", "checking the daemon log, 2 KiB"]


def test_passphrase_made_key_of_is_said(terminal: tuple[int, Far], monkeypatch: pytest.MonkeyPatch) -> None:
    """The derivation is C code, so a Python signal handler would show the line only after it."""
    near, far = terminal
    real = argon2.Argon2id

    class Slow:
        def __init__(self, **parameters: Any) -> None:
            self.real = real(**parameters)

        def derive_into(self, *arguments: Any) -> None:
            far.until(b"opening the vault with its passphrase (")
            self.real.derive_into(*arguments)

    monkeypatch.setattr(sealing, "Argon2id", Slow)
    with spinner.shown("opening the vault", fd=near):
        key = sealing.passphrase_key(
            memoryview(b"p"), bytes(16), Argon2Parameters(memory_kib=8192, iterations=1, lanes=1)
        )
    with key:
        assert len(key) == sealing.KEY_BYTES


def test_start_that_clears_up_says_so(
    terminal: tuple[int, Far], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    near, far = terminal
    own = cast("Supervisor", SimpleNamespace(path=tmp_path, config=Config(), ledger=None, state=None, isolated=False))
    monkeypatch.setattr(recovery, "recover", lambda runs, **more: far.until(b"taking away what was left"))
    monkeypatch.setattr(run_events, "cut_off", lambda ledger: None)
    with spinner.shown("the agent is at work", fd=near):
        Supervisor.recover(own)


def test_check_of_this_host_that_takes_long_is_named(
    terminal: tuple[int, Far], monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = terminal

    def slow(config: Config, deadline_seconds: float) -> doctor.Finding:
        far.until(b"checking runsc live (")
        return doctor.Finding(doctor.Status.OK, "at last")

    monkeypatch.setattr(doctor, "TABLE", (("runsc live", True, "calls", slow),))
    with spinner.shown("checking this host", fd=near):
        assert doctor.examine(Config(), deadline_seconds=1).enforceable


@pytest.mark.parametrize(("arguments", "quiet"), [(["doctor"], False), (["doctor", "--json"], True)])
def test_document_is_asked_for_quietly(
    covenant_home: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], quiet: bool
) -> None:
    said, within = list[tuple[str, bool]](), list[bool]()

    @contextlib.contextmanager
    def shown(what: str, *, quiet: bool = False) -> Iterator[None]:
        said.append((what, quiet))
        within.append(True)
        yield
        within.pop()

    def examined(config: Config, deadline_seconds: float) -> doctor.Report:
        assert within == [True]
        return doctor.Report((doctor.Check("runsc live", doctor.Status.OK, "calls", "found"),))

    def written(text: str | bytes, *, err: bool = False) -> None:
        # The line is erased before any output.
        assert within == []

    monkeypatch.setattr(spinner, "shown", shown)
    monkeypatch.setattr(doctor, "examine", examined)
    monkeypatch.setattr(common, "write", written)
    call(*arguments)
    assert said == [("checking this host", quiet)]
