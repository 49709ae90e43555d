"""The machine of the simulated year: an operator, a supervisor, a daemon and two small disks, all under one clock."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, Final

from covenant.wire import client
from policy import errors
from sandbox import config
from tests import cli_kit, full_disk, hermes_double
from tests.kernel import serving
from tests.kernel.serving import CALLER, Served
from tests.kernel.world import DEFAULTS, HEAD, MANIFEST, SLOWNESS, World

START_SECONDS: Final = 60.0 * SLOWNESS
DISK_MB: Final = {"daemon": 192, "home/supervisor": 384}
HERMES: Final = """\
[agent]
id = "{id}"
name = "{id}"
version = "1.0.0"
runtime = "hermes"
[resources]
network = "off"
[settlement]
budget_credits_per_hour = 100000
[hermes]
tools_allowed = []
approval_policy = "auto-deny"
"""
ECHO: Final = HEAD + "print(json.dumps({'text': 'ran: ' + intent['text']}))\n"
BUDGET: Final = "[settlement]\nbudget_credits_per_hour = 100000\n"
HERMES_AGENTS: Final = ("clerk", "scribe")
AGENTS: Final = (*HERMES_AGENTS, "lapses", "worker", "warm")


class Place(World):
    """A world whose keys and trust root are made by the command, as an operator makes them."""

    def __init__(self, base: Path, *, warm: Path | None = None) -> None:
        self.base, self.home = base, base / "home"
        self.state = self.home / "supervisor"
        for path in (self.home, self.state, base / "packages"):
            path.mkdir(mode=0o700, exist_ok=True)
        for name in () if warm is None else ("rootfs", "closures"):
            subprocess.run(["cp", "-al", f"{warm}/{name}", str(self.state / name)], check=True)


class Machine:
    """Both processes and their files below ``base``. They may be stopped, killed and started again."""

    def __init__(self, base: Path, hermes_url: str) -> None:
        self.base, self.daemon_home = base, base / "daemon"
        self._hermes_url = hermes_url
        self._daemon: subprocess.Popen[bytes] | None = None
        self._log = base / "daemon.log"
        for name in ("home", "home/supervisor", "daemon"):
            (base / name).mkdir(mode=0o700)
        base.chmod(0o755)
        for name, size in DISK_MB.items():
            owner = CALLER if name == "daemon" else 0
            options = f"mode=700,uid={owner},gid={owner},size={size}m"
            subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(base / name)], check=True)
        self.world = Place(base)
        self.served = Served(self.world, callers=[CALLER])
        os.environ["COVENANT_HOME"] = str(self.world.home)
        config.load(self.world.state)

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop_daemon()
        if self.served.process is not None and self.served.process.poll() is None:
            self.served.stop()
        for name in DISK_MB:
            subprocess.run(["umount", str(self.base / name)], check=True)

    def agents(self, key: str, expires: str) -> None:
        """Write the packages, signed with ``key``, into the daemon's home."""
        place = self.daemon_home / "agents"
        place.mkdir(mode=0o700)
        for name in AGENTS:
            standby = "standby = 1\n" if name == "warm" else ""
            fields = {**DEFAULTS, "id": name, "memory_mb": 64, "more": standby + BUDGET}
            manifest = MANIFEST.format(**fields) if name in ("worker", "warm") else HERMES.format(id=name)
            (place / name).mkdir(mode=0o755)
            (place / name / "agent.toml").write_text(manifest)
            if name in ("worker", "warm"):
                (place / name / "main.py").write_text(ECHO)
            self.sign(name, key, expires)

    def sign(self, name: str, key: str, expires: str) -> None:
        """Sign one package anew, and tell the daemon if it runs."""
        path = self.daemon_home / "agents" / name
        cli_kit.done("manifest", "sign", path, "--key", key, "--fresh", "--expires", expires)
        self.own_agents()

    def own_agents(self) -> None:
        """Give the files of the packages to the daemon's user."""
        place = self.daemon_home / "agents"
        for path in (place, *place.rglob("*")):
            os.chown(path, CALLER, CALLER)

    def start_daemon(self) -> None:
        """Start the daemon, and wait until it answers."""
        code = "import sys; sys.path[:0] = sys.argv.pop(1).split(':'); from covenant.start import entry; entry()"
        own = ["--reuid", str(CALLER), "--regid", str(CALLER), "--clear-groups"]
        inherited = {name: os.environ[name] for name in ("LD_PRELOAD", "COVENANT_TEST_CLOCK") if name in os.environ}
        with self._log.open("ab") as log:
            self._daemon = subprocess.Popen(
                ["setpriv", *own, "/usr/bin/python3", "-c", code, serving.covenant_command()[3]],
                env={
                    "PATH": "/usr/bin:/bin",
                    "COVENANT_HOME": str(self.daemon_home),
                    "COVENANT_HTTP_PORT": "off",
                    "COVENANT_SOCKET": str(self.served.path),
                    "HERMES_API_BASE_URL": self._hermes_url,
                    "HERMES_API_KEY": hermes_double.KEY,
                    **inherited,
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        until = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(errors.DaemonSilentError), client.connected(self.daemon_home) as one:
                one.ask("ping")
                return
            assert self._daemon.poll() is None, self.log()
            assert time.monotonic() < until, self.log()
            time.sleep(0.02)

    def stop_daemon(self) -> None:
        """SIGTERM, and wait."""
        if self._daemon is not None and self._daemon.poll() is None:
            self._daemon.send_signal(signal.SIGTERM)
            self._daemon.wait(START_SECONDS)

    def kill_daemon(self) -> None:
        """SIGKILL."""
        assert self._daemon is not None
        self._daemon.kill()
        self._daemon.wait()

    @property
    def daemon_pid(self) -> int:
        """The id of the daemon's process."""
        assert self._daemon is not None
        return self._daemon.pid

    def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        """One request of the operator on a new connection."""
        with client.connected(self.daemon_home, answer_seconds=START_SECONDS) as one:
            return one.ask(kind, **fields)

    def answers(self) -> bool:
        """Whether the daemon answers."""
        try:
            return bool(self.ask("ping")["kind"] == "pong")
        except (errors.CovenantError, OSError):
            return False

    def log(self) -> str:
        """The end of what the daemon wrote to stderr."""
        return self._log.read_text()[-4000:]

    def full(self, disk: str) -> contextlib.AbstractContextManager[None]:
        """Leave no room on a disk for as long as the block lasts."""
        return full_disk.filled(self.base / disk)

    def used_mb(self, disk: str) -> float:
        """How much of a disk is used."""
        return shutil.disk_usage(self.base / disk).used / (1 << 20)
