"""Starts a gate: a process of ours that reads what an agent sends, and that may therefore hold nothing worth taking.

A fresh interpreter, in an empty network namespace or the one that it is given, with the descriptors that are listed
and no others. After its imports and before it reads anything from the agent it gives up root, all capabilities, and
every system call that serving does not need (sandbox.kernel.proc.privdrop). It ends with the supervisor, and if it ends
before, the run ends: the network stays closed, because nothing else answers.
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
from dataclasses import dataclass
from typing import Any

from policy import denials, errors
from policy.compile import bpf, seccomp
from sandbox import core_dumps
from sandbox.kernel.proc import pipes, spawn
from sandbox.network.gate import main, prefork
from sandbox.rate_limit import Tokens

# What the interpreter itself needs once everything is imported, and reading and writing of what it was given.
CALLS = frozenset({
    "brk", "clock_gettime", "close", "epoll_ctl", "epoll_pwait", "epoll_wait", "exit", "exit_group", "fcntl", "futex",
    "getrandom", "madvise", "mmap", "mremap", "munmap", "poll", "ppoll", "read", "recvfrom", "recvmsg",
    "restart_syscall", "rt_sigreturn", "sendto", "write",
})  # fmt: skip
_INT = 0xFFFFFFFF
# Of a call that can do more than serving takes, what it takes. fcntl: F_GETFL, F_SETFL and F_SETPIPE_SZ; F_SETOWN would
# let one gate send a signal to another of its uid. sendto: no flag but MSG_DONTWAIT; MSG_FASTOPEN would make a new
# connection of a socket whose own has failed.
WHERE: Mapping[str, tuple[tuple[bpf.Masked, ...], ...]] = {
    "fcntl": tuple((bpf.Masked(1, _INT, command),) for command in (3, 4, 1031)),
    "sendto": ((bpf.Masked(3, _INT & ~socket.MSG_DONTWAIT, 0),),),
}
_STDERR_BYTES = 4096
# How long a gate that is killed may take, until it is looked whether its cgroup stands.
_DEATH_SECONDS = 0.25
# Reports that are read in one go: the exchange with the agent is served in between.
_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Gate:
    """A gate to start: ``module`` has ``serve(main.Gate)``; ``layer`` and ``codes`` are those of its denials.

    ``calls`` are system calls beyond ``CALLS``. ``namespace`` is a descriptor of the network namespace that it lives
    in, None for an empty one of its own. ``join_files`` are cgroup files of the leaf that pays for it, and ``patience``
    is for its start: whoever waits for it hears meanwhile who ends the run, and has a way to end what stands.
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
    descriptors: int = 256
    memory_bytes: int = 512 << 20
    join_files: Sequence[str] = ()
    patience: spawn.Patience = spawn.PATIENCE

    @property
    def kind(self) -> prefork.Kind:
        """What has to be begun for it."""
        return prefork.Kind(self.module, own_network=self.namespace is None)

    def describe(self) -> str:
        """The operation in words."""
        return f"start the {self.layer} gate as uid {self.uid}"


class GateProcess:
    """A started gate; made by ``start``. Descriptors in ``Gate.fds`` stay the caller's, who may close them then."""

    def __init__(self, gate: Gate, child: spawn.Child, reports: socket.socket) -> None:
        self._gate, self._child, self._reports = gate, child, reports
        self.pid, self.pidfd = child.pid, child.pidfd
        self._is_ready = False
        self._rest: Callable[[], errors.RunError | None] | None = None
        # Twice what an honest gate reports; at once, more than the line holds when nobody has listened for a while.
        self._tokens = Tokens(2 * main.PER_SECOND, 10 * main.BURST, time.monotonic())

    def ready(self, timeout_seconds: float | None = None) -> None:
        """Wait until the gate is sealed and serves; as long as its patience has it unless given. Where many runs begin
        at once its interpreter takes its time.

        Raises:
            errors.KernelError: it ended, or is not ready in time.
            errors.RunError: what its patience watches said so.
        """
        if self._is_ready:
            return
        if timeout_seconds is None:
            timeout_seconds = self._gate.patience.seconds
        until = time.monotonic() + timeout_seconds
        if not self._gate.patience.readable(self._reports.fileno(), until=until):
            raise errors.KernelError(f"the {self._gate.layer} gate is not ready after {timeout_seconds:g} s")
        # At the end of the other side this is empty: a gate that failed says why on stderr.
        if self._receive() != main.READY:
            raise errors.KernelError(f"the {self._gate.layer} gate did not start: {self._last_words()}")
        self._is_ready = True

    def watches(self, denied: Callable[[denials.Denial], None]) -> Mapping[int, Callable[[], errors.RunError | None]]:
        """For the exchange (run_io.Channel.watches): tells what the gate refused, and ends the run with the gate."""
        self._rest = functools.partial(self._told, denied)
        return {self.pidfd: self._ended, self._reports.fileno(): self._rest}

    def tell_rest(self) -> None:
        """Tell what was refused in the last moment, when the exchange has stopped listening."""
        if self._rest is not None and pipes.readable(self._reports.fileno(), 0):
            self._rest()

    def end(self) -> None:
        """It ends with its run. One that somebody has stopped dies of no signal until its cgroup is thawed."""
        self._child.signal(signal.SIGKILL)
        if not pipes.readable(self.pidfd, _DEATH_SECONDS):
            self._gate.patience.kill()

    def _ended(self) -> errors.RunError:
        return errors.GateError(f"the {self._gate.layer} gate ended: {self._last_words()}")

    def _told(self, denied: Callable[[denials.Denial], None]) -> errors.RunError | None:
        for _ in range(_AT_ONCE):
            message = self._receive()
            if message is None:
                return None
            if not message:
                return self._ended()
            if message == main.READY and not self._is_ready:
                self._is_ready = True
                continue
            row = _row(message) if self._tokens.take(time.monotonic()) else None
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
        except OSError:
            return b""

    def _last_words(self) -> str:
        """The last line that it wrote to stderr, as one line without control characters."""
        os.set_blocking(self._child.stderr, False)
        data = b""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._child.stderr, 65536):
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
            # Of the open file: a gate never waits for its supervisor's ear.
            theirs.setblocking(False)
            begun = stack.enter_context(prefork.one(gate.kind, gate.patience))
            started = GateProcess(gate, begun.child, ours)
            stack.callback(started.end)
            with _document(gate) as document:
                space = () if gate.namespace is None else (gate.namespace,)
                try:
                    begun.give((document, theirs.fileno(), *gate.fds.values(), *space), join_files=gate.join_files)
                except (BrokenPipeError, ConnectionResetError, ProcessLookupError):
                    pass  # it has ended, of which whoever waits for it hears, and why
                except OSError as e:
                    raise errors.KernelError(f"cannot start the {gate.layer} gate: {e.strerror}") from e
        yield started
        started.tell_rest()


@contextlib.contextmanager
def _document(gate: Gate) -> Iterator[int]:
    """A sealed file in memory with what the gate is to do: a plan of a thousand names fits no pipe."""
    document = {
        "plan": gate.plan,
        "fds": list(gate.fds),
        "enters": gate.namespace is not None,
        "layer": gate.layer,
        "seal": {
            "uid": gate.uid,
            "parent": os.getpid(),
            "limits": _limits(gate),
            "program": base64.b64encode(_filter(frozenset(gate.calls))).decode(),
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
def _filter(calls: frozenset[str]) -> bytes:
    return seccomp.compile_own(CALLS | calls, arch=platform.machine(), where=WHERE)
