"""Read the system calls that the filter refused, and those that failed, from gVisor's debug log, through a named pipe.

A refused call reaches no trace point (tried: seccheck's raw points of a refused call stay silent), and gVisor has no
action that would log or hand it over. Only its debug log reports it: ``Syscall 121: denied by seccomp``. A traced call
(runsc's --strace) has a line as well, with its errno where it failed. That costs nothing measurable for a fork, and 10
to 20 microseconds for an open. All other lines are thrown away, so a flood fills no disk. Where the agent makes the
sentry write, the agent itself waits for it.

Each line is a JSON document, so that a newline in a path begins no line. Bytes of a path that are not UTF-8 are U+FFFD
there. An agent that took its sentry over can write lines of its own, and so add refusals.
tests/kernel/test_denied_calls.py fails with a runsc that reports otherwise.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from policy import errors

_TASK = rb"\[ *[0-9]+: *[0-9]+\] "
_REFUSED = re.compile(
    rb'^\{"msg":"[a-z_]+\.go:[0-9]+\] ' + _TASK + rb'Syscall ([0-9]{1,4}): denied by seccomp","level":', re.MULTILINE
)
_TRACED = re.compile(
    rb'^\{"msg":("strace\.go:[0-9]+\] ' + _TASK + rb'(?:[^"\\\n]|\\.)* errno=(?:[^"\\\n]|\\.)*"),"level":', re.MULTILINE
)
# `python3 X openat(AT_FDCWD /workspace, 0xacbc00 /etc/x, O_RDONLY|0x0, 0o0) = 0 (0x0) errno=2 (no such file ...) (1us)`
_FAILED = re.compile(r"[^]]*\] \[[^]]*\] .*? X ([a-z0-9]+)\((.*)\) = 0 \(0x0\) errno=([0-9]{1,3}) \([^\n]*", re.DOTALL)
_PIPE_BYTES = 1 << 20
# Read at most so much a turn: the wait for the agent grows by no more than this.
_CHUNK, _AT_ONCE = 65536, 4
# And so many different calls a turn; the others are counted on and told of in the next. An agent has some thousand
# numbers to try, and each that is new is a row.
_TOLD_AT_ONCE = 64
# A line that is longer than this is none of those: it has a path, or two.
_LINE_BYTES = 16384
# So many different ones are kept until they are told; of what comes beyond, the call alone.
_KEPT = 4096
NAME = "sentry.log"


def flags(directory: Path, traced: Sequence[str] = ()) -> dict[str, str]:
    """Return runsc's flags for a pipe in this directory. runsc also writes each of the ``traced`` calls there."""
    # Of the sandbox alone: the gofer and `runsc run` itself say 700 lines about themselves, and nothing of the agent.
    written = {
        "--debug": "true",
        "--debug-command": "boot",
        "--debug-log": str(directory / NAME),
        "--debug-log-format": "json",
    }
    if not traced:
        return written
    return {**written, "--strace": "true", "--strace-syscalls": ",".join(traced), "--strace-log-size": "1"}


class Failed(Struct, frozen=True):
    """A traced call that failed: ``arguments`` as gVisor writes them down, empty where there were too many of them."""

    call: str
    arguments: str
    errno: int


class RefusedCalls:
    """Read the pipe in ``directory``; ``ready`` reads its content and never blocks.

    INVARIANT: a timer calls ``ready``, and not each arrival of data. Waking the supervisor for each of 100,000 refused
    calls cost 1.2 s of its time; by the timer it is no more than in the rest of the run.

    ``calls`` gives each system call's name by its number. ``told`` is called with a name and the number of refusals.
    ``awaited`` are the numbers of expected refusals: each is taken from there when it comes, in this order, and is not
    reported. Until all have come ``fileno`` may be waited on. ``failed`` is called with each traced call that failed,
    and how often.
    """

    def __init__(
        self,
        directory: Path,
        calls: Mapping[int, str],
        told: Callable[[str, int], None],
        *,
        awaited: deque[int] | None = None,
        failed: Callable[[Failed, int], None] | None = None,
    ) -> None:
        """Make the pipe.

        Raises:
            errors.KernelError: it cannot be made.
        """
        path = directory / NAME
        self._calls, self._told, self._failed = calls, told, failed
        self._rest = b""
        self._found: Counter[int | Failed] = Counter()
        self._awaited: deque[int] = deque() if awaited is None else awaited
        try:
            os.mkfifo(path, 0o600)
            # To read and to write: there is always a writer, so an end of file is never seen, and runsc never waits
            # for a reader. The sandbox starts before anybody listens, and says some 100 KiB while it does.
            self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as e:
            raise errors.KernelError(f"the sandbox's log cannot be read: {e.strerror}") from e
        with contextlib.suppress(OSError):
            fcntl.fcntl(self._fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def fileno(self) -> int:
        """The descriptor to wait on, for a while."""
        return self._fd

    def ready(self) -> None:
        """Tell of the calls that were refused since, a bounded number of them."""
        self._take()
        self._tell(_TOLD_AT_ONCE)

    def _take(self) -> bool:
        """Read a bounded part of what is there; whether there may be more."""
        for _ in range(_AT_ONCE):
            try:
                chunk = os.read(self._fd, _CHUNK)
            except BlockingIOError:
                return False
            data = self._rest + chunk
            end = data.rfind(b"\n") + 1
            self._count([int(number) for number in _REFUSED.findall(data, 0, end)])
            if self._failed is not None:
                for line in _TRACED.findall(data, 0, end):
                    self._note(_failure(line))
            self._rest = data[end:][-_LINE_BYTES:]
        return True

    def _count(self, numbers: list[int]) -> None:
        for at, number in enumerate(numbers):
            if not self._awaited:
                self._found.update(numbers[at:])
                return
            if number == self._awaited[0]:
                self._awaited.popleft()
            else:
                self._found[number] += 1

    def _note(self, one: Failed | None) -> None:
        if one is None:
            return
        if one not in self._found and len(self._found) >= _KEPT:
            one = Failed(one.call, "", one.errno)
        self._found[one] += 1

    def _tell(self, most: int | None) -> None:
        for one in list(itertools.islice(self._found, most)):
            count = self._found.pop(one)
            if isinstance(one, Failed):
                if self._failed is not None:
                    self._failed(one, count)
            else:
                self._told(self._calls.get(one, f"#{one}"), count)

    def close(self) -> None:
        """Report all that is left, after the last writer has exited. The pipe is removed with its directory."""
        try:
            # A pipe holds no more than this, so a process that still writes cannot keep us here.
            for _ in range(1 + _PIPE_BYTES // (_AT_ONCE * _CHUNK)):
                if not self._take():
                    break
            self._tell(None)
        finally:
            os.close(self._fd)


def _failure(message: bytes) -> Failed | None:
    """Return the call of a message, which is a JSON string. None where it did not fail."""
    try:
        text = json.loads(message).encode("utf-8", "replace").decode()
    except ValueError:
        return None  # gVisor does not write it
    found = _FAILED.fullmatch(text)
    return None if found is None else Failed(found[1], found[2], int(found[3]))
