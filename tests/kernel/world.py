"""A COVENANT_HOME of a test's own, with a key, a trust root, and packages that it writes, signs and runs for real."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from covenant.keys import identity, signing
from policy import decide, errors
from sandbox import config
from sandbox.storage import package_reader
from sandbox.storage.trust_state import State
from sandbox.supervisor import Request, RunResult, Supervisor

ROOT = Path(__file__).resolve().parents[2]
AGENTS = ROOT / "agents"

MANIFEST = """\
[agent]
id = "{id}"
name = "Test"
version = "1.0.0"
runtime = "{runtime}"
entry = "{entry}"
[resources]
cpu_ms_per_task = {cpu_ms}
memory_mb = {memory_mb}
disk_mb = {disk_mb}
network = "{network}"
{resources}
[sandbox]
required = {required}
backend = "{backend}"
filesystem = "{filesystem}"
{more}
"""
# How many times slower than an ordinary machine this one is: an emulated one says so (vagrant/provision.sh).
SLOWNESS = int(os.environ.get("COVENANT_SLOWNESS", "1"))
DEFAULTS: dict[str, Any] = {
    "id": "probe",
    "runtime": "python3",
    "entry": "main.py",
    "cpu_ms": 20000 * SLOWNESS,
    "memory_mb": 128,
    "disk_mb": 16,
    "network": "off",
    "resources": "",
    "required": "true",
    "backend": "linux-gvisor",
    "filesystem": "ephemeral",
    "more": "",
}
# Reads the intent and answers with the value of `answer`, which the code before it sets.
HEAD = "import json, os, sys\nintent = json.loads(sys.stdin.readline())\n"
TAIL = "\nprint(json.dumps({'text': json.dumps(answer)}))\n"


CGROUPS = Path("/sys/fs/cgroup")
# The worlds of this process whose end was not looked at (worlds_ended).
_MADE: list[World] = []


class World:
    """``run`` gives the supervisor's answer; ``ask`` runs python code and gives what it put into ``answer``."""

    def __init__(self, base: Path, *, warm: Path | None = None) -> None:
        """``warm`` is the state of a world whose root directories are taken over as hard links, for speed alone."""
        _MADE.append(self)
        self.base = base
        self.home = base / "home"
        self.state = self.home / "supervisor"
        for path in (self.home, self.state, base / "packages"):
            path.mkdir(mode=0o700)
        if warm is not None:
            for name in ("rootfs", "closures"):
                subprocess.run(["cp", "-al", str(warm / name), str(self.state / name)], check=True)
        self.configure()
        self.key = Ed25519PrivateKey.generate()
        self.now_ms = int(time.time() * 1000)
        with State(self.state) as state:
            state.init_root(signing.new_root("tester", self.key, now_ms=self.now_ms), self.now_ms)
        self._serial = self.now_ms
        self.issuer = identity.issuer(self.home)

    def package(self, files: Mapping[str, str | bytes], *, name: str = "probe", **fields: Any) -> Path:
        """Write a package directory; the manifest is ``MANIFEST`` with ``fields`` unless ``agent.toml`` is given."""
        path = self.base / "packages" / name
        if path.exists():
            shutil.rmtree(path)
        path.mkdir(mode=0o755)
        manifest = MANIFEST.format(**{**DEFAULTS, **fields})
        for file, content in {"agent.toml": manifest, **files}.items():
            target = path / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def copy(self, agent: str) -> Path:
        """A copy of one of the repository's agents."""
        path = self.base / "packages" / agent.replace("/", "-")
        shutil.copytree(AGENTS / agent, path, ignore=shutil.ignore_patterns("__pycache__", "agent.dsse.json"))
        return path

    def sign(self, path: Path, *, key: Ed25519PrivateKey | None = None, **terms: Any) -> Path:
        """Put an envelope into the package."""
        self._serial += 1
        read = package_reader.read(path)
        chosen = signing.Terms(**{"serial": self._serial, **terms})
        statement = signing.statement(read, decide.manifest_of(read), chosen, now_ms=int(time.time() * 1000))
        signing.write_envelope(path, signing.sign(statement, key or self.key))
        return path

    def run(self, path: Path, text: str = "hi", **request: Any) -> RunResult:
        """Run the package through the supervisor, as ``covenant run`` does."""
        opening = Supervisor(self.state, never_granted=(str(self.home),))
        with opening as supervisor, package_reader.beside(path) as children:
            named = {"package_name": str(path), "children": children, **request}
            return supervisor.run(Request(package_reader.read(path), text, self.issuer, **named))

    def run_code(
        self,
        code: str,
        text: str = "hi",
        *,
        request: Mapping[str, Any] | None = None,
        files: Mapping[str, str | bytes] | None = None,
        **fields: Any,
    ) -> RunResult:
        """Write, sign and run a python agent with this code, and ``files`` beside it."""
        package = self.package({"main.py": code, **(files or {})}, **fields)
        return self.run(self.sign(package), text, **(request or {}))

    def ask(self, code: str, **fields: Any) -> Any:
        """Return the `answer` of ``code``; a failed run fails the test."""
        answer = self.run_code(HEAD + code + TAIL, **fields)
        assert answer.error is None, (answer.error, answer.stderr)
        assert answer.result is not None
        return json.loads(answer.result.text)

    def configure(self, **settings: Any) -> None:
        """Write the supervisor's configuration, where it would else be the machine's own (/etc/covenant).

        A policy's self-test is off unless it is asked for: it is one more sandbox before each run, and has tests of its
        own (test_canaries.py).
        """
        settings = {"self_test": False, **settings}
        if SLOWNESS > 1:
            settings = {"start_deadline_seconds": 60 * SLOWNESS, "attest_seconds": 30 * SLOWNESS, **settings}
        lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
        (self.state / "config.toml").write_text("\n".join(lines) + "\n")
        config.load(self.state)

    def rows(self) -> list[dict[str, Any]]:
        """The supervisor's audit rows; of one that is just being written there may be a part, and no newline."""
        log = self.state / "audit" / "events.jsonl"
        whole = log.read_text().rpartition("\n")[0] if log.exists() else ""
        return [json.loads(line) for line in whole.splitlines()]

    def cgroups(self) -> list[Path]:
        """Return the cgroups of this world's runs, outer ones first. A run without a row has a run directory."""
        runs = self.state / "runs"
        ids = {row["kind"].get("run_id") for row in self.rows()} - {None}
        ids |= {path.name for path in runs.iterdir() if path.is_dir()} if runs.exists() else set()
        found: list[Path] = []
        # Other cgroups appear and vanish during the walk, which os.walk tolerates and a glob does not.
        for place, names, _ in os.walk(CGROUPS) if ids else ():
            found += [Path(place, name) for name in names if any(name.startswith(run_id) for run_id in ids)]
        return found


@contextlib.contextmanager
def worlds_ended(below: Path, *, wait_seconds: float = 30 * SLOWNESS) -> Iterator[None]:
    """When the block ends, no run of a world below this directory may have a cgroup. Those that are left are removed.

    A run that is about to end has ``wait_seconds``.

    Raises:
        AssertionError: Raised after the removal.
    """
    try:
        yield
    except BaseException:
        _remove_cgroups(below, 0)
        raise
    left = _remove_cgroups(below, wait_seconds)
    assert left == [], f"start a supervisor after the last one was killed: {left}"


def _remove_cgroups(below: Path, wait_seconds: float) -> list[Path]:
    """Wait for the runs that are about to end, and remove the cgroups of the others. Return these."""
    ended = [world for world in _MADE if world.base.is_relative_to(below)]
    _MADE[:] = [world for world in _MADE if world not in ended]
    until = time.monotonic() + wait_seconds
    while (left := [path for world in ended for path in world.cgroups()]) and time.monotonic() < until:
        time.sleep(0.1)
    for path in reversed(left):
        _remove_cgroup(path)
    return left


def _remove_cgroup(path: Path) -> None:
    until = time.monotonic() + 30 * SLOWNESS
    while path.exists():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for pid in (path / "cgroup.procs").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
            if (path / "freezer.state").exists():
                (path / "freezer.state").write_text("THAWED")
        with contextlib.suppress(OSError):
            path.rmdir()
        assert time.monotonic() < until, f"{path} is busy"
        time.sleep(0.01)


def refused(kind: type[errors.CovenantError], error: errors.CovenantError | None) -> str:
    """The message of an error of exactly this class."""
    assert type(error) is kind, (type(error), str(error))
    return str(error)
