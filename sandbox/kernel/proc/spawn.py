"""Start a child in its own mount namespace and cgroup, with three pipes, and report exactly which step failed.

The child must join cgroups and attach mounts before its execve. ``covenant-start`` does that if it is built
(``launcher``). A child with a ``prepare``, which is Python, is forked. Neither runs other code of the caller, and both
report a failed step over a pipe that closes at execve.
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

import msgspec
from msgspec import Struct

from policy import errors
from sandbox import core_dumps
from sandbox.kernel import libc
from sandbox.kernel.proc import launcher, signals
from sandbox.kernel.proc.launch import Launch

# The interval of ``Patience.look``, and the time that a killed child may take to die (seconds).
_LOOK_SECONDS, DEATH_SECONDS = 0.25, 10.0
_REPORT_BYTES = 65536


class Patience(Struct, frozen=True):
    """Limits of the wait for a child's execve.

    The child may hang before: in a frozen cgroup, or in a file system that does not answer. ``watches`` maps
    descriptors to functions that are called when they are readable; ``look`` is called at intervals. An error that
    either returns ends the wait. ``kill`` kills a child in a frozen cgroup, which dies of no signal before the thaw.
    """

    seconds: float = 60.0
    watches: Mapping[int, Callable[[], errors.RunError | None]] = msgspec.field(default_factory=dict)
    look: Callable[[], errors.RunError | None] = lambda: None
    kill: Callable[[], None] = lambda: None

    def readable(self, *fds: int, until: float) -> list[int]:
        """Wait until one of these is readable, and return those that are; none at ``until`` (monotonic).

        Raises:
            errors.RunError: Raised when a watch or ``look`` returns it.
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
    """A started child. As a context manager it is killed and reaped at the end, and its descriptors are closed."""

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
            # A process in a file system that does not answer never dies; do not wait for it without limit.
            if dead := _readable(self.pidfd, DEATH_SECONDS):
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
        """Send a signal through the pidfd, so never to a reused pid."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def has_ended(self) -> bool:
        """Whether the child has exited, reaped or not."""
        return self.status is not None or _readable(self.pidfd, 0)

    def reap(self) -> int:
        """Return the exit status: 0 to 255, or 128 + signal. Blocks until the child has exited."""
        if self.status is None:
            _, raw = os.waitpid(self.pid, 0)
            code = os.waitstatus_to_exitcode(raw)
            self.status = code if code >= 0 else 128 - code
        return self.status


def spawn(launch: Launch, patience: Patience = PATIENCE) -> Child:
    """Start a child and have it execute ``launch``.

    Neither this process nor the child dumps core from now on. After an error no child runs.

    Raises:
        errors.KernelError: Raised when a step in the child fails; the message has its name and errno.
        errors.StartTimeoutError: Raised when the child does not reach execve in time.
        errors.RunError: Raised when a watch of ``patience`` returns it.
    """
    # A signal between fork and _child would run the caller's handlers in the child. Their exceptions would unwind the
    # caller's clean-up there, so that two processes clean up the same run.
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
    """Wait for the child's report of a failed step. Empty once it executes, or if it died without a report."""
    until, said = time.monotonic() + patience.seconds, b""
    while ready := patience.readable(report, child.pidfd, until=until):
        # Check the report of a dead child again: it may have written after poll checked the pipe and died before poll
        # checked the pidfd. An empty pipe has no end of file then: another fork meanwhile may hold its other end.
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
    """Describe where in the kernel a process waits; empty if that cannot be read (proc_pid_wchan(5))."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/wchan", encoding="ascii") as file:
        if (place := file.read().strip()) not in ("", "0"):
            return f", it stands in the kernel's `{place}`"
    return ""


def _begin(launch: Launch, steps: launcher.Steps | None) -> tuple[Child, int]:
    """Start the child. Returns it with the descriptor on which it reports a failed step."""
    with contextlib.ExitStack() as undo:
        try:
            (in_r, in_w), (out_r, out_w), (err_r, err_w), (report_r, report_w) = (_pipe(undo) for _ in range(4))
            stdio = (in_r, out_w, err_w)
            pid = _fork(launch, stdio, report_w) if steps is None else launcher.start(launch, steps, stdio, report_w)
            child = Child(pid, _pidfd(pid), in_w, out_r, err_r)
        except OSError as e:
            raise errors.KernelError(f"cannot start a process: {e.strerror}") from e
        except ValueError as e:  # an argument with a NUL; a fork would find it at its execve
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
        # It is our own child and not reaped yet, so its pid is not reused.
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def _child(launch: Launch, stdio: tuple[int, int, int], report: int, parent: int) -> None:
    """Prepare and execute in the child; never returns. Only descriptors 0 to 2 and ``keep`` survive the execve."""
    step = "reset signals"
    try:
        # Signals that the caller ignores would stay ignored across execve.
        signals.reset()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        step = "join the cgroup"
        for file in launch.join_files:
            fd = os.open(file, os.O_WRONLY)
            os.write(fd, b"0")
            os.close(fd)
        step = "leave the session"
        os.setsid()
        # INVARIANT: the parent's death kills the run. The kernel sends the signal when the parent's thread ends.
        libc.set_parent_death_signal(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(127)  # the parent died before the line above, which then applies to another process
        os.umask(0o077)
        step = "enter the network namespace"
        if launch.network is not None:
            libc.setns(launch.network, libc.CLONE_NEWNET)
        elif launch.own_network:
            libc.unshare(libc.CLONE_NEWNET)
        step = "attach the mounts"
        # After the network namespace: /proc/sys/net shows the namespace of the reading process.
        _attach(launch)
        step = "connect stdio"
        os.chdir(launch.directory)
        for target, fd in enumerate(stdio):
            os.dup2(fd, target, inheritable=True)
        # Code elsewhere may have forgotten close-on-exec; no other descriptor may reach the sandbox.
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
    except BaseException as e:  # no exception may reach the parent's code
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
