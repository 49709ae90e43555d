"""Start a child by ``covenant-start`` (start.c) in place of a fork of this interpreter.

A fork copies the page tables of Python, and child and parent then fault in what either writes: some 8 ms of processor
for a dozen system calls, of which posix_spawn(3) into a program of its own needs none. The program is built by set-up
and with the wheel; where it was not, ``there`` says so and ``kernel.process`` forks. Both take the same steps in the
same order, and the tests of ``kernel.process`` are run for both.
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
# As start.c has it: of another version not one step is taken.
_VERSION: Final = "2"
# What whoever finds a program there that cannot be used may do about it.
MEND: Final = (
    "restart a supervisor that is older than an upgrade; install Covenant's wheel for this platform"
    " (in a clone, ./scripts/build_starter), or remove that file"
)
# execve(2): what lies there is no program of this machine's, or none that may be executed.
_UNUSABLE: Final = frozenset({errno.ENOEXEC, errno.EACCES, errno.ENOENT, errno.ETXTBSY})
_SETTABLE: Final = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}


class Steps:
    """What the child does before it executes, in words for start.c and in words for whoever reads an error."""

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
        """The step of this number in words; of -1, that start.c took none."""
        return self._names[number] if 0 <= number < len(self._names) else f"understand `{PROGRAM}`"


def there() -> bool:
    """Whether the program was built."""
    return os.access(PROGRAM, os.X_OK)


def start(launch: Launch, steps: Steps, stdio: Sequence[int], report: int) -> int:
    """The process id of a child on its way: 0 to 2 are ``stdio``; a step that fails is told on ``report``.

    Raises:
        errors.KernelError: what lies at ``PROGRAM`` cannot be executed.
        OSError: there is no process or no descriptor left.
        ValueError: a word or the environment has something in it that no program can be given.
    """
    passed = [report, *steps.descriptors]
    # A descriptor duplicated onto itself is one that execve leaves open (posix_spawn_file_actions_adddup2(3)).
    actions = [(os.POSIX_SPAWN_DUP2, fd, target) for target, fd in (*enumerate(stdio), *((fd, fd) for fd in passed))]
    try:
        return os.posix_spawn(
            PROGRAM,
            ["covenant-start", _VERSION, str(os.getpid()), str(report), *steps.words],
            launch.environment,
            file_actions=actions,
            setsid=True,
            setsigmask=(),
            # What the caller ignored would be ignored across execve as well.
            setsigdef=_SETTABLE,
        )
    except OSError as e:
        if e.errno in _UNUSABLE:
            raise errors.KernelError(f"cannot execute `{PROGRAM}`: {e.strerror}", hint=MEND) from e
        raise
