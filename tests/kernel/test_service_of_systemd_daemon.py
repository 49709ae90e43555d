"""The daemon's own units under a real systemd, before the real supervisor under its own units.

The first client starts the daemon, which is ready when it says so. It is restarted when it is killed or hangs, and
ended in order.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from covenant.wire import client
from policy import errors
from sandbox.rundir import registry
from tests.kernel import serving
from tests.kernel.booted_services import HOME, BootedServices
from tests.kernel.booted_systemd import UID
from tests.kernel.conftest import leftovers
from tests.kernel.serving import status
from tests.kernel.world import HEAD, SLOWNESS, World

SUPERVISOR = "covenant-supervisor.service"
SLOW = HEAD + "import time\ntime.sleep(2)\nprint(json.dumps({'text': 'late'}))\n"


@pytest.fixture
def booted(warm: Path) -> Iterator[BootedServices]:
    """Nothing runs yet; there is no home of the daemon's."""
    with serving.open_place() as base:
        world = World(base, warm=warm)
        world.configure(callers=[UID], journal=False, checkpoint_seconds=0)
        world.sign(world.copy("hello"))
        world.sign(world.package({"main.py": SLOW}, name="slow", id="slow"))
        with BootedServices(world, base) as services:
            yield services
        assert leftovers(world) == []


def _with_agents(booted: BootedServices) -> None:
    """Do the operator's first steps."""
    for name in ("hello", "slow"):
        booted.install(booted.world.base / "packages" / name)
    assert "routable" in _said(booted, "agents", "reload")
    assert "memory.write: granted" in _said(booted, "bootstrap")


def _said(booted: BootedServices, *arguments: str) -> str:
    done = booted.covenant(*arguments)
    assert done.returncode == 0, (done.stdout, done.stderr, booted.journal())
    return done.stdout


def _ask(booted: BootedServices, kind: str, **fields: Any) -> dict[str, Any]:
    """One request on a connection of its own, as the operator."""
    with client.connected(booted.home, answer_seconds=120 * SLOWNESS) as one:
        return one.ask(kind, **fields)


def _answers(booted: BootedServices) -> bool:
    """Whether it does; a connection may be cut by the end of the one before."""
    with contextlib.suppress(errors.DaemonSilentError):
        return bool(_ask(booted, "ping")["kind"] == "pong")
    return False


def _shown(booted: BootedServices, *names: str) -> dict[str, str]:
    said = booted.systemctl("show", "covenantd.service", *(f"-p{name}" for name in names))
    return dict(line.split("=", 1) for line in said.splitlines())


def _watched(booted: BootedServices, seconds: int) -> None:
    """Start it anew under another watchdog."""
    booted.drop_in("covenantd.service", f"[Service]\nWatchdogSec={seconds}\n")
    booted.systemctl("daemon-reload")
    booted.systemctl("restart", "covenantd.service")


def _stopped(booted: BootedServices) -> int:
    """The daemon that was stopped; 0 while there is none."""
    daemon = booted.main()
    if daemon:
        os.kill(daemon, signal.SIGSTOP)
    return daemon


def test_first_client_starts_it_and_intent_goes_through_both_and_back(booted: BootedServices) -> None:
    assert (booted.main(), booted.main(SUPERVISOR)) == (0, 0)
    # There was no home, and there is no token before the first connection.
    assert "answers" in _said(booted, "ping")
    daemon = booted.main()
    held = status(daemon)
    assert (held["Uid"].split(), held["CapEff"], held["CapBnd"]) == ([str(UID)] * 4, "0" * 16, "0" * 16)
    assert (held["NoNewPrivs"], held["Seccomp"]) == ("1", "2")
    assert {booted.home.stat().st_mode & 0o777, (booted.home / "peers").stat().st_mode & 0o777} == {0o700}
    assert booted.main(SUPERVISOR) == 0
    _with_agents(booted)
    assert _said(booted, "intent", "--agent", "hello", "one two") == "Hello! You said: one two\n"
    assert booted.main(SUPERVISOR) != 0
    (started,) = [row for row in booted.world.rows() if row["kind"]["type"] == "run_started"]
    assert started["issuer"]["display"] == f"uid{UID}@local"
    ours = [row["kind"] for row in _ask(booted, "recent_audit", limit=100, extended=True)["events"]]
    (dispatched,) = [row for row in ours if row["type"] == "intent_dispatched"]
    assert dispatched["run_id"] == started["kind"]["run_id"]
    assert booted.main() == daemon
    journal = booted.eventually(booted.journal)
    # journald has the time, and the process.
    assert journal[0].startswith(f"INFO covenantd: serves {HOME} with 0 agents, HTTP 127.0.0.1:8421 (started in ")
    assert not [line for line in journal if not line.startswith("INFO covenant")], journal
    code = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8421/health').status)"
    assert booted.run("/usr/bin/python3", "-c", code).stdout == "200\n"


def test_second_daemon_of_same_home_is_refused(booted: BootedServices) -> None:
    assert _answers_first(booted)
    daemon = booted.main()
    second = booted.run("/opt/covenant/bin/covenantd", uid=UID)
    assert second.returncode == 1
    assert f"another daemon serves `{HOME}`" in second.stderr
    assert f"[{errors.DaemonRunsError.code}]\n  fix: " in second.stderr
    assert _answers(booted)
    assert booted.main() == daemon


def _answers_first(booted: BootedServices) -> bool:
    """The first connection has no token to read yet: the daemon makes it while it is waited for."""
    assert not (booted.home / client.TOKEN).exists()
    return _answers(booted)


def test_it_ends_in_order_and_next_client_starts_it_again(booted: BootedServices) -> None:
    assert _answers_first(booted)
    _with_agents(booted)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(_ask, booted, "submit_intent", text="x", agent="slow")
        booted.eventually(lambda: registry.live(booted.world.state / "runs") or asked.done())
        daemon = booted.main()
        booted.systemctl("stop", "covenantd.service")
        assert not Path(f"/proc/{daemon}").exists()
        # The waiting client was answered before the daemon ended.
        found = asked.result(60 * SLOWNESS)
    assert found["text"] == "late"
    assert _shown(booted, "ActiveState", "Result") == {"ActiveState": "inactive", "Result": "success"}
    booted.eventually(lambda: "INFO covenantd: ends: SIGTERM" in booted.journal())
    assert _ask(booted, "get_intent_result", intent_id=found["intent_id"])["text"] == "late"
    assert booted.main() not in (0, daemon)
    kinds = [row["kind"]["type"] for row in _ask(booted, "recent_audit", limit=100, extended=True)["events"]]
    assert (kinds.count("daemon_started"), kinds.count("daemon_stopped")) == (2, 1)


def test_socket_that_another_left_there_is_replaced(booted: BootedServices) -> None:
    assert _answers_first(booted)
    booted.systemctl("stop", "covenantd.socket", "covenantd.service")
    assert not (booted.home / client.SOCKET).exists()
    directory = os.open(booted.home, os.O_PATH | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(f"/proc/self/fd/{directory}/{client.SOCKET}")
    finally:
        os.close(directory)
    with pytest.raises(errors.DaemonSilentError):
        _ask(booted, "ping")
    booted.systemctl("start", "covenantd.socket")
    assert booted.main() == 0
    assert _ask(booted, "ping")["kind"] == "pong"
    made = (booted.home / client.SOCKET).stat()
    # The socket is open to all users: the directory's mode limits access.
    assert (made.st_mode & 0o777, made.st_uid, booted.home.stat().st_mode & 0o777) == (0o666, 0, 0o700)
    code = f"import socket; socket.socket(socket.AF_UNIX).connect('{HOME}/{client.SOCKET}')"
    assert "PermissionError" in booted.run("/usr/bin/python3", "-c", code, uid=UID + 1).stderr
    assert booted.run("/usr/bin/python3", "-c", code, uid=UID).returncode == 0


def test_it_is_back_when_it_was_killed_and_when_it_hangs(booted: BootedServices) -> None:
    assert _answers_first(booted)
    signature = _ask(booted, "grant_capability", action="memory.read", scope={})["signature_b58"]
    first = booted.main()
    os.kill(first, signal.SIGKILL)
    booted.eventually(lambda: booted.main() not in (0, first))
    booted.eventually(lambda: _answers(booted))
    assert int(_shown(booted, "NRestarts")["NRestarts"]) >= 1
    # One that a test can wait for; on a busy machine a daemon may be late for it, so that nothing is asked meanwhile.
    _watched(booted, 4 * SLOWNESS)
    booted.eventually(lambda: _answers(booted))
    # It feeds the watchdog: systemd heard of it more than once.
    heard = _shown(booted, "WatchdogTimestampMonotonic")
    booted.eventually(lambda: _shown(booted, "WatchdogTimestampMonotonic") != heard)
    second = booted.eventually(lambda: _stopped(booted))
    booted.eventually(lambda: booted.main() not in (0, second))
    booted.eventually(lambda: _answers(booted))
    assert int(_shown(booted, "NRestarts")["NRestarts"]) >= 1
    _watched(booted, 120 * SLOWNESS)
    booted.eventually(lambda: _answers(booted))
    booted.eventually(lambda: any("Watchdog timeout" in line for line in booted.journal("_PID=1")))
    grants = _ask(booted, "recent_capabilities", limit=10)["capabilities"]
    assert signature in [one["signature"] for one in grants]
    assert _ask(booted, "verify_audit_integrity")["report"]["valid"] is True
