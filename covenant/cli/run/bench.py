"""``covenant bench``: what a run costs here, beside the tools that it is made of, measured in one go."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from covenant.cli import common, spinner
from covenant.cli.run import supervisor_client
from policy import errors
from sandbox import progress

if TYPE_CHECKING:
    from policy.manifest.agent import Manifest
    from policy.package import Package
    from sandbox.config import Config

_WAIT_SECONDS = 120.0
_RUNSC_FLAGS = ("--network=none", "--platform=systrap", "--ignore-cgroups", "--overlay2=none", "--file-access=shared")
# The names that an agent's environment has, for one that looks at them.
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/", "LANG": "C.UTF-8", "COVENANT_RUN_ID": "bench"}
_WHAT = {
    "line": "standby: from the intent's arrival in its instance to the agent's line",
    "standby": "standby: from the request to the accepted answer, everything released",
    "cold": "a cold run of the same package, verified to accepted",
    "raw": "runsc run of the same program, nothing else",
    "bwrap": "bwrap of the same program",
}
# What the figures are wanted to be at most: milliseconds, and the part of the raw run's.
_GOALS = {"line": (4.0, 0.04), "standby": (45.0, 0.2), "cold": (None, 1.15)}


@click.group()
def bench() -> None:
    """Measure what this machine needs for a run."""


@bench.command(epilog=common.examples("covenant bench dispatch hello --pairs 3"))
@click.argument("package", type=click.Path(path_type=Path))
@click.option("--pairs", type=click.IntRange(1, 1000), default=10, show_default=True, help="Runs of each kind.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def dispatch(package: Path, pairs: int, as_json: bool) -> None:
    """Compare cold, standby, `runsc run` and bwrap for the signed PACKAGE, in turns, through a running supervisor.

    PACKAGE asks for standby and takes any intent. Each kind waits until the instances are ready again, so that none
    is measured while another is made.
    """
    from policy import decide
    from sandbox import config as configuration
    from sandbox.storage import package_reader as packages

    read = packages.read(package)
    manifest = decide.manifest_of(read)
    if not manifest.sandbox.standby:
        raise errors.UsageError("the package asks for no standby", hint="write [sandbox] standby = 1 and sign it")
    if os.geteuid() != 0:
        raise errors.PrivilegeError("the raw tools need root", hint="run it with sudo, and give COVENANT_HOME")
    with ExitStack() as stack:
        one = _Bench(package, read, manifest, configuration.load(common.state()), stack)
        with spinner.shown("preparing to measure", quiet=as_json):
            times = one.measure(pairs)
    document = _document(times, pairs)
    if as_json:
        common.emit(document)
    else:
        _print(document)


class _Bench:
    """One comparison. ``kinds`` are what is measured in each round, in this order; each returns seconds."""

    def __init__(self, path: Path, package: Package, manifest: Manifest, config: Config, stack: ExitStack) -> None:
        self._path, self._package, self._manifest, self._config = path, package, manifest, config
        self._stack = stack
        # As any user could have it: what is compared is the tool, not our copy of the package.
        self._copy = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="covenant-bench-")))
        self._copy.chmod(0o755)
        for name, content in package.files.items():
            target = self._copy / "package" / name
            target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            target.write_bytes(content)
            target.chmod(0o755 if name == manifest.agent.entry else 0o644)
        for name, text in package.links.items():
            target = self._copy / "package" / name
            target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            target.symlink_to(text)
        self._lines: list[float] = []
        self._directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, self._directory)

    def measure(self, pairs: int) -> dict[str, list[float]]:
        """Seconds by kind. The first round is thrown away."""
        self._asked()
        kinds: dict[str, Callable[[], float]] = {"standby": self._standby, "cold": self._cold(), "raw": self._raw}
        if shutil.which("bwrap"):
            kinds["bwrap"] = self._bwrap
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        with progress.step("measuring") as further:
            for index in range(pairs + 1):
                for kind, run in kinds.items():
                    further(f"measuring: {index} of {pairs}, {kind}")
                    self._await_instances()
                    times[kind].append(run())
        return {"line": self._lines[1:], **{kind: values[1:] for kind, values in times.items()}}

    def _asked(self) -> Any:
        from sandbox.serve.api import client

        with supervisor_client.supervisor() as sock:
            if sock is None:
                raise errors.ServiceError("no supervisor is running here", hint="start covenant-supervisor")
            answer = client.run(sock, self._directory, "hi")
        if answer.error is not None:
            if isinstance(answer.error, errors.AgentFailedError) and not answer.error.hint:
                answer.error.hint = f"the package must take any intent; see: covenant run {self._path} hi"
            raise answer.error
        return answer

    def _await_instances(self) -> None:
        from sandbox.standby import dispatch as standby_dispatch

        until = time.monotonic() + _WAIT_SECONDS
        while standby_dispatch.ready(self._config.state / "runs", self._package) < self._manifest.sandbox.standby:
            if time.monotonic() > until:
                raise errors.ServiceError("no instance of the package is ready", hint="see `covenant audit recent`")
            time.sleep(0.05)

    def _standby(self) -> float:
        begin = time.perf_counter()
        answer = self._asked()
        seconds = time.perf_counter() - begin
        self._lines.append(answer.timings["answer line"])
        return seconds

    def _cold(self) -> Callable[[], float]:
        from covenant.keys import identity
        from sandbox.storage import package_reader as packages
        from sandbox.supervisor import Request, Supervisor

        home = common.home()
        issuer = identity.issuer(home)
        supervisor = self._stack.enter_context(Supervisor(self._config.state, never_granted=(str(home),)))

        def run() -> float:
            begin = time.perf_counter()
            request = Request(packages.read(self._path), "hi", issuer, package_name=str(self._path.resolve()))
            answer = supervisor.run(request)
            if answer.error is not None:
                raise answer.error
            if answer.interrupted:
                raise KeyboardInterrupt
            return time.perf_counter() - begin

        return run

    def _raw(self) -> float:
        bundle, state = self._copy / "bundle", self._copy / "state"
        for place in (bundle, state):
            place.mkdir(exist_ok=True)
        (bundle / "config.json").write_text(json.dumps(_oci(self._arguments(), str(self._copy / "package"))))
        program = str(self._config.runsc)
        name = f"bench-{os.getpid()}-{time.monotonic_ns()}"
        return _timed([program, f"--root={state}", *_RUNSC_FLAGS, "run", f"--bundle={bundle}", name])

    def _bwrap(self) -> float:
        where = str(self._copy / "package")
        flags = ("--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--unshare-all", "--chdir", where)
        return _timed(["bwrap", *flags, *self._arguments()])

    def _arguments(self) -> list[str]:
        agent = self._manifest.agent
        entry = str(self._copy / "package" / agent.entry)
        interpreter = {"python3": [str(self._config.python3)], "node": [str(self._config.node)]}
        return [*interpreter.get(agent.runtime, []), entry]


def _oci(arguments: Sequence[str], directory: str) -> dict[str, Any]:
    process = {
        "user": {"uid": 65534, "gid": 65534},
        "args": list(arguments),
        "env": [f"{name}={value}" for name, value in _ENVIRONMENT.items()],
        "cwd": directory,
        "capabilities": {},
    }
    spaces = [{"type": kind} for kind in ("pid", "mount", "network")]
    root = {"path": "/", "readonly": True}
    return {"ociVersion": "1.0.0", "process": process, "root": root, "linux": {"namespaces": spaces}}


def _timed(command: Sequence[str]) -> float:
    """From the start of a tool to the end of an answer that was one."""
    intent = json.dumps({"id": "0", "text": "hi", "issuer": {}, "issued_at": 0, "priority": "normal"}).encode() + b"\n"
    begin = time.perf_counter()
    try:
        done = subprocess.run(
            command,
            input=intent,
            capture_output=True,
            check=False,
            env={"PATH": "/usr/bin:/bin", "HOME": "/"},
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise errors.HostError(f"`{command[0]}` cannot be measured: {e}") from e
    seconds = time.perf_counter() - begin
    if done.returncode:
        raise errors.HostError(f"`{command[0]}` failed: {done.stderr.decode(errors='replace')[-300:]}")
    return seconds


def _document(times: Mapping[str, Sequence[float]], pairs: int) -> dict[str, Any]:
    """Medians in milliseconds, and the medians of the ratios to the raw run of the same round."""
    return {
        "kind": "bench_dispatch",
        "pairs": pairs,
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "figures": {
            kind: {
                "median_ms": round(statistics.median(values) * 1000, 3),
                "of_raw": round(statistics.median(v / r for v, r in zip(values, times["raw"], strict=True)), 4),
            }
            for kind, values in times.items()
        },
        "missing": [] if "bwrap" in times else ["bwrap"],
    }


def _print(document: Mapping[str, Any]) -> None:
    for kind, figure in document["figures"].items():
        goal_ms, goal = _GOALS.get(kind, (None, None))
        wanted = "" if goal is None else f"  (goal {f'{goal_ms:g} ms, ' if goal_ms else ''}{goal:g})"
        common.say(f"{kind:8} {figure['median_ms']:9.2f} ms  {figure['of_raw']:7.3f} of raw{wanted}")
        common.say(f"         {_WHAT[kind]}")
    for name in document["missing"]:
        common.say(f"{name} is not installed here, and was not measured")
    common.say(f"medians of {document['pairs']} rounds on {document['cores']} cores, load {document['load']:.1f}")
