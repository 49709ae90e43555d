"""`covenant run` of a package with the contract `terminal`, in a real terminal: alone, and through a supervisor."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pty
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kernel import serving
from tests.kernel.conftest import unfinished
from tests.kernel.serving import Served
from tests.kernel.session_kit import Terminal
from tests.kernel.test_contract_sessions import STDIO, supervised
from tests.kernel.test_contract_terminal import TERMINAL
from tests.kernel.test_serve import eventually
from tests.kernel.world import World

__all__ = ["supervised"]
SECONDS = 120.0


def in_terminal(served: Served, through: bool, *arguments: str, verb: str = "run", uid: int = 0) -> Terminal:
    """Run a command in a terminal of this user, ``through`` the supervisor or without one."""
    environment = serving.environment_of(served, uid)
    if not through:
        del environment["COVENANT_SOCKET"]
    return Terminal(serving.covenant_command(verb, *arguments), environment, uid=uid, **serving.identity(uid))


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    made: list[Terminal] = []
    yield made
    for one in made:
        one.close()


def _package(world: World, code: str, **fields: Any) -> str:
    return str(world.sign(world.package({"main.py": code}, more=TERMINAL, **fields)))


def test_console_has_size_keys_and_status(supervised: tuple[Served, bool], terminals: list[Terminal]) -> None:
    served, through = supervised
    code = (
        "import os, select, signal, sys\nprint(os.get_terminal_size(), flush=True)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])\nprint('READY', flush=True)\n"
        "signal.sigwait([signal.SIGWINCH])\nprint(os.get_terminal_size(), flush=True)\n"
        # Short waits: Python handles a signal that comes just before a wait when the wait is over.
        "try:\n    print('NAME? ', end='', flush=True)\n    while not select.select([0], [], [], 0.1)[0]: pass\n"
        "except KeyboardInterrupt: print('interrupted')\nsys.exit(9)"
    )
    one = in_terminal(served, through, _package(served.world, code))
    terminals.append(one)
    one.until(b"READY")
    assert b"columns=90, lines=30" in one.shown
    assert not one.restored(), "it is raw while the agent has it"
    one.resize(44, 120)
    one.process.send_signal(signal.SIGWINCH)
    one.until(b"columns=120, lines=44")
    one.until(b"NAME? ")
    _interrupt(one)
    assert one.ended() == 9, one.shown
    assert b"interrupted" in one.shown
    assert one.restored()


def _interrupt(one: Terminal) -> None:
    """Type Ctrl-C until the command ends.

    Python shows a prompt before it reads (my_fgets). A signal that comes between the two does not end the read.
    """
    for _ in range(10):
        one.type(b"\x03")
        with contextlib.suppress(subprocess.TimeoutExpired):
            one.process.wait(1)
            return


@pytest.mark.parametrize("raw", [False, True])
def test_console_filters_clipboard_unless_raw(
    supervised: tuple[Served, bool], terminals: list[Terminal], raw: bool
) -> None:
    served, through = supervised
    code = "print('<\\x1b]52;c;ZXZpbA==\\x07|\\x1b]0;title\\x07|\\x1b[21t>')"
    one = in_terminal(served, through, _package(served.world, code), *(["--raw"] if raw else []))
    terminals.append(one)
    assert one.ended() == 0
    if raw:
        assert b"<\x1b]52;c;ZXZpbA==\x07|\x1b]0;title\x07|\x1b[21t>" in one.shown
    else:
        assert b"<\x18|\x1b]0;title\x07|\x18>" in one.shown


def test_streams_to_a_terminal_are_filtered(supervised: tuple[Served, bool], terminals: list[Terminal]) -> None:
    """With the contract `stdio` too a caller's stdout and stderr may be a terminal."""
    served, through = supervised
    code = "import os\nfor fd in (1, 2): os.write(fd, b'<\x1b]52;c;ZXZpbA==\x07|\x1b[31m>')"
    path = str(served.world.sign(served.world.package({"main.py": code}, more=STDIO)))
    filtered, raw = in_terminal(served, through, path), in_terminal(served, through, path, "--raw")
    terminals += [filtered, raw]
    assert filtered.ended() == 0
    assert filtered.shown.count(b"<\x18|\x1b[31m>") == 2
    assert raw.ended() == 0
    assert raw.shown.count(b"\x1b]52") == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_console_is_restored_after_signal(
    supervised: tuple[Served, bool], terminals: list[Terminal], number: signal.Signals
) -> None:
    served, through = supervised
    path = _package(served.world, "import time\nprint('READY', flush=True)\ntime.sleep(300)", cpu_ms=300_000)
    one = in_terminal(served, through, path)
    terminals.append(one)
    one.until(b"READY")
    assert not one.restored()
    one.process.send_signal(number)
    one.ended()
    assert one.restored()
    eventually(lambda: unfinished(served.world) == [])


def test_session_ends_when_its_terminal_is_gone(supervised: tuple[Served, bool]) -> None:
    """No signal comes: the terminal is not the controlling one of the command."""
    served, through = supervised
    path = _package(served.world, "import time\nprint('READY', flush=True)\ntime.sleep(300)", cpu_ms=300_000)
    environment = serving.environment_of(served, 0, {"TERM": "xterm-256color"})
    if not through:
        del environment["COVENANT_SOCKET"]
    master, slave = pty.openpty()
    process = subprocess.Popen(
        serving.covenant_command("run", path), env=environment, stdin=slave, stdout=slave, start_new_session=True
    )
    os.close(slave)
    shown = b""
    while b"READY" not in shown:
        shown += os.read(master, 65536)
    os.close(master)
    assert process.wait(SECONDS) != 0
    eventually(lambda: unfinished(served.world) == [])


def test_console_is_restored_after_refusal(supervised: tuple[Served, bool], terminals: list[Terminal]) -> None:
    served, through = supervised
    path = Path(_package(served.world, "print('started')"))
    (path / "main.py").write_text("print('changed')")
    one = in_terminal(served, through, str(path))
    terminals.append(one)
    assert one.ended() == 125
    assert one.restored()
    assert b"fix:" in one.shown


def test_console_recording_has_digest_in_log(
    supervised: tuple[Served, bool], terminals: list[Terminal], tmp_path: Path
) -> None:
    served, through = supervised
    code = (
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])\n"
        "print('gr\u00fc\u00df \\x1b]52;c;ZXZpbA==\\x07READY', flush=True)\n"
        "signal.sigwait([signal.SIGWINCH])\nprint(input('PIN? ') and 'thanks')"
    )
    file = tmp_path / "cast"
    one = in_terminal(served, through, _package(served.world, code), "--record", str(file))
    terminals.append(one)
    one.until(b"READY")
    one.resize(44, 120)
    one.process.send_signal(signal.SIGWINCH)
    one.until(b"PIN? ")
    one.type(b"1234\r")
    assert one.ended() == 0, one.shown
    header, *events = [json.loads(line) for line in file.read_text().splitlines()]
    assert (header["version"], header["width"], header["height"]) == (2, 90, 30)
    shown = "".join(text for _, kind, text in events if kind == "o")
    assert shown == "gr\u00fc\u00df \x18READY\r\nPIN? 1234\r\nthanks\r\n"
    assert [text for _, kind, text in events if kind == "r"] == ["120x44"]
    assert [at for at, *_ in events] == sorted(at for at, *_ in events)
    row = next(row["kind"] for row in served.world.rows() if row["kind"]["type"] == "session_ended")
    assert row["recording_hash_hex"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    again = in_terminal(served, through, _package(served.world, code), "--record", str(file))
    terminals.append(again)
    assert again.ended() == 125, "a file that exists is not replaced"
    assert again.restored()
