"""The main loop's limit on shims that wait for a file system: SIGKILL, an answer to the client, and the name of each
that SIGKILL does not end.

A shim announces each access to files of its client's, or of the operator's, before it makes it (kernel.hanging).
When such an access has outlived its time, a process forked for that purpose takes the client's socket from the shim,
kills the shim through its pidfd, and answers in its place (``_end``). A shim that dies is then handled as any that
was killed. One that does not die holds nothing that others wait for: its client's place is given back, and the agents
of its runs are killed. It is reported on stderr, and counts against its client until it has ended.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import socket
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from policy import errors
from sandbox import unix_wire
from sandbox.kernel.cgroup import cgroup
from sandbox.kernel.fs import hanging
from sandbox.kernel.fs.hanging import Page
from sandbox.rundir import directory, lock
from sandbox.serve import systemd
from sandbox.serve.api import rlimits
from sandbox.shim import process
from sandbox.shim.process import Shim

# A shim's own clock comes first (rlimits.seconds): it says more, and leaves nothing behind.
GRACE_SECONDS: Final = 1.0
# How long a killed shim may take to die before it is reported.
DEATH_SECONDS: Final = 1.0
# How long a stop lets a shim that cleans up go on. The next start does the rest.
CLEAN_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = 1.0
_STEP_SECONDS: Final = 0.2
_ANSWER_SECONDS: Final = 2.0
HINT: Final = (
    "end the file system's server, or abort its connection: 1 into /sys/fs/fuse/connections/N/abort;"
    " `sysctl fs.fuse.max_request_timeout` has the kernel do so"
)


class OverdueLoop(Protocol):
    """The part of the main loop that is used here."""

    def fork(self, work: Callable[[], None], keep: tuple[int, ...], ended: Callable[[int], None]) -> None:
        """Fork a shim; ``ended`` is called with its exit status."""

    def give_up(self, pidfd: int) -> None:
        """Act as if this shim had been killed; its real end counts for nothing but its descriptor."""


def fork(work: Callable[[], object], keep: Collection[int], seconds: float) -> tuple[Shim, Page]:
    """Fork a shim, and the page on which it announces its accesses, each of at most so long.

    Raises:
        errors.KernelError: as ``process.fork``.
    """
    page = Page()
    try:
        return process.fork(functools.partial(_announced, page, seconds, work), keep=keep), page
    except errors.CovenantError:
        page.close()
        raise


def _announced(page: Page, seconds: float, work: Callable[[], object]) -> None:
    hanging.announce_on(page, seconds)
    work()


@dataclass
class _Watched:
    child: Shim
    page: Page
    ending: bool = False
    hangs: bool = False
    cleans: bool = False
    uid: int = 0


@dataclass
class Overdue:
    """Every shim of the main loop, by its pidfd. ``state`` is COVENANT_STATE."""

    state: Path
    loop: OverdueLoop
    _watched: dict[int, _Watched] = field(default_factory=dict)
    _look_at: float = 0.0

    def add(self, child: Shim, page: Page) -> None:
        """A shim was forked, and announces on ``page``."""
        self._watched[child.pidfd] = _Watched(child, page)

    def lets_finish(self, pidfd: int) -> None:
        """Let this shim, which takes away what a killed one left, go on for ``CLEAN_SECONDS`` of a stop."""
        self._watched[pidfd].cleans = True

    def remove(self, pidfd: int) -> None:
        """It has ended."""
        one = self._watched.pop(pidfd)
        one.page.close()
        if one.hangs:
            systemd.tell(f"process {one.child.pid}, which hung, has ended")

    def hangs(self, pidfd: int) -> bool:
        """Whether it was reported as one that SIGKILL does not end."""
        return self._watched[pidfd].hangs

    def of(self, uid: int) -> int:
        """How many of a client's hang."""
        return sum(one.hangs and one.uid == uid for one in self._watched.values())

    def due(self) -> float:
        """When to call ``tick`` (time.monotonic)."""
        return self._look_at

    def tick(self, now: float, *, at_once: bool = False) -> None:
        """End each shim whose access is overdue; with ``at_once`` each that makes one."""
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_SECONDS
        for one in list(self._watched.values()):
            until, what = one.page.read()
            if until and not one.ending and (at_once or now >= until + GRACE_SECONDS):
                self._end(one, what)

    def end_all(self, exited: Callable[[int], None], seconds: float) -> None:
        """Ask each shim to end, and wait until it has cleaned up: at most so long, and ``DEATH_SECONDS`` after that.

        A shim that takes away what a killed one left is asked only after ``CLEAN_SECONDS``. A shim that makes an access
        is ended at once, one that hangs is not waited for. ``exited`` is called with the pidfd of each that has ended.
        """
        begin = time.monotonic()
        for one in self._watched.values():
            if not one.hangs and not one.cleans:
                one.child.signal(signal.SIGTERM)
        while waited := self._unended(exited):
            now = time.monotonic()
            if now >= begin + seconds:
                break
            for one in waited if now >= begin + CLEAN_SECONDS else ():
                if one.cleans:
                    one.cleans = False
                    one.child.signal(signal.SIGTERM)
            systemd.alive()
            self.tick(now, at_once=now >= begin + GRACE_SECONDS)
            process.wait(waited[0].child.pidfd, _STEP_SECONDS)
        for one in self._unended(exited):
            one.child.signal(signal.SIGKILL)
        until = time.monotonic() + DEATH_SECONDS
        for one in self._watched.values():
            if not process.wait(one.child.pidfd, max(0.0, until - time.monotonic())):
                self.report(one.child)

    def _unended(self, exited: Callable[[int], None]) -> list[_Watched]:
        for pidfd in [pidfd for pidfd in self._watched if process.wait(pidfd, 0)]:
            exited(pidfd)
        return [one for one in self._watched.values() if not one.hangs]

    def report(self, child: Shim) -> None:
        """Say on stderr that SIGKILL did not end it, and where it waits."""
        _, what = self._watched[child.pidfd].page.read()
        what = f"{what} does not answer" if what else "it waits"
        systemd.tell(f"process {child.pid} survives SIGKILL: {what} ({hanging.place(child.pid)}); {HINT}")

    def _end(self, one: _Watched, what: str) -> None:
        one.uid, inode = one.page.client()
        work = functools.partial(_end, self.state, one.child, one.uid, inode, what)
        # Without a process or a descriptor for it, the next look tries again.
        with contextlib.suppress(errors.KernelError):
            self.loop.fork(work, (2, one.child.pidfd), functools.partial(self._ended, one))
            one.ending = True

    def _ended(self, one: _Watched, status: int) -> None:
        pidfd = one.child.pidfd
        if self._watched.get(pidfd) is not one:
            return
        if status:
            one.ending = False  # that process failed: the next look tries again
        elif not process.wait(pidfd, 0):
            one.hangs = True
            self.report(one.child)
            self.loop.give_up(pidfd)


def _end(state: Path, child: Shim, uid: int, inode: int, what: str) -> None:
    """In a process of its own: kill the shim, and do what others wait for in its place."""
    # Before the signal: a process that has begun to exit gives no descriptor away.
    taken = hanging.take_socket(child.pid, child.pidfd, inode) if inode else None
    where = hanging.place(child.pid)
    child.signal(signal.SIGKILL)
    try:
        if not process.wait(child.pidfd, DEATH_SECONDS):
            rlimits.forget_turn(state, uid)
            _kill_runs(state / "runs", child.pid)
    finally:
        # After all that the client's next request needs.
        if taken is not None:
            with socket.socket(fileno=taken) as sock:
                _answer(sock, f"{what} does not answer ({where})")


def _answer(sock: socket.socket, message: str) -> None:
    frame = unix_wire.encode(errors.HangingError(message, hint=HINT).to_json())
    with contextlib.suppress(OSError):  # the client is gone, or has its answer already
        unix_wire.send(sock, frame, until=time.monotonic() + _ANSWER_SECONDS)
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _kill_runs(runs: Path, pid: int) -> None:
    """Kill what runs of a shim that cannot: its directory is locked until it ends, so recovery leaves them."""
    with contextlib.suppress(FileNotFoundError):
        for path in runs.iterdir():
            if path.is_dir() and lock.owner_of(path) == pid:
                leaf = cgroup.Leaf(cgroup.Hierarchies.read(), path.name)
                leaf.adopt(directory.cgroups_of(path))
                leaf.kill()
