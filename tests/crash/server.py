"""The process that the subjects are forked from: one thread, everything imported, and every orphan comes back to it.

Speaks JSON lines over stdin and stdout. It is a child subreaper, so that whatever a killed subject leaves alive becomes
its child: ``settle`` says what did not end by itself.
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
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from policy import errors

ROOT = Path(__file__).resolve().parents[2]
# What a run imports, here once for all subjects.
_PARTS = (
    "covenant.identity", "sandbox.canary_run", "sandbox.kernel.conntrack", "sandbox.kernel.nft", "sandbox.package",
    "sandbox.kernel.seccomp_loader", "sandbox.runsc_probe", "sandbox.supervisor", "sandbox.trusted_local", "shutil",
    "tests.crash.steps",
)  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """What a subject does: ``run`` the package, or only ``recover`` or ``start`` (which run nothing), in the network
    namespace at ``network`` unless that is empty. It is given up after ``deadline`` seconds; ``kill_after`` kills it
    from outside. ``ballast`` is the file that fills the disk, and is taken away before a start that only recovers."""

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
    deadline: float = 60.0


@dataclass(frozen=True)
class Outcome:
    """What became of a subject. ``status`` is its exit status or minus a signal, None when it hung and was killed;
    ``rows`` the ids of the audit rows that were acknowledged to it, each with its kind and its first and last step;
    ``error`` the code of what it ended with."""

    status: int | None
    fired: bool
    counts: list[int]
    rows: list[tuple[str, str, int, int]] = field(default_factory=list)
    error: str = ""
    detail: str = ""
    seconds: float = 0.0


class Server:
    """A server process, from the side of whoever asks it. Use as a context manager.

    ``prefix`` is the command that starts it, in place of nothing: for one in a mount namespace of its own.
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
        """What still lives of all that was ever started, by its command line; it is killed."""
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
    for line in sys.stdin:
        request = json.loads(line)
        op = request.pop("op")
        answer = _subject(Subject(**request)) if op == "subject" else {"alive": _settle(request["seconds"])}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    _settle(0)


def _warm() -> None:
    """Import what a run imports, once for all subjects."""
    for name in _PARTS:
        importlib.import_module(name)

    gc.freeze()


def _subject(subject: Subject) -> dict[str, Any]:
    from tests.crash.steps import Counter, Target, Trigger

    counter = Counter()
    began = time.monotonic()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            os.close(read)
            target = None if subject.target is None else Target(*subject.target)
            _work(subject, Trigger(counter, target, subject.ballast), counter, write)
            status = 0
        except BaseException as e:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            found = errors.exhausted(e) or e
            told = {"error": getattr(found, "code", type(e).__name__), "detail": traceback.format_exc()[-3000:]}
            with contextlib.suppress(BaseException):
                os.write(write, json.dumps(told).encode() + b"\n")
            status = 1
        finally:
            os._exit(status)
    os.close(write)
    ended, raw = _await(pid, read, began, subject)
    os.close(read)
    lines = [json.loads(line) for line in raw.splitlines() if line.endswith((b"}", b"]"))]
    ends = [one for one in lines if isinstance(one, dict)]
    return {
        "status": ended,
        "fired": counter.fired,
        "counts": counter.counts(),
        "rows": [one for one in lines if isinstance(one, list)],
        "error": ends[-1]["error"] if ends else "",
        "detail": ends[-1]["detail"] if ends else "",
        "seconds": time.monotonic() - began,
    }


def _await(pid: int, read: int, began: float, subject: Subject) -> tuple[int | None, bytes]:
    """The subject's exit status, and what it told."""
    told = b""
    pidfd = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.register(read, select.POLLIN)
    killed = False
    os.set_blocking(read, False)
    try:
        while True:
            limit = subject.deadline
            if subject.kill_after is not None and not killed:
                limit = min(limit, subject.kill_after)
            ready = dict(poll.poll(max(0.0, began + limit - time.monotonic()) * 1000))
            if read in ready:
                data = _drained(read)
                told += data
                if not data:
                    poll.unregister(read)
            if pidfd in ready:
                _, raw = os.waitpid(pid, 0)
                return os.waitstatus_to_exitcode(raw), told + _drained(read)
            if not ready and (killed or subject.kill_after is None or limit == subject.deadline):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                os.waitpid(pid, 0)
                return None, told
            if not ready:
                killed = True
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    finally:
        os.close(pidfd)


def _drained(fd: int) -> bytes:
    data = b""
    with contextlib.suppress(BlockingIOError):
        while piece := os.read(fd, 65536):
            data += piece
    return data


def _work(subject: Subject, trigger: Any, counter: Any, told: int) -> None:
    """In the subject."""
    from sandbox import package
    from sandbox.kernel import libc
    from sandbox.ledger import Ledger, Record
    from sandbox.supervisor import Request, Supervisor

    libc.prctl(libc.PR_SET_CHILD_SUBREAPER, 0)
    if subject.work == "recover" and subject.ballast:
        Path(subject.ballast).unlink(missing_ok=True)
    if subject.network:
        fd = os.open(subject.network, os.O_RDONLY)
        libc.setns(fd, libc.CLONE_NEWNET)
        os.close(fd)
    say, append = os.write, Ledger.append_all

    @functools.wraps(append)
    def acknowledged(log: Ledger, records: Sequence[Record], *, issuer: Mapping[str, str]) -> list[str]:
        first = counter.get(0) + 1
        names = append(log, records, issuer=issuer)
        rows = [[name, record.kind, first, counter.get(0)] for name, record in zip(names, records, strict=True)]
        say(told, b"".join(json.dumps(row).encode() + b"\n" for row in rows))
        return names

    setattr(Ledger, "append_all", acknowledged)  # noqa: B010
    trigger.install()
    with Supervisor(Path(subject.state), never_granted=(subject.home,)) as supervisor:
        if subject.work == "run":
            request = Request(
                package.read(Path(subject.package)),
                "hi",
                subject.issuer,
                user=subject.user,
                package_name=subject.package,
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
