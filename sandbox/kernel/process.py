"""Start a child in a mount namespace and cgroup of its own, with three pipes, and learn exactly what failed.

The child is forked, not spawned, because it must join cgroups and attach mounts before it executes; it runs no
code of the caller's between, and reports a failed step over a pipe that closes at execve.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from policy import errors
from sandbox.kernel import libc, signals


@dataclass(frozen=True, slots=True)
class Attach:
    """Move the detached mount ``fd`` to ``target`` in the child's namespace."""

    fd: int
    target: str

    def describe(self) -> str:
        """The operation in words."""
        return f"attach a detached mount at {self.target}"


@dataclass(frozen=True, slots=True)
class Launch:
    """Everything that the child does before execve, in order: cgroups, session, network, mounts, ``prepare``, stdio.

    ``join_files`` are joined first, so that no later step is outside the limits. ``network`` is a descriptor of the
    network namespace that it enters, None for the caller's own; ``covered`` are directories that it sees empty.
    ``prepare`` is for what a backend adds (identity, filter); it must not return with rights that the program may not
    have. ``keep`` are descriptors above 2 that the program is given by their numbers here.
    """

    program: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    join_files: Sequence[str] = ()
    mounts: Sequence[Attach] = ()
    network: int | None = None
    covered: Sequence[str] = ()
    prepare: Callable[[], None] | None = None
    directory: str = "/"
    keep: Sequence[int] = ()


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

    def __exit__(self, *exc: object) -> None:
        if self.status is None:
            self.signal(signal.SIGKILL)
            self.reap()
        if not self._closed:
            self._closed = True
            for fd in (self.stdin, self.stdout, self.stderr, self.pidfd):
                os.close(fd)

    def signal(self, number: int) -> None:
        """Send a signal through the pidfd: never to a reused pid."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def reap(self) -> int:
        """The exit status: 0 to 255, or 128 + signal. Blocks until the child has exited."""
        if self.status is None:
            _, raw = os.waitpid(self.pid, 0)
            code = os.waitstatus_to_exitcode(raw)
            self.status = code if code >= 0 else 128 - code
        return self.status


def spawn(launch: Launch) -> Child:
    """Fork and execute ``launch``.

    Raises:
        errors.KernelError: a step in the child failed; its name and errno are in the message. Nothing runs.
    """
    # A signal between fork and _child would run the caller's handlers in the child, and what those raise would
    # unwind the caller's clean-up there: a second hand on the same run.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    with contextlib.ExitStack() as stack:
        try:
            child, report_fd = _fork(launch)
            stack.enter_context(child)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        with os.fdopen(report_fd, "rb") as report:
            failure = report.read()
        if failure:
            child.reap()
            step, message = json.loads(failure)
            raise errors.KernelError(f"cannot start the sandbox: {step}: {message}")
        stack.pop_all()
    return child


def _fork(launch: Launch) -> tuple[Child, int]:
    """The child, and where it reports a failed step."""
    parent = os.getpid()
    with contextlib.ExitStack() as undo:
        try:
            (in_r, in_w), (out_r, out_w), (err_r, err_w), (report_r, report_w) = (_pipe(undo) for _ in range(4))
            pid = os.fork()
            if pid == 0:
                _child(launch, (in_r, out_w, err_w), report_w, parent)
            child = Child(pid, _pidfd(pid), in_w, out_r, err_r)
        except OSError as e:
            raise errors.KernelError(f"fork: {e.strerror}") from e
        undo.pop_all()
    for fd in (in_r, out_w, err_w, report_w):
        os.close(fd)
    return child, report_r


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
        step = "attach the mounts"
        if launch.mounts or launch.covered:
            libc.private_mounts()
            # After the line above: what /proc/sys/net shows is of the namespace of whoever looks.
            for place in launch.covered:
                libc.mount("none", place, "tmpfs", libc.MS_RDONLY | libc.MS_NOSUID | libc.MS_NODEV | libc.MS_NOEXEC)
            for mount in launch.mounts:
                libc.move_mount(mount.fd, mount.target)
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
        step = f"execute {launch.program}"
        os.execve(launch.program, list(launch.arguments), dict(launch.environment))  # noqa: S606 - no shell is wanted
    except BaseException as e:  # nothing may escape into the parent's code
        message = e.strerror if isinstance(e, OSError) and e.strerror else str(e)
        with contextlib.suppress(BaseException):
            os.write(report, json.dumps([step, message]).encode())
    finally:
        os._exit(127)
