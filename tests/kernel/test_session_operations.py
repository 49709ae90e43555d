"""Operations on sessions: ps, logs, suspend, resume, kill, clocks and a revocation, each through a public call."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from policy.signing import change
from sandbox.rundir import registry
from tests.kernel import revoking, serving
from tests.kernel.conftest import unfinished
from tests.kernel.serving import Served
from tests.kernel.test_contract_sessions import STDIO
from tests.kernel.test_contract_terminal import TERMINAL
from tests.kernel.test_detach import TALKS, Attached, _call, _detached, _live, _package, attach, served, terminals
from tests.kernel.test_serve import eventually

__all__ = ["attach", "served", "terminals"]
# It counts without a pause on stdout, and says on stderr that it has begun.
COUNTS = (
    "import itertools, os, sys, time\nsys.stderr.write('BEGUN\\n')\nsys.stderr.flush()\n"
    "for n in itertools.count():\n    os.write(1, b'%d\\n' % n)\n    time.sleep(0.05)\n"
)
# A revocation ends what rests on it within this time (docs/sessions.md; a shim looks every 0.25 s).
SOON = 10.0


class Running:
    """A session of some contract whose output a test reads as it comes."""

    def __init__(self, served: Served, how: str, attach: Attached) -> None:
        self._served = served
        more = STDIO if how == "stdio" else TERMINAL
        self.package = _package(served.world, COUNTS, more=more)
        self.process: subprocess.Popen[bytes] | None = None
        if how == "detached":
            self.run = _detached(served, self.package)
        elif how == "stdio":
            command, environment = serving.covenant_command("stdio", self.package), serving.environment_of(served, 0)
            self._out, write = os.pipe()
            self.process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=write)
            os.close(write)
        else:
            terminal = attach.command("run", self.package)
            terminal.until(b"3\r\n")
            self._out = os.dup(terminal.master)
        self._how = how
        if how != "detached":
            eventually(lambda: _live(served) != [])
            (self.run,) = _live(served)

    def moves(self) -> bool:
        """Whether output comes within a second."""
        if self._how == "detached":
            before = self.said()
            with contextlib.suppress(AssertionError):
                eventually(lambda: self.said() != before, seconds=1)
            return self.said() != before
        os.set_blocking(self._out, False)
        with contextlib.suppress(BlockingIOError):
            while os.read(self._out, 65536):
                pass
        time.sleep(1)
        with contextlib.suppress(BlockingIOError):
            return bool(os.read(self._out, 65536))
        return False

    def said(self) -> str:
        """Return what its logs show of stdout."""
        return _call(self._served, "logs", self.run, "--stdout").stdout

    def close(self) -> None:
        """End the client."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
        if self._how != "detached":
            os.close(self._out)


@pytest.fixture(params=["stdio", "terminal", "detached"])
def running(request: pytest.FixtureRequest, served: Served, attach: Attached) -> Iterator[Running]:
    one = Running(served, request.param, attach)
    yield one
    one.close()


def _states(served: Served) -> dict[str, str]:
    listed = json.loads(_call(served, "ps", "--json").stdout)["runs"]
    return {one["run_id"]: one["state"] for one in listed}


def test_session_is_listed_suspended_resumed_and_killed(served: Served, running: Running) -> None:
    run = running.run
    eventually(lambda: _states(served) == {run: "Running"})
    eventually(running.moves)  # control: it writes
    done = _call(served, "suspend", run)
    assert done.returncode == 0, done.stderr
    assert _states(served) == {run: "Suspended"}
    eventually(lambda: not running.moves())  # once all has come that was on its way
    assert _call(served, "resume", run).returncode == 0
    assert _states(served) == {run: "Running"}
    eventually(running.moves)
    killed = _call(served, "kill", run)
    assert killed.returncode == 0, killed.stderr
    assert _states(served) == {}
    eventually(lambda: unfinished(served.world) == [])
    assert [row["code"] for row in _ends(served)] == ["stopped"]


def test_logs_show_stderr_or_terminal(served: Served, running: Running) -> None:
    """With a terminal all output is one, and is shown as stdout; of a stream only stderr is kept."""
    run, is_stream = running.run, running.process is not None
    eventually(lambda: "BEGUN" in _call(served, "logs", run, *([] if is_stream else ["--stdout"])).stdout)
    other = _call(served, "logs", run, *(["--stdout"] if is_stream else []))
    assert (other.returncode, other.stdout) == (0, "")
    if not is_stream:
        eventually(lambda: "\n5" in running.said())
        assert "\\r" not in running.said(), "a terminal's line ends are line ends"


def test_logs_of_terminal_are_bounded_and_visible(served: Served) -> None:
    code = "import time\nprint('FIRST' + 'x' * 300_000 + '\\x1b]52;c;ZXZpbA==\\x07END', flush=True)\ntime.sleep(300)"
    run = _detached(served, _package(served.world, code))
    eventually(lambda: "END" in _call(served, "logs", run, "--stdout").stdout)
    shown = _call(served, "logs", run, "--stdout")
    assert "FIRST" not in shown.stdout
    assert len(shown.stdout) < 66_000
    assert "\x1b" not in shown.stdout
    assert "bytes dropped" in shown.stderr


def _ends(served: Served) -> list[dict[str, Any]]:
    return [row["kind"] for row in served.world.rows() if row["kind"]["type"] == "run_ended"]


@pytest.mark.parametrize("what", ["manifest", "key"])
def test_revocation_ends_session(served: Served, attach: Attached, what: str) -> None:
    """An attached terminal and its client end with it; a session of another manifest and key goes on."""
    world = served.world
    other = _detached(served, _package(world, name="other", id="other"))
    package = world.package({"main.py": TALKS}, more=TERMINAL, cpu_ms=300_000)
    run = _detached(served, str(world.sign(package, key=revoking.second_operator(world) if what == "key" else None)))
    one = attach(run)
    one.until(b"READY")
    (entry,) = (entry for entry in registry.live(world.state / "runs") if entry.run_id == run)
    build = revoking.manifest_of(world, entry.payload_digest) if what == "manifest" else _key(world)
    begin = time.monotonic()
    revoking.revoke(world, revoking.next_root(world, build))
    assert one.ended() == 125
    assert time.monotonic() - begin < SOON
    assert b"revoked" in one.shown
    assert one.restored()
    eventually(lambda: _live(served) == [other])
    assert [(row["run_id"], row["code"]) for row in _ends(served)] == [(run, "revoked")]


def _key(world: Any) -> Any:
    return lambda document: change.revoke_key(document, "second", now_ms=world.now_ms, reason="lost")


def test_clock_ends_detached_session(served: Served, attach: Attached) -> None:
    """The clock runs from the agent's start, with a caller or without."""
    lasting = _detached(served, _package(served.world, name="lasting", id="lasting"))
    run = _detached(served, _package(served.world, cpu_ms=15_000))
    begin = time.monotonic()
    one = attach(run)
    one.until(b"READY")
    assert one.ended() == 125
    assert time.monotonic() - begin < 15 + SOON
    assert b"deadline" in one.shown
    assert _live(served) == [lasting], "control: another clock"
    assert [row["code"] for row in _ends(served)] == ["deadline"]


def test_timeout_ends_detached_session(served: Served) -> None:
    package = _package(served.world)
    done = _call(served, "run", package, "--detach", "--timeout", "2")
    assert done.returncode == 0, done.stderr
    eventually(lambda: [row["code"] for row in _ends(served)] == ["deadline"])
