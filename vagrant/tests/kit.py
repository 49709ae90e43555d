"""An operator on a machine that is Covenant's alone: the installed command, agents that are written, signed and run,
several at once, and what runs left anywhere on the machine.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from typing import Any, TypeVar

_T = TypeVar("_T")

HOME = pathlib.Path("/root/operator")
STATE = pathlib.Path("/var/lib/covenant")
CLONE = pathlib.Path(__file__).resolve().parents[2]
COVENANT = "/usr/bin/covenant"
CGROUPS = pathlib.Path("/sys/fs/cgroup")
# Where leaves are: the package's service serves runs once its socket was called, and a command itself before that.
SERVICE = "system.slice/covenant-supervisor.service"
SUPERVISORS = (SERVICE, "covenant.slice/*")
# Nothing here is measured by the clock; an emulated machine takes half a minute for what takes a real one 0.3 s.
PATIENCE_SECONDS = 420

MANIFEST = """\
[agent]
id = "{name}"
name = "{name}"
version = "1.0.0"
runtime = "python3"
entry = "main.py"
[resources]
cpu_ms_per_task = 600000
network = "off"
{resources}
[sandbox]
required = true
backend = "linux-gvisor"
filesystem = "{filesystem}"
{more}"""
HEAD = "import json, os, signal, sys, time\nintent = json.loads(sys.stdin.readline())\n"
TAIL = "\nprint(json.dumps({'text': json.dumps(answer)}))\n"


@dataclasses.dataclass(frozen=True)
class Package:
    """The parts of an agent: code that sets `answer`, lines of [resources], and a host path that it may write."""

    code: str
    resources: str
    written: str = ""

    def write(self, path: pathlib.Path) -> pathlib.Path:
        """Make the package directory, without an envelope."""
        path.mkdir(mode=0o755)
        more = f'[permissions.filesystem]\nwrite = ["{self.written}"]\n' if self.written else ""
        kind = "host" if self.written else "ephemeral"
        fields = {"name": path.name, "resources": self.resources, "filesystem": kind, "more": more}
        (path / "agent.toml").write_text(MANIFEST.format(**fields))
        (path / "main.py").write_text(HEAD + self.code + TAIL)
        return path


class Agent:
    """One `covenant run` in the background."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self.name = name
        self.process = process

    def leaf(self) -> pathlib.Path:
        """The cgroup of its sandbox, once there are processes in it."""

        def look() -> pathlib.Path | None:
            assert self.process.poll() is None, self.process.communicate()
            for run_id in [row["run_id"] for row in rows("run_started") if row["agent_id"] == self.name][-1:]:
                for path in (found for below in SUPERVISORS for found in CGROUPS.glob(f"{below}/{run_id}")):
                    if len((path / "cgroup.procs").read_text().split()) > 2:
                        return path
            return None

        return until(look, f"a leaf of {self.name}")

    def answer(self) -> dict[str, Any]:
        """The document that the run ended with, result or error."""
        out, err = self.process.communicate(timeout=PATIENCE_SECONDS)
        assert out, (self.process.returncode, err)
        document: dict[str, Any] = json.loads(out)
        return document

    def value(self) -> Any:
        """Return the agent's `answer`; a failed run fails the test."""
        document = self.answer()
        assert document["kind"] == "intent_result", document
        return json.loads(document["text"])


class Operator:
    """Root with its own home, as an operator who installed the package and read the README."""

    def __init__(self, base: pathlib.Path) -> None:
        self.base = base
        self.environment = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root",
            "COVENANT_HOME": str(HOME),
            "COVENANT_STATE": str(STATE),
        }

    def served(self) -> Operator:
        """Return this operator as one who asks the installed service: a state of its own would go before it."""
        other = Operator(self.base)
        kept = {key: value for key, value in self.environment.items() if key != "COVENANT_STATE"}
        other.environment = {**kept, "COVENANT_SOCKET": "/run/covenant/supervisor.sock"}
        return other

    def covenant(self, *arguments: str, expect: int = 0) -> str:
        """Run the command to its end; what it printed."""
        done = subprocess.run(
            [COVENANT, *arguments],
            env=self.environment,
            cwd="/",
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == expect, (arguments, done.returncode, done.stdout, done.stderr)
        return done.stdout

    def signed(self, packages: Mapping[str, Package]) -> dict[str, pathlib.Path]:
        """Write and sign packages, several at a time; the paths by the same names."""
        paths = {name: package.write(self.base / name) for name, package in packages.items()}
        with futures.ThreadPoolExecutor() as pool:
            list(pool.map(self.sign, paths.values()))
        return paths

    def sign(self, path: pathlib.Path) -> pathlib.Path:
        """Put an envelope into a package."""
        self.covenant("manifest", "sign", str(path), "--key", "operator")
        return path

    def start(self, path: pathlib.Path, *options: str) -> Agent:
        """Run a signed package in the background."""
        command = [COVENANT, "run", str(path), "go", "--json", *options]
        process = subprocess.Popen(
            command, env=self.environment, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        return Agent(path.name, process)


def rows(kind: str) -> list[dict[str, Any]]:
    """The supervisor's audit rows of one kind; one that is just being written has no newline yet."""
    log = STATE / "audit/events.jsonl"
    whole = log.read_text().rpartition("\n")[0] if log.exists() else ""
    found = [json.loads(line)["kind"] for line in whole.splitlines()]
    return [row for row in found if row["type"] == kind]


def until(look: Callable[[], _T | None], what: str) -> _T:
    """Wait until `look` returns something, and return it; a timeout fails the test."""
    end = time.monotonic() + PATIENCE_SECONDS
    while (found := look()) is None:
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.05)
    return found


def numbers(path: pathlib.Path) -> Mapping[str, int]:
    """Read a flat keyed cgroup file such as cpu.stat."""
    return {key: int(value) for key, value in (line.split() for line in path.read_text().splitlines())}


def kernel_log() -> list[str]:
    """Return the lines of the kernel log since the boot."""
    done = subprocess.run(
        ["/usr/bin/journalctl", "-k", "-b", "-o", "cat"], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout.splitlines()


def leftovers() -> list[str]:
    """Return the remains of runs on this machine: leaves, scopes, processes, mounts, run directories."""
    # A supervisor in this very process (those of tests/kernel) keeps its scope, and the leaf that it moved into, for as
    # long as the process lives.
    own = f"covenant-{os.getpid()}-"
    scopes = [path for path in CGROUPS.glob("covenant.slice/*") if path.is_dir() and not path.name.startswith(own)]
    found = [str(path) for path in scopes]
    kept = [path for path in CGROUPS.glob(f"covenant.slice/{own}*/*") if path.is_dir()]
    kept += [path for path in CGROUPS.glob(f"{SERVICE}/*") if path.is_dir()]
    found += [str(path) for path in kept if path.name != "supervisor"]
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = pathlib.Path(f"/proc/{entry}/cmdline").read_bytes()
        except OSError:
            continue
        if b"runsc" in command.split(b"\0")[0]:
            found.append(f"process {entry}: {command!r}")
    mounts = pathlib.Path("/proc/self/mountinfo").read_text().splitlines()
    found += [line for line in mounts if str(STATE) in line]
    runs = STATE / "runs"
    return found + ([str(path) for path in runs.iterdir() if path.is_dir()] if runs.exists() else [])
