"""Do a piece of work in a process of its own, and take its bytes and descriptors back.

The process changes its identity or its namespaces for good. It ends with its work, and with its parent.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
from collections.abc import Callable, Sequence
from typing import Final

from sandbox.kernel import libc

_DONE, _FAILED = b"d", b"e"
_MOST_DESCRIPTORS: Final = 4
_CHUNK: Final = 1 << 16


def work(does: Callable[[], tuple[bytes, Sequence[int]]]) -> tuple[bytes, list[int]]:
    """Call ``does`` in a child of this process. Returns its bytes, and copies of its descriptors (at most 4).

    Raises:
        OSError: ``does`` raised it, or another error, whose text is then the message (errno 0). ECHILD: the child was
            killed.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    # As in spawn.spawn: a signal's exception must neither unwind the caller in the child nor leave the child behind.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _work(does, theirs, parent)
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()
        with ours:
            raw, received, _, _ = socket.recv_fds(ours, _CHUNK, _MOST_DESCRIPTORS)
            while piece := ours.recv(_CHUNK):
                raw += piece
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    for fd in received:
        os.set_inheritable(fd, False)
    if raw[:1] == _DONE:
        return raw[1:], list(received)
    for fd in received:
        os.close(fd)
    if not raw:
        raise OSError(errno.ECHILD, "the process was killed")
    number, _, text = raw[1:].decode("utf-8", "replace").partition(" ")
    raise OSError(int(number), text)


def _work(does: Callable[[], tuple[bytes, Sequence[int]]], told: socket.socket, parent: int) -> None:
    """In the child: never return."""
    try:
        libc.set_parent_death_signal(signal.SIGKILL)
        # The parent of the first process of a PID namespace is outside of it, and shown as 0 (pid_namespaces(7)).
        if os.getppid() == parent or (os.getpid() == 1 and not _is_closed(told)):
            _tell(does, told)
    finally:
        os._exit(0)


def _is_closed(told: socket.socket) -> bool:
    """Whether the parent, which alone has the other end, is gone."""
    poll = select.poll()
    poll.register(told, select.POLLHUP)
    return bool(poll.poll(0))


def _tell(does: Callable[[], tuple[bytes, Sequence[int]]], told: socket.socket) -> None:
    fds: Sequence[int] = ()
    try:
        data, fds = does()
        said = _DONE + data
    except OSError as e:
        place = f": {os.fsdecode(e.filename)}" if e.filename else ""
        said = _FAILED + f"{e.errno or 0} {e.strerror or e}{place}".encode("utf-8", "replace")
    except BaseException as e:
        said = _FAILED + f"0 {type(e).__name__}: {e}".encode("utf-8", "replace")
    socket.send_fds(told, [said[:1]], list(fds))
    told.sendall(said[1:])
