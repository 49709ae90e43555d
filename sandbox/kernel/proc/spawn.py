"""Start a child in a mount namespace and cgroup of its own, with three pipes, and learn exactly what failed.

The child must join cgroups and attach mounts before it executes. ``kernel.starter`` does that where it is built; one
with a ``prepare``, which is Python, is forked. Neither runs any other code of the caller's, and both report a failed
step over a pipe that closes at execve.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from policy import errors
from sandbox import core_dumps
from sandbox.kernel import libc
from sandbox.kernel.proc import launcher, signals
from sandbox.kernel.proc.launch import Launch

# How often ``Patience.look`` is asked, and how long whoever was killed may take to die (seconds).
_LOOK_SECONDS, _DEATH_SECONDS = 0.25, 10.0
_REPORT_BYTES = 65536


@dataclass(frozen=True, slots=True)
class Patience:
    """How long whoever starts a child waits until it executes, and what ends that wait before.

    The child may stand on its way there: in a cgroup that somebody stopped, in a file system that does not answer.
    ``watches`` are descriptors, each with what to do when it is readable, ``look`` is asked by the clock; an error of
    either ends the wait with it. ``kill`` ends a child that dies of no signal before its cgroup is thawed.
    """

    seconds: float = 60.0
    watches: Mapping[int, Callable[[], errors.RunError | None]] = field(default_factory=dict)
    look: Callable[[], errors.RunError | None] = lambda: None
    kill: Callable[[], None] = lambda: None

    def readable(self, *fds: int, until: float) -> list[int]:
        """Which of these are readable, as soon as one is; none at that time (monotonic).

        Raises:
            errors.RunError: what is watched, or asked by the clock, said so.
        """
        poll = select.poll()
        for fd in (*fds, *self.watches):
            poll.register(fd, select.POLLIN)
        while True:
            left = max(0.0, until - time.monotonic())
            ready = [fd for fd, _ in poll.poll(min(left, _LOOK_SECONDS) * 1000)]
            if awaited := [fd for fd in ready if fd in fds]:
                return awaited
            for look in (*(self.watches[fd] for fd in ready), self.look):
                if (end := look()) is not None:
                    raise end
            if not left:
                return []


PATIENCE = Patience()


@dataclass
class Child:
    """A started child. Use as a context manager: leaving kills and reaps it and closes its descriptors."""

    pid: int
    pidfd: int
    stdin: int
    stdout: int
    stderr: int
    status: int | None = None
    _closed: bool = field(default=False, repr=False)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        dead = True
        if self.status is None:
            self.signal(signal.SIGKILL)
            # A file system that does not answer lets go of nobody, and who waits for that waits for good.
            if dead := _readable(self.pidfd, _DEATH_SECONDS):
                self.reap()
        if not self._closed:
            self._closed = True
            for fd in (self.stdin, self.stdout, self.stderr, self.pidfd):
                os.close(fd)
        if not dead:
            survives = f"process {self.pid} survives SIGKILL{_standing(self.pid)}"
            if error is None:
                raise errors.KernelError(survives)
            errors.also(error, survives)

    def signal(self, number: int) -> None:
        """Send a signal through the pidfd: never to a reused pid."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def has_ended(self) -> bool:
        """Whether it has exited, reaped or not."""
        return self.status is not None or _readable(self.pidfd, 0)

    def reap(self) -> int:
        """The exit status: 0 to 255, or 128 + signal. Blocks until the child has exited."""
        if self.status is None:
            _, raw = os.waitpid(self.pid, 0)
            code = os.waitstatus_to_exitcode(raw)
            self.status = code if code >= 0 else 128 - code
        return self.status


def spawn(launch: Launch, patience: Patience = PATIENCE) -> Child:
    """Start a child and have it execute ``launch``.

    Neither this process nor the child dumps core from now on.

    Raises:
        errors.KernelError: a step in the child failed; its name and errno are in the message. Nothing runs.
        errors.StartTimeoutError: it did not come to execve in time. Nothing runs.
        errors.RunError: what ``patience`` watches said so.
    """
    # A signal between fork and _child would run the caller's handlers in the child, and what those raise would
    # unwind the caller's clean-up there: a second hand on the same run.
    core_dumps.lower()
    steps = launcher.Steps(launch) if launch.prepare is None and launcher.there() else None
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    with contextlib.ExitStack() as stack:
        try:
            child, report_fd = _begin(launch, steps)
            stack.enter_context(child)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        stack.callback(os.close, report_fd)
        try:
            failure = _reported(child, report_fd, patience, launch.program)
        except BaseException as e:
            child.signal(signal.SIGKILL)
            try:
                patience.kill()
            except errors.CovenantError as survives:
                errors.also(e, survives.message)
            raise
        if failure:
            step, message = json.loads(failure)
            hint = ""
            if steps is not None:
                hint = launcher.MEND if step < 0 else ""
                step, message = steps.name(step), os.strerror(message)
            raise errors.KernelError(f"cannot start the sandbox: {step}: {message}", hint=hint)
        stack.pop_all()
    os.close(report_fd)
    return child


def _reported(child: Child, report: int, patience: Patience, program: str) -> bytes:
    """What the child says of a step that failed; empty once it executes, or has died without a word."""
    until, said = time.monotonic() + patience.seconds, b""
    while ready := patience.readable(report, child.pidfd, until=until):
        # Of a dead child as well: it may have spoken after poll had looked at its report, and died before it looked on.
        # Nothing there is no end of file then: whoever else was forked meanwhile may hold the other end.
        if report not in ready and not _readable(report, 0):
            return said
        if not (piece := os.read(report, _REPORT_BYTES)):
            return said
        said += piece
    raise errors.StartTimeoutError(
        f"`{program}` was not executed within {patience.seconds:g} s{_standing(child.pid)}",
        hint="thaw its cgroup if somebody stopped it; see whether a file system or the kernel hangs",
    )


def _readable(fd: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _standing(pid: int) -> str:
    """Where in the kernel a process waits, in words; nothing where that cannot be read (proc_pid_wchan(5))."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/wchan", encoding="ascii") as file:
        if (place := file.read().strip()) not in ("", "0"):
            return f", it stands in the kernel's `{place}`"
    return ""


def _begin(launch: Launch, steps: launcher.Steps | None) -> tuple[Child, int]:
    """The child, and where it reports a failed step."""
    with contextlib.ExitStack() as undo:
        try:
            (in_r, in_w), (out_r, out_w), (err_r, err_w), (report_r, report_w) = (_pipe(undo) for _ in range(4))
            stdio = (in_r, out_w, err_w)
            pid = _fork(launch, stdio, report_w) if steps is None else launcher.start(launch, steps, stdio, report_w)
            child = Child(pid, _pidfd(pid), in_w, out_r, err_r)
        except OSError as e:
            raise errors.KernelError(f"cannot start a process: {e.strerror}") from e
        except ValueError as e:  # a word with a NUL in it, which the fork below finds at its execve
            raise errors.KernelError(f"cannot start a process: {e}") from e
        undo.pop_all()
    for fd in (*stdio, report_w):
        os.close(fd)
    return child, report_r


def _fork(launch: Launch, stdio: tuple[int, int, int], report: int) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _child(launch, stdio, report, parent)
    return pid


def _pipe(undo: contextlib.ExitStack) -> tuple[int, int]:
    pair = os.pipe2(os.O_CLOEXEC)
    for fd in pair:
        undo.callback(os.close, fd)
    return pair


def _pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError:
        # Our own child, not waited for yet, so that the number is still its.
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def _child(launch: Launch, stdio: tuple[int, int, int], report: int, parent: int) -> None:
    """In the child: never returns. Only descriptors 0 to 2 and ``keep`` survive; the mounts are close-on-exec."""
    step = "reset signals"
    try:
        # What the caller ignored would be ignored across execve as well.
        signals.reset()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        step = "join the cgroup"
        for file in launch.join_files:
            fd = os.open(file, os.O_WRONLY)
            os.write(fd, b"0")
            os.close(fd)
        step = "leave the session"
        os.setsid()
        # INVARIANT: the supervisor's death ends the run; the kernel sends this when its thread ends.
        libc.set_parent_death_signal(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(127)  # it died before the line above, which then waits for another's death
        os.umask(0o077)
        step = "enter the network namespace"
        if launch.network is not None:
            libc.setns(launch.network, libc.CLONE_NEWNET)
        elif launch.own_network:
            libc.unshare(libc.CLONE_NEWNET)
        step = "attach the mounts"
        # After the lines above: what /proc/sys/net shows is of the namespace of whoever looks.
        _attach(launch)
        step = "connect stdio"
        os.chdir(launch.directory)
        for target, fd in enumerate(stdio):
            os.dup2(fd, target, inheritable=True)
        # Close-on-exec is a habit; a descriptor that somebody forgot must not become the sandbox's.
        libc.close_range(3, at_exec=True)
        for fd in launch.keep:
            os.set_inheritable(fd, True)
        step = "prepare"
        if launch.prepare is not None:
            launch.prepare()
        step = "load the filter"
        if launch.filter:
            libc.set_seccomp_filter(launch.filter)
        step = f"execute {launch.program}"
        os.execve(launch.program, list(launch.arguments), dict(launch.environment))  # noqa: S606 - no shell is wanted
    except BaseException as e:  # nothing may escape into the parent's code
        message = e.strerror if isinstance(e, OSError) and e.strerror else str(e)
        with contextlib.suppress(BaseException):
            os.write(report, json.dumps([step, message]).encode())
    finally:
        os._exit(127)


def _attach(launch: Launch) -> None:
    if launch.mounts or launch.covered:
        libc.private_mounts()
    for place in launch.covered:
        libc.mount("none", place, "tmpfs", libc.MS_RDONLY | libc.MS_NOSUID | libc.MS_NODEV | libc.MS_NOEXEC)
    for mount in launch.mounts:
        libc.move_mount(mount.fd, mount.target)
