"""Start a child by ``covenant-start`` (start.c) in place of a fork of this interpreter.

A fork copies the page tables of Python, and child and parent then fault on each page that they write. That costs some
8 ms of CPU time for a dozen system calls; posix_spawn(3) of a small program avoids it. Set-up and the wheel build the
program. If it is missing, ``there`` returns False and ``kernel.proc.spawn`` forks. Both take the same steps in the same
order, and the tests of ``kernel.proc.spawn`` are run for both.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from policy import errors

if TYPE_CHECKING:
    from sandbox.kernel.proc.launch import Launch

PROGRAM: Final = str(Path(__file__).with_name("covenant-start"))
# The same number as in start.c. A program of another version takes no step.
VERSION: Final = "2"
# The hint for a program that exists and does not work.
MEND: Final = (
    "restart a supervisor that is older than an upgrade; install Covenant's wheel for this platform"
    " (in a clone, ./scripts/build_starter), or remove that file"
)
# execve(2): the file is no program for this machine, or must not be executed.
_UNUSABLE: Final = frozenset({errno.ENOEXEC, errno.EACCES, errno.ENOENT, errno.ETXTBSY})
_SETTABLE: Final = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}


class Steps:
    """Steps of the child before its execve: as arguments of start.c, and as names for error messages."""

    def __init__(self, launch: Launch) -> None:
        self.words: list[str] = []
        self._names: list[str] = []
        self.descriptors: list[int] = []
        for file in launch.join_files:
            self._add("join the cgroup", "join", file)
        self._add("be killed with the caller", "die")
        if launch.network is not None:
            self._add("enter the network namespace", "network", launch.network)
        elif launch.own_network:
            self._add("enter the network namespace", "isolate")
        if launch.mounts or launch.covered:
            self._add("attach the mounts", "private")
        for place in launch.covered:
            self._add("attach the mounts", "cover", place)
        for mount in launch.mounts:
            self._add("attach the mounts", "attach", mount.fd, mount.target)
        self._add("connect stdio", "directory", launch.directory)
        for fd in launch.keep:
            self._add("connect stdio", "keep", fd)
        if launch.filter:
            self._add("load the filter", "filter", launch.filter.hex())
        self._add(f"execute {launch.program}", "execute", launch.program, *launch.arguments)

    def _add(self, name: str, step: str, *words: str | int) -> None:
        self._names.append(name)
        self.words += (step, *(str(word) for word in words))
        self.descriptors += (word for word in words if isinstance(word, int))

    def name(self, number: int) -> str:
        """Return the name of a step. The number -1 means that start.c did not understand its arguments."""
        return self._names[number] if 0 <= number < len(self._names) else f"understand `{PROGRAM}`"


def there() -> bool:
    """Whether the program exists and may be executed."""
    return os.access(PROGRAM, os.X_OK)


def start(launch: Launch, steps: Steps, stdio: Sequence[int], report: int) -> int:
    """Start the child and return its pid. ``stdio`` become 0 to 2; the child reports a failed step on ``report``.

    Raises:
        errors.KernelError: Raised when the file at ``PROGRAM`` cannot be executed.
        OSError: Raised when there is no process or no descriptor left.
        ValueError: Raised when an argument or the environment contains a character that execve cannot pass.
    """
    passed = [report, *steps.descriptors]
    # execve leaves a descriptor open that is duplicated onto itself (posix_spawn_file_actions_adddup2(3)).
    actions = [(os.POSIX_SPAWN_DUP2, fd, target) for target, fd in (*enumerate(stdio), *((fd, fd) for fd in passed))]
    try:
        return os.posix_spawn(
            PROGRAM,
            ["covenant-start", VERSION, str(os.getpid()), str(report), *steps.words],
            launch.environment,
            file_actions=actions,
            setsid=True,
            setsigmask=(),
            # Signals that the caller ignores would stay ignored across execve.
            setsigdef=_SETTABLE,
        )
    except OSError as e:
        if e.errno in _UNUSABLE:
            raise errors.KernelError(f"cannot execute `{PROGRAM}`: {e.strerror}", hint=MEND) from e
        raise
