"""Start a gate: a process of ours that reads the agent's packets, and that must therefore hold nothing of value.

A gate is a fresh interpreter, in an empty network namespace or a given one, with only the listed descriptors. After its
imports and before it reads from the agent it drops root, all capabilities, and every system call that serving does not
need (sandbox.kernel.proc.privdrop). It ends with the supervisor. If it ends before, the run ends; the network stays
closed, because nothing else answers.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import os
import platform
import resource
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from policy import denials, errors
from policy.compile import bpf, seccomp
from sandbox import core_dumps
from sandbox.kernel.proc import pipes, spawn
from sandbox.network.gate import main, prefork, uids
from sandbox.network.reached import TellReached
from sandbox.rate_limit import Tokens

# The calls of the interpreter itself after the imports, and of reads and writes on given descriptors.
CALLS = frozenset({
    "brk", "clock_gettime", "close", "epoll_ctl", "epoll_pwait", "epoll_wait", "exit", "exit_group", "fcntl", "futex",
    "getrandom", "madvise", "mmap", "mremap", "munmap", "poll", "ppoll", "read", "recvfrom", "recvmsg",
    "restart_syscall", "rt_sigreturn", "sendto", "write",
})  # fmt: skip
_MAKE_SOCKETS = frozenset({"connect", "socket"})
_INT = 0xFFFFFFFF
# The allowed arguments of calls that can do more than serving needs. fcntl: F_GETFL, F_SETFL and F_SETPIPE_SZ; with
# F_SETOWN a gate could send a signal to another of its uid. sendto: no flag but MSG_DONTWAIT and MSG_NOSIGNAL; with
# MSG_FASTOPEN a socket whose connection has failed or ended could make a new one, and gates are handed sockets of this
# host's namespace. sendmsg: the same. openat: for reading alone.
WHERE: Mapping[str, tuple[tuple[bpf.Masked, ...], ...]] = {
    "fcntl": tuple((bpf.Masked(1, _INT, command),) for command in (3, 4, 1031)),
    "sendto": ((bpf.Masked(3, _INT & ~(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL), 0),),),
    "sendmsg": ((bpf.Masked(2, _INT & ~(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL), 0),),),
    "openat": ((bpf.Masked(2, _INT & ~(os.O_CLOEXEC | os.O_LARGEFILE | os.O_NONBLOCK), os.O_RDONLY),),),
}
# lseek: by SEEK_CUR and no number below 0.
_FORWARDS = ((bpf.Masked(1, 1 << 63, 0), bpf.Masked(2, _INT, os.SEEK_CUR)),)
_STDERR_BYTES = 4096
# The time that a killed gate may take before its cgroup is thawed and killed.
_DEATH_SECONDS = 0.25
# The time that a gate may take to report what it still counts, before it is killed.
_LAST_SECONDS = 5.0
# The most of a gate's stderr that is read: it may be alive, and write without an end.
_READ_BYTES = 1 << 20
# The most reports read at once: the exchange with the agent continues in between.
_AT_ONCE = 64
# More than one report can count.
_MOST = 1 << 62


class Gate(Struct, frozen=True):
    """A gate to start: ``module`` has ``serve(main.GateInput)``; ``layer`` and ``codes`` are those of its denials.

    ``calls`` are system calls beyond ``CALLS``. ``namespace`` is a descriptor of its network namespace, None for an
    empty one of its own. ``join_files`` are files of the cgroup that accounts for it. ``patience`` limits the wait for
    its start: it watches for the end of the run, and can kill a frozen gate. With ``keeps_files`` it sees the host's
    files, as its uid may, and opens them for reading alone. With ``counts`` it moves the position of a file, forwards
    alone (sandbox.network.gate.credit_meter).
    """

    module: str
    layer: str
    codes: Collection[str]
    uid: int
    plan: Mapping[str, Any]
    fds: Mapping[str, int]
    calls: Collection[str] = ()
    namespace: int | None = None
    threads: bool = False
    keeps_files: bool = False
    counts: bool = False
    descriptors: int = 256
    memory_bytes: int = 512 << 20
    join_files: Sequence[str] = ()
    patience: spawn.Patience = spawn.PATIENCE

    def __post_init__(self) -> None:
        """Hold the calls to the uid.

        Raises:
            ValueError: a gate that is handed its sockets could make one.
        """
        if not _MAKE_SOCKETS.isdisjoint(self.calls) and self.uid not in uids.CONNECT:
            raise ValueError(f"the {self.layer} gate of uid {self.uid} makes no connections")

    @property
    def kind(self) -> prefork.Kind:
        """The kind of process to start for it."""
        return prefork.Kind(self.module, own_network=self.namespace is None)

    def describe(self) -> str:
        """Describe the operation."""
        return f"start the {self.layer} gate as uid {self.uid}"


class OpenGate(Struct, frozen=True):
    """A process of an open gate. ``watches`` belong into the run's exchange."""

    process: GateProcess
    watches: Mapping[int, Callable[[], errors.RunError | None]]


class GateProcess:
    """A started gate, made by ``start``. The caller still owns the descriptors in ``Gate.fds``, and may close them."""

    def __init__(self, gate: Gate, child: spawn.Child, reports: socket.socket) -> None:
        self._gate, self._child, self._reports = gate, child, reports
        self.pid, self.pidfd = child.pid, child.pidfd
        self._is_ready = self._is_asked = self._has_reported = False
        self._reached: TellReached | None = None
        self._rest: Callable[[], errors.RunError | None] | None = None
        # Twice the rate of an honest gate. The burst is more than the socket holds when no process reads for a while.
        self._tokens = Tokens(2 * main.PER_SECOND, 10 * main.BURST, time.monotonic())

    def ready(self, timeout_seconds: float | None = None) -> None:
        """Wait until the gate is sealed and serves, by default as long as its patience says.

        Its interpreter starts slowly when many runs begin at once.

        Raises:
            errors.KernelError: Raised when the gate ended, or is not ready in time.
            errors.RunError: Raised when a watch of its patience returns it.
        """
        if self._is_ready:
            return
        if timeout_seconds is None:
            timeout_seconds = self._gate.patience.seconds
        until = time.monotonic() + timeout_seconds
        if not self._gate.patience.readable(self._reports.fileno(), until=until):
            raise errors.KernelError(f"the {self._gate.layer} gate is not ready after {timeout_seconds:g} s")
        # The message is empty if the gate closed its end: a failed gate writes the reason to stderr.
        if self._receive() != main.READY:
            raise errors.KernelError(f"the {self._gate.layer} gate did not start: {self._last_words()}")
        self._is_ready = True

    def watches(
        self, denied: Callable[[denials.Denial], None], *, reached: TellReached | None = None
    ) -> Mapping[int, Callable[[], errors.RunError | None]]:
        """Return the watches for the exchange (run_io.ContainerIO.watches): they report denials, and a gate's end.

        ``reached`` is told the destinations of a gate that counts them.
        """
        self._reached = reached
        self._rest = functools.partial(self._told, denied)
        return {self.pidfd: self.ended, self._reports.fileno(): self._rest}

    def tell_rest(self) -> None:
        """Report the last denials, after the exchange has stopped reading."""
        if self._rest is not None and pipes.readable(self._reports.fileno(), 0):
            self._rest()

    def tell_last(self) -> bool:
        """Have a gate that counts destinations report what is left, and end. Called once the agent is dead.

        Its reports have a limited rate, so an agent could else reach a host last of all without a row. Returns False
        where not all was reported: the gate has ended before, was killed, or did not answer in time.
        """
        if self._reached is None or self._rest is None:
            return True
        self.tell_rest()
        if not self._is_ready:
            return True  # it has not read a byte yet
        self._is_asked = True
        with contextlib.suppress(OSError):
            self._reports.send(main.END)
        until = time.monotonic() + _LAST_SECONDS
        # Killed where it does not end in time: it is suspended, or no longer ours.
        while not self._has_reported and pipes.readable(self._reports.fileno(), max(0.0, until - time.monotonic())):
            if self._rest() is not None:
                break
        return self._has_reported

    def end(self) -> None:
        """Kill the gate with its run. A frozen gate dies only once its cgroup is thawed."""
        self._child.signal(signal.SIGKILL)
        if not pipes.readable(self.pidfd, _DEATH_SECONDS):
            self._gate.patience.kill()

    def ended(self) -> errors.RunError:
        """Return the error of a gate that has ended, with its last words."""
        return errors.GateError(f"the {self._gate.layer} gate ended: {self._last_words()}")

    def _told(self, denied: Callable[[denials.Denial], None]) -> errors.RunError | None:
        for _ in range(_AT_ONCE):
            message = self._receive()
            if message is None:
                return None
            if not message:
                return self.ended()
            if message == main.READY and not self._is_ready:
                self._is_ready = True
                continue
            if message == main.REPORTED and self._is_asked:
                self._has_reported = True
                continue
            is_slow = self._tokens.take(time.monotonic())
            if is_slow and (count := _count(message)) is not None:
                if self._reached is not None:
                    self._reached(*count)
                continue
            row = _row(message) if is_slow else None
            if row is None or row["layer"] != self._gate.layer or row["code"] not in self._gate.codes:
                return errors.GateError(f"the {self._gate.layer} gate reports what it may not")
            denied(denials.Denial(**row))
        return None

    def _receive(self) -> bytes | None:
        """One report; None when there is none yet, empty at the end."""
        try:
            return self._reports.recv(main.REPORT_BYTES + 1)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            # Once, where it ended and had not read ``END``. Its reports are still to be read (unix(7)).
            return self._receive()
        except OSError:
            return b""

    def _last_words(self) -> str:
        """The last line that it wrote to stderr, as one line without control characters."""
        os.set_blocking(self._child.stderr, False)
        data = b""
        with contextlib.suppress(BlockingIOError):
            for _ in range(_READ_BYTES // 65536):
                if not (chunk := os.read(self._child.stderr, 65536)):
                    break
                data = (data + chunk)[-_STDERR_BYTES:]
        lines = data.decode("ascii", "replace").strip().splitlines()
        said = "".join(c for c in lines[-1] if c.isprintable()) if lines else ""
        return said or "it said nothing"


def _row(message: bytes) -> dict[str, str] | None:
    try:
        row = json.loads(message)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or set(row) != {"layer", "target", "code"}:
        return None
    return row if all(isinstance(value, str) for value in row.values()) else None


def _count(message: bytes) -> tuple[str, int, int] | None:
    """Read a report of a destination. None if it is none, or its numbers are none of an honest gate."""
    try:
        row = json.loads(message)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or set(row) != {"reached", "connections", "bytes"}:
        return None
    target, numbers = row["reached"], (row["connections"], row["bytes"])
    if not isinstance(target, str) or not all(type(one) is int and 0 <= one < _MOST for one in numbers):
        return None
    return target, *numbers


@contextlib.contextmanager
def start(gate: Gate) -> Iterator[GateProcess]:
    """The gate's process, which ends with the block. Does not wait until it is ready.

    INVARIANT: called from a thread that lives as long as the run. The kernel ends the gate with the thread that
    started it (prctl(2), PR_SET_PDEATHSIG).

    Raises:
        errors.KernelError: the process could not be started.
        errors.RunError: it did not come to execve in time, or what its patience watches said so.
    """
    with contextlib.ExitStack() as stack:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stack.enter_context(ours)
        ours.setblocking(False)
        with theirs:
            # Set it on the open file description: a gate must never block on its supervisor.
            theirs.setblocking(False)
            begun = stack.enter_context(prefork.one(gate.kind, gate.patience))
            started = GateProcess(gate, begun.child, ours)
            stack.callback(started.end)
            with _document(gate) as document:
                space = () if gate.namespace is None else (gate.namespace,)
                try:
                    begun.give((document, theirs.fileno(), *gate.fds.values(), *space), join_files=gate.join_files)
                except (BrokenPipeError, ConnectionResetError, ProcessLookupError):
                    pass  # it has ended; ``ready`` raises with the reason
                except OSError as e:
                    raise errors.KernelError(f"cannot start the {gate.layer} gate: {e.strerror}") from e
        yield started
        started.tell_rest()


@contextlib.contextmanager
def _document(gate: Gate) -> Iterator[int]:
    """Make a sealed file in memory with the gate's document: a plan of a thousand names does not fit into a pipe."""
    document = {
        "plan": gate.plan,
        "fds": list(gate.fds),
        "enters": gate.namespace is not None,
        "layer": gate.layer,
        "seal": {
            "uid": gate.uid,
            "parent": os.getpid(),
            "limits": _limits(gate),
            "files": gate.keeps_files,
            "program": base64.b64encode(_filter(frozenset(gate.calls), counts=gate.counts)).decode(),
        },
    }
    with open(os.memfd_create("gate", os.MFD_CLOEXEC), "w+b") as file:
        file.write(json.dumps(document).encode())
        file.flush()
        file.seek(0)
        yield file.fileno()


def _limits(gate: Gate) -> list[tuple[int, int]]:
    return [
        (resource.RLIMIT_NOFILE, gate.descriptors),
        # Counted over all gates of this uid, so it is either no thread at all or a bound far off.
        (resource.RLIMIT_NPROC, 0 if not gate.threads else 65536),
        (resource.RLIMIT_AS, gate.memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, core_dumps.limit()),
        (resource.RLIMIT_MEMLOCK, 0),
    ]


@functools.lru_cache(maxsize=8)
def _filter(calls: frozenset[str], *, counts: bool) -> bytes:
    where = {**WHERE, "lseek": _FORWARDS} if counts else WHERE
    return seccomp.compile_own(CALLS | calls | ({"lseek"} if counts else set()), arch=platform.machine(), where=where)
