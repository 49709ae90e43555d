"""``covenantd`` from its start to its end: one a home, its socket, signals, systemd, what a kill leaves."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from covenant import daemon
from covenant.cli.run import doctor
from covenant.wire import client
from policy import errors
from tests import daemon_kit
from tests.doubles import async_client

pytestmark = pytest.mark.anyio

SECONDS = 60.0


class Process:
    """A daemon of its own."""

    def __init__(self, home: pathlib.Path, popen: subprocess.Popen[str]) -> None:
        self.home, self.popen = home, popen

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Its exit status and what it said."""
        self.popen.send_signal(number)
        _, said = self.popen.communicate(timeout=SECONDS)
        return self.popen.returncode, said

    def until(self, ready: Any) -> None:
        """Wait for what ``ready`` says, as long as the daemon lives."""
        end = time.monotonic() + SECONDS
        while not ready():
            assert self.popen.poll() is None, self.popen.communicate()[1]
            assert time.monotonic() < end
            time.sleep(0.02)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from covenant.start import entry; entry()", *arguments]


def environment(home: pathlib.Path, **more: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ}
    return {**kept, "COVENANT_HOME": str(home), "COVENANT_HTTP_PORT": "0", "COVENANT_ALLOW_ROOT": "1", **more}


def answers(home: pathlib.Path) -> bool:
    try:
        with client.connected(home, answer_seconds=SECONDS) as one:
            return one.ask("ping") == {"kind": "pong"}
    except errors.DaemonSilentError:
        return False


@contextlib.contextmanager
def process(home: pathlib.Path, clone: pathlib.Path, *words: str, **more: str) -> Iterator[Process]:
    """A daemon that answers, started by these ``words``."""
    popen = subprocess.Popen(
        words or command(),
        cwd=clone,
        env=environment(home, **more),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    with popen:
        one = Process(home, popen)
        try:
            one.until(lambda: answers(home))
            yield one
        finally:
            if popen.poll() is None:
                popen.kill()


def run(clone: pathlib.Path, *arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), cwd=clone, env=env, capture_output=True, text=True, timeout=SECONDS, check=False
    )


def rows(home: pathlib.Path, kind: str) -> list[dict[str, Any]]:
    lines = (home / "audit" / "events.jsonl").read_text().splitlines()
    return [row["kind"] for row in map(json.loads, lines) if row["kind"]["type"] == kind]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_it_in_order(covenant_home: pathlib.Path, clone: pathlib.Path, number: int) -> None:
    with process(covenant_home, clone) as one:
        status, said = one.end(number)
    assert status == 0, said
    assert not (covenant_home / "sock").exists()
    assert [row["reason"] for row in rows(covenant_home, "daemon_stopped")] == [signal.Signals(number).name]
    assert len(rows(covenant_home, "daemon_started")) == 1


def test_second_one_is_refused_and_first_goes_on(covenant_home: pathlib.Path, clone: pathlib.Path) -> None:
    with process(covenant_home, clone) as one:
        second = run(clone, env=environment(covenant_home))
        assert second.returncode == 1
        assert "another daemon serves" in second.stderr
        assert "[daemon_runs]" in second.stderr
        assert answers(covenant_home)
        assert one.end()[0] == 0


def test_what_killed_one_left_is_replaced(covenant_home: pathlib.Path, clone: pathlib.Path) -> None:
    with process(covenant_home, clone) as one:
        one.popen.kill()
        one.popen.wait(SECONDS)
    assert (covenant_home / "sock").exists()
    with process(covenant_home, clone) as one:
        assert one.end()[0] == 0
    assert len(rows(covenant_home, "daemon_started")) == 2


def test_socket_at_which_another_listens_is_left_alone(covenant_home: pathlib.Path, clone: pathlib.Path) -> None:
    covenant_home.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(covenant_home / "sock"))
        other.listen()
        done = run(clone, env=environment(covenant_home))
        assert done.returncode == 1
        assert "somebody listens at" in done.stderr
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(covenant_home / "sock"))


def test_what_is_no_socket_is_left_alone(covenant_home: pathlib.Path, clone: pathlib.Path) -> None:
    covenant_home.mkdir(mode=0o700)
    (covenant_home / "sock").write_text("mine")
    done = run(clone, env=environment(covenant_home))
    assert done.returncode == 1
    assert "is there and is no socket" in done.stderr
    assert (covenant_home / "sock").read_text() == "mine"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"COVENANT_HTTP_PORT": "http"}, "`http` is no value of COVENANT_HTTP_PORT"),
        ({"COVENANT_HTTP_BIND_ADDR": "0.0.0.0"}, "`0.0.0.0` is no value of COVENANT_HTTP_BIND_ADDR"),
        ({"COVENANT_BUDGET_PROJECTION_TICK_MS": "-1"}, "`-1` is no value of COVENANT_BUDGET_PROJECTION_TICK_MS"),
        ({"COVENANT_RUNTIME_BACKEND": "docker"}, "`docker` is no value of COVENANT_RUNTIME_BACKEND"),
        ({"COVENANT_LIVE_TRACE": "maybe"}, "`maybe` is no value of COVENANT_LIVE_TRACE"),
    ],
)
def test_setting_that_cannot_be_used_ends_start(
    covenant_home: pathlib.Path, clone: pathlib.Path, more: dict[str, str], said: str
) -> None:
    done = run(clone, env=environment(covenant_home, **more))
    assert done.returncode == 1
    assert said in done.stderr
    assert "[setting_invalid]" in done.stderr


def test_usage_is_2_and_help_is_0(covenant_home: pathlib.Path, clone: pathlib.Path) -> None:
    assert run(clone, "--nonsense", env=environment(covenant_home)).returncode == 2
    assert run(clone, "--help", env=environment(covenant_home)).returncode == 0
    done = run(clone, "--version", env=environment(covenant_home))
    assert (done.returncode, done.stdout[:10]) == (0, "covenantd ")


def test_it_does_not_run_as_root_unless_it_is_told_to(
    covenant_home: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.delenv("COVENANT_ALLOW_ROOT", raising=False)
    assert daemon.main([]) == 1
    assert "[root_refused]" in capsys.readouterr().err
    assert not covenant_home.exists()


def test_home_that_others_can_reach_into_is_refused(covenant_home: pathlib.Path, clone: pathlib.Path) -> None:
    covenant_home.mkdir(mode=0o755)
    done = run(clone, env=environment(covenant_home))
    assert (done.returncode, "[home_unsafe]" in done.stderr) == (1, True)


def test_systemd_is_told_and_its_socket_is_served(covenant_home: pathlib.Path, clone: pathlib.Path) -> None:
    """Type=notify, WatchdogSec and socket activation, without systemd: the descriptors and variables that it gives."""
    covenant_home.mkdir(mode=0o700)
    shim = (
        "import os, socket, sys\n"
        "sock = socket.socket(socket.AF_UNIX); sock.bind(sys.argv[1]); sock.listen()\n"
        "os.dup2(sock.fileno(), 3); os.set_inheritable(3, True)\n"
        "os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='1')\n"
        "os.execv(sys.executable, [sys.executable, *sys.argv[2:]])\n"
    )
    where = str(covenant_home.parent / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(where)
        listener.settimeout(SECONDS)
        env = environment(covenant_home, NOTIFY_SOCKET=where, WATCHDOG_USEC="400000")
        arguments = [sys.executable, "-c", shim, str(covenant_home / "sock"), *command()[1:]]
        with subprocess.Popen(arguments, cwd=clone, env=env, stderr=subprocess.PIPE, text=True) as popen:
            try:
                said: list[str] = []
                while "READY=1" not in said or "WATCHDOG=1" not in said[said.index("READY=1") :]:
                    said.append(listener.recv(4096).decode())
                assert answers(covenant_home)
                popen.terminate()
                while said[-1] != "STOPPING=1":
                    said.append(listener.recv(4096).decode())
                popen.communicate(timeout=SECONDS)
                assert popen.returncode == 0
            finally:
                popen.kill()
    # It is systemd's to take away.
    assert (covenant_home / "sock").exists()


def test_client_of_home_without_daemon_is_told_how_to_start_one(covenant_home: pathlib.Path) -> None:
    with pytest.raises(errors.DaemonSilentError) as caught, client.connected(covenant_home):
        pass
    assert "covenantd" in caught.value.hint


async def test_home_is_laid_out_as_seed_says(covenant_home: pathlib.Path) -> None:
    async with daemon_kit.running(covenant_home) as one:
        assert await one.ask("ping") == {"kind": "pong"}
        # The watcher of the packages makes their directory, once it has begun.
        with anyio.fail_after(SECONDS):
            while not (covenant_home / "agents").exists():  # noqa: ASYNC110
                await anyio.sleep(0.02)
        there = {str(path.relative_to(covenant_home)) for path in covenant_home.rglob("*")}
        assert there >= {
            "identity/local.key",
            "memory.db",
            "audit/events.jsonl",
            "audit/events.chain.jsonl",
            "capabilities/granted.jsonl",
            "capabilities/revoked.jsonl",
            "capabilities/uses.jsonl",
            "peers/registry.jsonl",
            "peers/operator.token",
            "receipts/working.jsonl",
            "receipts/index.db",
            "budget/ledger.jsonl",
            "budget/checkpoints.jsonl",
            "a2a/events.jsonl",
            "agents",
            ".covenantignore",
            "sock",
        }
        open_to_others = [p for p in covenant_home.rglob("*") if not p.is_symlink() and p.stat().st_mode & 0o077]
        assert open_to_others == []


async def test_daemon_can_be_started_again_in_one_process(covenant_home: pathlib.Path) -> None:
    for _ in range(2):
        async with daemon_kit.running(covenant_home) as one:
            report = await one.ask("verify_audit_integrity")
            assert report["report"]["valid"] is True
    assert len(rows(covenant_home, "daemon_started")) == 2


async def test_start_that_fails_at_last_leaves_nothing_open(covenant_home: pathlib.Path) -> None:
    covenant_home.mkdir(mode=0o700)
    (covenant_home / "sock").write_text("mine")
    with pytest.raises(BaseExceptionGroup) as caught:
        async with daemon_kit.running(covenant_home, http_port=0):
            pass
    assert caught.group_contains(errors.HomeError)
    (covenant_home / "sock").unlink()
    async with daemon_kit.running(covenant_home, http_port=0) as one:
        assert await one.ask("ping") == {"kind": "pong"}


async def test_doctor_names_changed_files_until_restart(covenant_home: pathlib.Path) -> None:
    def stale() -> list[str]:
        return [check.found for check in doctor.of_the_home() if check.name == "daemon's files"]

    async with daemon_kit.running(covenant_home):
        assert await anyio.to_thread.run_sync(stale) == []
        (covenant_home / "secrets.toml").write_text("# later\n")
        (covenant_home / "secrets.toml").chmod(0o600)
        (found,) = await anyio.to_thread.run_sync(stale)
        assert found.endswith("secrets.toml")
    async with daemon_kit.running(covenant_home):
        assert await anyio.to_thread.run_sync(stale) == []


async def test_old_token_lets_nobody_in_and_connection_lives_on(covenant_home: pathlib.Path) -> None:
    async with daemon_kit.running(covenant_home) as one:
        old = client.operator_token(covenant_home)
        new = (await one.ask("rotate_operator_token"))["token_b58"]
        assert client.operator_token(covenant_home) == new != old
        assert await one.ask("ping") == {"kind": "pong"}
        with pytest.raises(errors.AuthenticationError):
            async with async_client.connected(covenant_home, token=old):
                pass
        assert [row["transport"] for row in rows(covenant_home, "authentication_failed")] == ["ipc"]
