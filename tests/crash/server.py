"""The process from which the subjects are forked: one thread, everything imported, reaper of every orphan.

Speaks JSON lines over stdin and stdout. It is a child subreaper, so a process that a killed subject leaves alive
becomes its child. ``settle`` returns those that did not end by themselves.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from policy import errors

ROOT = Path(__file__).resolve().parents[2]
_OVER_SECONDS = 30.0
# What a run imports, here once for all subjects.
_PARTS = (
    "covenant.keys.identity", "sandbox.lifecycle.probe_run", "sandbox.kernel.net.conntrack", "sandbox.kernel.net.nft",
    "sandbox.storage.package_reader",
    "sandbox.kernel.seccomp.load", "sandbox.host.runsc_probe", "sandbox.serve.api.client", "sandbox.serve.main",
    "sandbox.supervisor", "sandbox.runner.trusted_local", "shutil", "covenant.cli.operator.vault",
    "covenant.cli.operator.vault_log",
    "sandbox.vault.secret_input", "tests.crash.clients", "tests.crash.steps", "tests.crash.vault_work",
)  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """The work of a subject, by ``work``.

    - ``run``: run the package.
    - ``serve``: serve until a client's run of the package has ended.
    - ``standby``: serve until instances of the package have answered a client.
    - ``vault``: write the vault from its ``first`` command on.
    - ``recover`` or ``start``: recover or start only; neither runs an agent.

    It works in the network namespace at ``network`` unless that is empty. The server gives it up after ``deadline``
    seconds; ``kill_after`` kills it from outside. ``ballast`` is the file that fills the disk; it is removed before a
    start that only recovers.
    """

    work: str
    state: str
    home: str
    issuer: Mapping[str, str]
    package: str = ""
    network: str = ""
    user: str | None = None
    target: tuple[int, int, str] | None = None
    kill_after: float | None = None
    ballast: str = ""
    deadline: float = 300.0
    first: int = 0


@dataclass(frozen=True)
class Outcome:
    """The outcome of a subject.

    ``status`` is its exit status or minus a signal, None when it hung and was killed. ``rows`` are the audit rows that
    were acknowledged to it: the id, the kind, the process that wrote it, and its first and last step there. ``error``
    is the code of the error that ended it. ``done`` is what the subject reported.
    """

    status: int | None
    fired: bool
    counts: list[int]
    rows: list[tuple[str, str, int, int, int]] = field(default_factory=list)
    error: str = ""
    detail: str = ""
    seconds: float = 0.0
    done: list[dict[str, Any]] = field(default_factory=list)


class Server:
    """A server process, seen from its client. Use as a context manager.

    ``prefix`` is put before the command that starts it, for example to give it a mount namespace.
    """

    def __init__(self, prefix: Sequence[str] = ()) -> None:
        self._prefix = prefix

    def __enter__(self) -> Server:
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
        self._process = subprocess.Popen(
            [*self._prefix, sys.executable, "-m", "tests.crash.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            cwd=ROOT,
        )
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        assert self._process.stdout is not None
        self._process.stdout.close()

    @property
    def root(self) -> str:
        """The file system as the server sees it."""
        return f"/proc/{self._process.pid}/root"

    @property
    def mounts(self) -> str:
        """Its mount namespace."""
        return f"/proc/{self._process.pid}/ns/mnt"

    def subject(self, subject: Subject) -> Outcome:
        """Let a subject run to its end."""
        raw = self._ask({"op": "subject", **vars(subject)})
        return Outcome(**{**raw, "rows": [tuple(row) for row in raw["rows"]]})

    def settle(self, seconds: float = 10.0) -> list[str]:
        """Kill all subjects that still live, and return their command lines."""
        alive: list[str] = self._ask({"op": "settle", "seconds": seconds})["alive"]
        return alive

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the server of the subjects ended"
        answer: dict[str, Any] = json.loads(line)
        return answer


# --- in the server ------------------------------------------------------------------------------------------


def main() -> None:
    """Serve until stdin ends."""
    from sandbox.kernel import libc

    libc.prctl(libc.PR_SET_CHILD_SUBREAPER, 1)
    _warm()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory(prefix="crash-told-") as folder:
        for line in sys.stdin:
            request = json.loads(line)
            op = request.pop("op")
            answer = _subject(Subject(**request), folder) if op == "subject" else {"alive": _settle(request["seconds"])}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    _settle(0)


def _warm() -> None:
    """Import what a run imports, once for all subjects."""
    for name in _PARTS:
        importlib.import_module(name)

    gc.freeze()


def _subject(subject: Subject, folder: str) -> dict[str, Any]:
    from tests.crash.steps import Counter, Target, Trigger

    counter = Counter()
    began = time.monotonic()
    # It stays: a keeper that goes on without its supervisor has more to tell.
    fd, told = tempfile.mkstemp(dir=folder)
    os.close(fd)
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            target = None if subject.target is None else Target(*subject.target)
            _work(subject, Trigger(counter, target, subject.ballast), counter, told)
            status = 0
        except BaseException as e:
            _tell_error(told, e)
            status = 1
        finally:
            os._exit(status)
    ended = _await(pid, began, subject)
    if subject.work == "standby":
        _hear(told)
    lines = [json.loads(line) for line in Path(told).read_bytes().splitlines() if line.endswith((b"}", b"]"))]
    said = [one for one in lines if isinstance(one, dict)]
    ends = [one for one in said if "error" in one]
    return {
        "status": ended,
        "fired": counter.fired,
        "counts": counter.counts(),
        "rows": [one for one in lines if isinstance(one, list)],
        "error": ends[-1]["error"] if ends else "",
        "detail": ends[-1]["detail"] if ends else "",
        "seconds": time.monotonic() - began,
        "done": [one for one in said if "error" not in one and "over" not in one],
    }


def _hear(told: str) -> None:
    """Wait until the client reports that it is over.

    It outlives the subject, and the kernel tells it of the subject's end.
    """
    until = time.monotonic() + _OVER_SECONDS
    while b'{"over": true}\n' not in Path(told).read_bytes() and time.monotonic() < until:
        time.sleep(0.005)


def _tell_error(told: str, error: BaseException) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    found = errors.exhausted(error) or error
    code = getattr(found, "code", type(error).__name__)
    detail = "".join(traceback.format_exception(error))[-3000:]
    with contextlib.suppress(BaseException):
        _tell(told, json.dumps({"error": code, "detail": detail}))


def _say(told: str, document: Mapping[str, Any]) -> None:
    _tell(told, json.dumps(document))


def _tell(told: str, *lines: str, calls: tuple[Any, ...] = (os.open, os.write, os.close)) -> None:
    """Before anything is counted: the calls are those of the module as it was imported. By name, not by descriptor: a
    keeper closes those that it does not know."""
    fd = calls[0](told, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    calls[1](fd, "".join(f"{line}\n" for line in lines).encode())
    calls[2](fd)


def _await(pid: int, began: float, subject: Subject) -> int | None:
    """The subject's exit status."""
    pidfd = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    try:
        if subject.kill_after is not None and not poll.poll(subject.kill_after * 1000):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        hung = not poll.poll(max(0.0, began + subject.deadline - time.monotonic()) * 1000)
        if hung:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        _, raw = os.waitpid(pid, 0)
        return None if hung else os.waitstatus_to_exitcode(raw)
    finally:
        os.close(pidfd)


def _work(subject: Subject, trigger: Any, counter: Any, told: str) -> None:
    """In the subject."""
    from sandbox.audit.log import Ledger, Record
    from sandbox.kernel import libc
    from sandbox.serve import main as service
    from sandbox.storage import package_reader
    from sandbox.supervisor import Request, Supervisor
    from tests.crash import clients, vault_work

    libc.prctl(libc.PR_SET_CHILD_SUBREAPER, 0)
    if subject.work == "recover" and subject.ballast:
        Path(subject.ballast).unlink(missing_ok=True)
    if subject.network:
        fd = os.open(subject.network, os.O_RDONLY)
        libc.setns(fd, libc.CLONE_NEWNET)
        os.close(fd)
    append = Ledger.append_all

    @functools.wraps(append)
    def acknowledged(log: Ledger, records: Sequence[Record], **how: Any) -> list[str]:
        slot = trigger.slot
        first = counter.get(slot) + 1
        names = append(log, records, **how)
        rows = [
            [name, record.kind, slot, first, counter.get(slot)] for name, record in zip(names, records, strict=True)
        ]
        _tell(told, *map(json.dumps, rows))
        return names

    setattr(Ledger, "append_all", acknowledged)  # noqa: B010
    if subject.work == "vault":
        vault_work.do(subject.home, subject.first, trigger.install, functools.partial(_say, told))
        return
    if subject.work in ("serve", "standby"):
        clients.fork(subject, functools.partial(_say, told), functools.partial(_tell_error, told))
        trigger.install()
        service.serve(Path(subject.state))
        return
    trigger.install()
    with Supervisor(Path(subject.state), never_granted=(subject.home,)) as supervisor:
        if subject.work == "run":
            with package_reader.beside(Path(subject.package)) as children:
                request = Request(
                    package_reader.read(Path(subject.package)),
                    "hi",
                    subject.issuer,
                    user=subject.user,
                    package_name=subject.package,
                    children=children,
                )
                answer = supervisor.run(request)
            if answer.error is not None:
                raise answer.error


def _settle(seconds: float) -> list[str]:
    """Reap every child; what lives longer than it should is told and killed."""
    until = time.monotonic() + seconds
    while _reap() and time.monotonic() < until:
        time.sleep(0.002)
    alive = []
    for pid in _children():
        with contextlib.suppress(OSError):
            alive.append(f"{pid}: " + Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    while _reap():
        time.sleep(0.002)
    return alive


def _reap() -> bool:
    """Whether there are children that have not ended."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return True
    return False


def _children() -> Iterator[int]:
    yield from map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_bytes().split())


if __name__ == "__main__":
    main()
