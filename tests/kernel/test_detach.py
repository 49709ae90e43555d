"""Detach from a terminal session and attach to it again: the session, its callers, and what is left when one dies."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox.rundir import registry
from tests.kernel import serving
from tests.kernel.conftest import unfinished
from tests.kernel.serving import CALLER, Served
from tests.kernel.session_kit import Terminal
from tests.kernel.test_contract_console import in_terminal, terminals
from tests.kernel.test_contract_sessions import STDIO
from tests.kernel.test_contract_terminal import TERMINAL
from tests.kernel.test_serve import eventually
from tests.kernel.world import World

__all__ = ["terminals"]
SECONDS = 120.0
KEYS = b"\x10\x11"
# It echoes lines, tells of each new size, and ends with status 7 at `quit`.
TALKS = (
    # SIGWINCH is waited for: a handler of Python's that it meets just before a read does not run until that ends.
    "import os, signal, threading\nsignal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGWINCH})\n"
    "def talk():\n    try:\n        while (line := input()) != 'quit': print('said ' + line, flush=True)\n"
    "        os._exit(7)\n    except EOFError: os._exit(1)\n"
    "print('READY', flush=True)\nthreading.Thread(target=talk, daemon=True).start()\nwhile True:\n"
    "    signal.sigwait({signal.SIGWINCH})\n    os.write(1, f'{os.get_terminal_size()}\\n'.encode())\n"
)


@pytest.fixture
def served(warm: Path) -> Iterator[Served]:
    with serving.open_place() as base, Served(World(base, warm=warm)) as one:
        yield one


def _package(world: World, code: str = TALKS, **fields: Any) -> str:
    fields = {"more": TERMINAL, "cpu_ms": 300_000, **fields}
    return str(world.sign(world.package({"main.py": code}, **fields)))


def _call(served: Served, *arguments: str, uid: int = 0, supervised: bool = True) -> subprocess.CompletedProcess[str]:
    environment = serving.environment_of(served, uid)
    if not supervised:
        del environment["COVENANT_SOCKET"]
    command = serving.covenant_command(*arguments)
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=SECONDS, stdin=subprocess.DEVNULL,
        **serving.identity(uid),
    )  # fmt: skip


def _detached(served: Served, package: str, uid: int = 0) -> str:
    done = _call(served, "run", package, "--detach", uid=uid)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _live(served: Served) -> list[str]:
    return [entry.run_id for entry in registry.live(served.world.state / "runs")]


class Attached:
    """Start terminals with `covenant attach`, which the test closes."""

    def __init__(self, served: Served, terminals: list[Terminal]) -> None:
        self._served, self._terminals = served, terminals

    def __call__(self, run: str, *more: str, uid: int = 0) -> Terminal:
        return self.command("attach", run, *more, uid=uid)

    def command(self, verb: str, *arguments: str, uid: int = 0) -> Terminal:
        """A terminal with another command."""
        self._terminals.append(in_terminal(self._served, True, *arguments, verb=verb, uid=uid))
        return self._terminals[-1]


@pytest.fixture
def attach(served: Served, terminals: list[Terminal]) -> Attached:
    return Attached(served, terminals)


def _rows(served: Served, run: str, kind: str) -> list[dict[str, Any]]:
    kinds = (row["kind"] for row in served.world.rows())
    return [row for row in kinds if row["type"] == kind and row["run_id"] == run]


def test_detached_session_is_attached_and_ended(served: Served, attach: Attached) -> None:
    run = _detached(served, _package(served.world))
    assert _live(served) == [run]
    one = attach(run[:8])
    one.until(b"READY")
    assert b"Ctrl-P Ctrl-Q detaches" in one.shown
    one.until(b"columns=90, lines=30")
    assert not one.restored()
    one.type(b"first\r")
    one.until(b"said first")
    one.resize(44, 120)
    one.process.send_signal(signal.SIGWINCH)
    one.until(b"columns=120, lines=44")
    one.type(KEYS)
    assert one.ended() == 0
    assert one.restored()
    assert f"covenant attach {run[:8]}".encode() in one.shown
    assert _live(served) == [run]
    two = attach(run)
    two.until(b"said first")
    two.type(b"quit\r")
    assert two.ended() == 7
    eventually(lambda: unfinished(served.world) == [])
    notes = [row["reason"] for row in _rows(served, run, "run_state")]
    assert sum("attached" in note for note in notes) == 2
    assert "its caller has left, and it goes on" in notes
    (ended,) = _rows(served, run, "session_ended")
    assert ended["in_bytes"] == len(b"first\rquit\r")


def test_second_attach_is_refused_until_first_detaches(served: Served, attach: Attached) -> None:
    run = _detached(served, _package(served.world))
    one = attach(run)
    one.until(b"READY")
    two = attach(run)
    assert two.ended() == 125
    assert b"attached already" in two.shown
    assert two.restored()
    one.type(b"here\r")
    one.until(b"said here")
    one.type(KEYS)
    assert one.ended() == 0
    three = attach(run)
    three.until(b"said here")


def test_foreground_session_is_detached_by_key(served: Served, attach: Attached) -> None:
    one = attach.command("run", _package(served.world))
    one.until(b"READY")
    (run,) = _live(served)
    one.type(b"\x10x\r")
    one.until(b"said ")
    one.type(KEYS)
    assert one.ended() == 0, one.shown
    assert one.restored()
    assert _live(served) == [run]
    two = attach(run)
    two.until(b"said ")
    two.type(b"quit\r")
    assert two.ended() == 7


@pytest.mark.parametrize("keeps", [True, False])
def test_killed_client_of_foreground_session(served: Served, attach: Attached, keeps: bool) -> None:
    one = attach.command("run", _package(served.world), *(["--keep"] if keeps else []))
    one.until(b"READY")
    (run,) = _live(served)
    one.process.kill()
    if not keeps:
        eventually(lambda: unfinished(served.world) == [])
        assert [row["code"] for row in _rows(served, run, "run_ended")] == ["stopped"]
        return
    eventually(lambda: any("has left" in row["reason"] for row in _rows(served, run, "run_state")))
    two = attach(run)
    two.until(b"READY")
    two.type(b"quit\r")
    assert two.ended() == 7


def test_killed_attached_client_leaves_session(served: Served, attach: Attached) -> None:
    run = _detached(served, _package(served.world))
    one = attach(run)
    one.until(b"READY")
    one.process.kill()
    eventually(lambda: any("has left" in row["reason"] for row in _rows(served, run, "run_state")))
    two = attach(run)
    two.until(b"READY")
    two.type(b"again\r")
    two.until(b"said again")


def test_killed_shim_of_detached_session_leaves_nothing(served: Served, attach: Attached) -> None:
    run = _detached(served, _package(served.world))
    one = attach(run)
    one.until(b"READY")
    (entry,) = registry.live(served.world.state / "runs")
    os.kill(entry.keeper, signal.SIGKILL)
    assert one.ended() == 125
    assert one.restored()
    eventually(lambda: unfinished(served.world) == [])
    eventually(lambda: [row["code"] for row in _rows(served, run, "run_ended")] == ["cut_off"])


def test_only_owner_and_root_attach(served: Served, attach: Attached) -> None:
    mine = _detached(served, _package(served.world), uid=CALLER)
    roots = _detached(served, _package(served.world, name="roots", id="roots"))
    refused = attach(roots, uid=CALLER)
    assert refused.ended() == 125
    assert b"no live run" in refused.shown
    owner = attach(mine, uid=CALLER)
    owner.until(b"READY")
    owner.type(KEYS)
    assert owner.ended() == 0
    root = attach(mine)
    root.until(b"READY")


def test_detach_without_supervisor_is_refused(warm: Path) -> None:
    """The fix that the refusal names works."""
    with serving.open_place() as base:
        served = Served(World(base, warm=warm))
        package = _package(served.world)
        done = _call(served, "run", package, "--detach", supervised=False)
        assert (done.returncode, done.stdout) == (2, "")
        assert "fix: start covenant-supervisor" in done.stderr
        assert not (served.world.state / "runs").exists() or not _live(served)
        with served:
            assert _live(served) == []
            assert [_detached(served, package)] == _live(served)


def test_run_without_terminal_is_not_attached(served: Served, attach: Attached) -> None:
    path = _package(
        served.world, "import sys\nsys.stderr.write('SAID')\nsys.stderr.flush()\nsys.stdin.read()", more=STDIO
    )
    command = serving.covenant_command("stdio", path)
    environment = serving.environment_of(served, 0)
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert process.stderr.read(4) == b"SAID"
        (run,) = _live(served)
        one = attach(run)
        assert one.ended() == 125
        assert b"has no terminal" in one.shown
        process.communicate()
    refused = _call(served, "run", path, "--detach")
    assert refused.returncode == 2
    assert "--detach is for a session with a terminal" in refused.stderr
