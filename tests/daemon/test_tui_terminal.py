"""The bytes that `covenant tui` writes to a real terminal of 80 x 24, over a real daemon with a hostile record."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import cli_daemon_kit
from tests.cli_kit import done
from tests.conftest import ROOT
from tests.tui_data import HOSTILE

SECONDS = 60.0
# The sequences that Textual itself writes: modes, positions, styles, and the shape of the pointer.
_OWN = re.compile(rb"\x1b\[[0-9;?<>=$]*[A-Za-z]|\x1b\]22;default\x07|\x1b\[[0-9;?]*\$p")
_STYLES = re.compile(rb"\x1b\[([0-9;]*)m")
# Reset, bold, dim, reverse, and the terminal's own colours.
_COLOURLESS = {"", "0", "1", "2", "7", "22", "27", "39", "49"}


class Screens:
    """`covenant tui` in a terminal."""

    def __init__(self, home: Path, **environment: str) -> None:
        self.shown = b""
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(ROOT)
            known = {"PATH": os.environ["PATH"], "TERM": "xterm-256color", "LANG": "C.UTF-8"}
            places = {"COVENANT_HOME": str(home), "COVENANT_STATE": str(home / "state"), "HOME": str(home)}
            os.execve(sys.executable, [sys.executable, "-m", "covenant", "tui"], {**known, **places, **environment})
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))

    def until(self, words: bytes) -> None:
        """Read until these bytes have come."""
        end, begins = time.monotonic() + SECONDS, len(self.shown)
        while words not in self.shown[begins:]:
            assert time.monotonic() < end, self.shown[-4000:]
            if select.select([self.fd], [], [], 0.5)[0]:
                self.shown += os.read(self.fd, 65536)

    def type(self, keys: bytes) -> None:
        """Type keys."""
        os.write(self.fd, keys)

    def ended(self) -> int:
        """Read to the end; the exit status."""
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            if select.select([self.fd], [], [], 0.5)[0]:
                try:
                    self.shown += os.read(self.fd, 65536)
                except OSError:
                    break
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.pid = 0
        return status

    def close(self) -> None:
        """Kill what is left."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.fd)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("tui") / "h"
    place.mkdir(mode=0o700)
    with cli_daemon_kit.granted(place):
        done("memory", "put", "--tier", "longterm", HOSTILE.replace("\ud800", ""))
        yield place


@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}], ids=["colour", "no_color"])
def test_hostile_record_steers_no_terminal(home: Path, environment: dict[str, str]) -> None:
    one = Screens(home, **environment)
    try:
        one.until(b"daemon: ok   supervisor: none")
        one.type(b"m")
        one.until(b"[red]markup[/red]")
        one.type(b"\r")
        one.until(b"| second line")
        one.type(b"q")
        one.until(b"longterm")
        one.type(b"q")
        assert one.ended() == 0
    finally:
        one.close()
    rest = _OWN.sub(b"", one.shown)
    assert b"\x1b" not in rest
    assert b"\x07" not in rest
    steering = [ch for ch in rest.decode() if not ch.isprintable() and ch not in "\r\n"]
    assert steering == []
    # The alternate screen is left, and the cursor is there again.
    assert one.shown.rindex(b"\x1b[?1049l") > one.shown.rindex(b"\x1b[?1049h")
    assert one.shown.rindex(b"\x1b[?25h") > one.shown.rindex(b"\x1b[?25l")
    styles = {code for found in _STYLES.findall(one.shown) for code in found.decode().split(";")}
    assert "1" in styles
    assert ("31" in styles) is not bool(environment)
    if environment:
        assert styles <= _COLOURLESS
