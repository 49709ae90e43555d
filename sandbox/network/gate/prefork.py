"""Start a gate's interpreter before it belongs to a run: as soon as one will be needed, or ahead of that.

The interpreter has imported the modules that it serves with, and waits on a socket for a document and descriptors.
Until then it is root, because it must be root to give that up. It holds nothing, has read nothing, and is in no run's
namespace. It serves one run and no other.

A gate belongs to the thread that started it: the kernel kills it with that thread (prctl(2), PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import socket
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from msgspec import Struct

from policy import errors
from sandbox.kernel.proc import launch as proc_launch
from sandbox.kernel.proc import pipes, spawn

START: Final = "import sys; sys.path += sys.argv[3:]; from sandbox.network.gate import main; main.main(*sys.argv[1:3])"


class Kind(Struct, frozen=True):
    """Describe a gate to start: ``module`` has ``serve(main.GateInput)``.

    With ``own_network`` the gate is in an empty network namespace of its own, else in the one that it is given.
    """

    module: str
    own_network: bool


@dataclass(slots=True)
class Begun:
    """Hold one started gate. Use as a context manager: leaving kills it in any state."""

    child: spawn.Child
    _control: socket.socket

    def __enter__(self) -> Begun:
        return self

    def __exit__(self, *exc: object) -> None:
        self._control.close()
        self.child.__exit__(None, None, None)

    def give(self, fds: Sequence[int], *, join_files: Sequence[str] = ()) -> None:
        """Have it serve: the descriptors as main.main takes them. From now on the leaf of ``join_files`` pays.

        Raises:
            OSError: it is not there any more, or the kernel does not take it into the leaf.
        """
        for file in join_files:
            with open(file, "w", encoding="ascii") as procs:
                procs.write(str(self.child.pid))
        socket.send_fds(self._control, [b"g"], fds)
        self._control.close()

    def lives(self) -> bool:
        """Whether it is there."""
        return not pipes.readable(self.child.pidfd, 0)


class _Own(threading.local):
    """The idle gates of this thread."""

    def __init__(self) -> None:
        self.waiting: dict[Kind, Begun] = {}


_own = _Own()


def ahead(kinds: Collection[Kind], patience: spawn.Patience = spawn.PATIENCE) -> None:
    """Start one of each kind of which none waits. A failure is not raised here: ``one`` tries again, and raises it."""
    for kind in kinds:
        if kind not in _own.waiting:
            with contextlib.suppress(errors.KernelError):
                _own.waiting[kind] = begin(kind, patience)


def drop() -> None:
    """End those that wait."""
    while _own.waiting:
        with _own.waiting.popitem()[1]:
            pass


@contextlib.contextmanager
def one(kind: Kind, patience: spawn.Patience) -> Iterator[Begun]:
    """One that waits, or a new one; it ends with the block.

    Raises:
        errors.KernelError: it could not be started.
        errors.RunError: it did not come to execve in time, or what ``patience`` watches said so.
    """
    found = _own.waiting.pop(kind, None)
    if found is not None and not found.lives():
        with found:
            found = None
    with found or begin(kind, patience) as begun:
        yield begun


def begin(kind: Kind, patience: spawn.Patience) -> Begun:
    """A new one, which the caller owns.

    Raises:
        As ``one``.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, contextlib.ExitStack() as undo:
        undo.callback(ours.close)
        # -I: no variable and no directory of the caller's decides what is imported; -S: nor does a .pth file. The
        # paths are those that this process has its own modules from, so that it works from a wheel and from a clone.
        launch = proc_launch.Launch(
            program=sys.executable,
            arguments=[sys.executable, "-I", "-S", "-B", "-c", START, kind.module, str(theirs.fileno()), *roots()],
            environment={"LC_ALL": "C.UTF-8"},
            own_network=kind.own_network,
            keep=(theirs.fileno(),),
        )
        begun = Begun(spawn.spawn(launch, patience), ours)
        undo.pop_all()
    return begun


@functools.lru_cache(maxsize=1)
def roots() -> tuple[str, ...]:
    """Where the modules of a gate lie.

    Raises:
        errors.InstallationError: one of them is missing.
    """
    found_roots: dict[str, None] = {}
    for name in ("sandbox", "policy", "dns"):
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:
            raise errors.InstallationError(f"module `{name}` is missing", hint="install Covenant again")
        found_roots[str(Path(found.origin).resolve().parents[1])] = None
    return tuple(found_roots)
