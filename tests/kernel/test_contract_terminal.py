"""Run agents with the contract `terminal` under real runsc: a pty of the shim's, its size, its keys."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from policy import errors
from sandbox.run_io import RESIZE, CallerStreams
from sandbox.run_result import RunResult
from tests.kernel.world import World
from tests.unit.sandbox.shim.test_stream import Caller

# A session's calls, such as setsid and those of a terminal's size, are in the profile `command`.
TERMINAL = '[process]\ncontract = "terminal"\n[permissions.syscalls]\nprofile = "command"\n'


class Screen(Caller):
    """A caller with a terminal: what it reads it keeps, and it acts when it reads a mark."""

    def __init__(self) -> None:
        super().__init__()
        size_r, self.sizes = os.pipe()
        self.streams = CallerStreams(self.streams.stdin, self.streams.stdout, size=(33, 101), resizes=size_r)
        self.shown = b""

    def acts(self, **on: Callable[[], Any]) -> None:
        """Read to the end, and call each of these once when its name is shown."""

        def work() -> None:
            left = dict(on)
            while data := os.read(self.stdout, 65536):
                self.shown += data
                for mark in [mark for mark in left if mark.encode() in self.shown]:
                    left.pop(mark)()

        self.starts(work)

    def types(self, keys: bytes) -> Callable[[], None]:
        """Return what types these keys."""
        return lambda: (os.write(self.stdin, keys), None)[1]


@pytest.fixture
def screen() -> Iterator[Screen]:
    made = Screen()
    yield made
    made.joined()
    for fd in (made.stdin, made.stdout, made.stderr, made.sizes, made.streams.resizes):
        made.close(fd)


def _run(world: World, code: str, screen: Screen, **fields: Any) -> RunResult:
    package = world.sign(world.package({"main.py": code}, more=TERMINAL, **fields))
    done = world.run(package, "", caller=screen.streams)
    screen.joined()
    return done


def test_terminal_has_its_size_from_start(world: World, screen: Screen) -> None:
    screen.acts()
    code = "import os\nprint([os.isatty(fd) for fd in range(3)], os.get_terminal_size(), os.environ['TERM'])"
    done = _run(world, code, screen)
    assert done.error is None, (done.error, done.stderr, screen.shown)
    assert b"[True, True, True]" in screen.shown
    assert b"columns=101, lines=33" in screen.shown
    assert b"xterm-256color" in screen.shown


def test_terminal_resize_reaches_agent(world: World, screen: Screen) -> None:
    screen.acts(READY=lambda: os.write(screen.sizes, RESIZE.pack(1, 2) + RESIZE.pack(40, 132)))
    code = (
        "import os, signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])\nprint('READY', flush=True)\n"
        "signal.sigwait([signal.SIGWINCH])\nprint(os.get_terminal_size())"
    )
    done = _run(world, code, screen)
    assert done.error is None, (done.error, done.stderr, screen.shown)
    assert b"columns=132, lines=40" in screen.shown


def test_terminal_interrupt_is_key(world: World, screen: Screen) -> None:
    screen.acts(READY=screen.types(b"\x03"))
    # Short sleeps: Python handles a signal that comes just before a sleep when the sleep is over.
    code = (
        "import time\ntry:\n    print('READY', flush=True)\n    for _ in range(600): time.sleep(0.1)\n"
        "except KeyboardInterrupt: print('interrupted')"
    )
    done = _run(world, code, screen)
    assert done.error is None, (done.error, done.stderr, screen.shown)
    assert b"interrupted" in screen.shown


def test_terminal_line_is_typed_and_echoed(world: World, screen: Screen) -> None:
    screen.acts(NAME=screen.types(b"ada\r"))
    done = _run(world, "print('hello ' + input('NAME? '))", screen)
    assert done.error is None, (done.error, done.stderr, screen.shown)
    assert screen.shown == b"NAME? ada\r\nhello ada\r\n"
    row = next(row["kind"] for row in world.rows() if row["kind"]["type"] == "session_ended")
    assert (row["contract"], row["in_bytes"], row["out_bytes"]) == ("terminal", 4, len(screen.shown))


def test_terminal_without_terminal_is_refused(world: World) -> None:
    caller = Caller()
    package = world.sign(world.package({"main.py": "print('started')"}, more=TERMINAL))
    with pytest.raises(errors.ContractError, match="no terminal"):
        world.run(package, "", caller=caller.streams)
    caller.joined()
    assert not [row for row in world.rows() if row["kind"]["type"] == "run_started"]


def test_terminal_cannot_type_for_caller(world: World, screen: Screen) -> None:
    """TIOCSTI and TIOCLINUX are refused inside; a call of the same terminal that is allowed succeeds beside them."""
    screen.acts()
    code = (
        "import array, fcntl, termios\n"
        "def tries(name, number, arg):\n"
        "    try: fcntl.ioctl(0, number, arg); print(name, 'passed')\n"
        "    except OSError as e: print(name, e.errno)\n"
        "tries('size', termios.TIOCGWINSZ, b'01234567')\n"
        "tries('sti', 0x5412, b'x')\ntries('linux', 0x541C, b'\\x02')\n"
    )
    done = _run(world, code, screen)
    assert done.error is None, (done.error, done.stderr, screen.shown)
    found = dict(re.findall(rb"(size|sti|linux) (\w+)", screen.shown))
    assert found[b"size"] == b"passed"
    assert found[b"sti"] == found[b"linux"] == b"1", "EPERM of the filter"


def test_newer_terminal_requests_fall_back(world: World, screen: Screen) -> None:
    """TCGETS2 and its three setters pass the filter: a library takes TCGETS after ENOTTY, and ends after EPERM."""
    screen.acts()
    code = (
        "import errno, fcntl\nstate = bytes(44)\n"
        "for name, number in (('get', 0x802C542A), ('set', 0x402C542B), ('wait', 0x402C542C), ('flush', 0x402C542D),\n"
        "                     ('sti', 0x5412)):\n"
        "    try: state = fcntl.ioctl(0, number, state); print(name, 'passed')\n"
        "    except OSError as e: print(name, errno.errorcode[e.errno])\n"
    )
    done = _run(world, code, screen)
    assert done.error is None, (done.error, done.stderr, screen.shown)
    found = dict(re.findall(rb"(get|set|wait|flush|sti) (\w+)", screen.shown))
    assert {found[name] for name in (b"get", b"set", b"wait", b"flush")} <= {b"passed", b"ENOTTY"}, found
    assert found[b"sti"] == b"EPERM"
