"""Places on this host at which a port of an agent is published: a unix socket of the caller, or a loopback port.

A socket is made with the rights of the caller alone, in a directory that is the caller's own and that no other user can
write to. It has mode 0600. For root in another user's directory, it is made with the rights of that user.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePosixPath

from policy import errors
from policy.manifest.services import LOOPBACK, UNIX
from sandbox.kernel import libc
from sandbox.kernel.proc import child

Rights = Callable[[], contextlib.AbstractContextManager[None]]
BACKLOG = 128
_MODE = 0o600
_RECOVERY_SECONDS = 5
_PARENT = os.O_PATH | os.O_DIRECTORY
_RESOLVE = libc.RESOLVE_NO_SYMLINKS | libc.RESOLVE_NO_MAGICLINKS


@contextlib.contextmanager
def opened(to: str, *, rights: Rights = contextlib.nullcontext, where: str = "") -> Iterator[socket.socket]:
    """Listen at the place ``to`` while the block lasts. ``rights`` takes the caller's.

    Raises:
        errors.PublishError: Raised when the place cannot be had, or is not the caller's.
    """
    made = _unix(to.removeprefix(UNIX), rights, where) if to.startswith(UNIX) else _loopback(to, where)
    with made as listener:
        yield listener


@contextlib.contextmanager
def _loopback(to: str, where: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as made:
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(("127.0.0.1", int(to.removeprefix(LOOPBACK))))
            made.listen(BACKLOG)
        except OSError as e:
            raise errors.PublishError(
                f"cannot listen at {to}: {e.strerror}", hint="end what listens there, or name another port", where=where
            ) from e
        yield made


@contextlib.contextmanager
def _unix(path: str, rights: Rights, where: str) -> Iterator[socket.socket]:
    name = PurePosixPath(path).name
    with contextlib.ExitStack() as stack:
        with rights():
            parent = _parent(path, where)
            stack.callback(os.close, parent)
            uid = os.fstat(parent).st_uid
            with _as_owner(uid):
                made = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
                inode = _bind(made, parent, name, path, where)
        stack.callback(_remove, rights, uid, parent, name, inode)
        yield made


def _parent(path: str, where: str) -> int:
    """Open the directory of a socket, and check that it is the caller's own."""
    folder = str(PurePosixPath(path).parent)
    try:
        fd = libc.openat2(folder, _PARENT, resolve=_RESOLVE)
    except OSError as e:
        hint = "name the directory itself: no link is followed" if e.errno == errno.ELOOP else f"mkdir -m 700 {folder}"
        raise errors.PublishError(f"cannot publish in {folder}: {e.strerror}", hint=hint, where=where) from e
    info, caller = os.fstat(fd), libc.fsuid()
    if info.st_mode & 0o022:
        os.close(fd)
        # A sticky directory is for all users, as /tmp: without its mode other programs fail.
        own = f"mkdir -m 700 {folder}/NAME, and publish in it"
        hint = own if info.st_mode & stat.S_ISVTX else f"chmod go-w {folder}"
        raise errors.PublishError(f"cannot publish in {folder}: others can write there", hint=hint, where=where)
    if caller not in (0, info.st_uid):
        os.close(fd)
        raise errors.PublishError(
            f"cannot publish in {folder}: it belongs to another user than uid {caller}",
            hint="name a directory of the caller's own",
            where=where,
        )
    return fd


def _bind(made: socket.socket, parent: int, name: str, path: str, where: str) -> int:
    """Make the socket's file, in place of one that no process listens at. Returns its inode."""
    place = f"/proc/self/fd/{parent}/{name}"
    try:
        # unix(7) takes the mode of the file from the socket's.
        os.fchmod(made.fileno(), _MODE)
        try:
            made.bind(place)
        except OSError as e:
            if e.errno != errno.EADDRINUSE or not is_stale(parent, name):
                raise
            os.unlink(name, dir_fd=parent)
            made.bind(place)
        inode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_ino
        made.listen(BACKLOG)
    except OSError as e:
        raise errors.PublishError(
            f"cannot listen at {path}: {e.strerror}", hint="remove what is there, or name another path", where=where
        ) from e
    return inode


def is_stale(parent: int, name: str) -> bool:
    """Whether a name is a socket at which no process listens. ``parent`` is its directory."""
    if not stat.S_ISSOCK(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as tried:
        return tried.connect_ex(f"/proc/self/fd/{parent}/{name}") == errno.ECONNREFUSED


def _remove(rights: Rights, uid: int, parent: int, name: str, inode: int) -> None:
    """Remove the socket's file, unless another has its name by now."""
    with contextlib.suppress(OSError), rights(), _as_owner(uid):
        if os.stat(name, dir_fd=parent, follow_symlinks=False).st_ino == inode:
            os.unlink(name, dir_fd=parent)


def recover(places: Sequence[str]) -> None:
    """Remove the sockets that a killed process left. One at which a process listens stays.

    A process of its own does it, killed after a few seconds: a caller's file system may never answer.
    """
    if not any(to.startswith(UNIX) for to in places):
        return

    def done() -> tuple[bytes, Sequence[int]]:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
        signal.alarm(_RECOVERY_SECONDS)
        _remove_stale(places)
        return b"", ()

    with contextlib.suppress(OSError):
        child.work(done)


def _remove_stale(places: Sequence[str]) -> None:
    for path in (to.removeprefix(UNIX) for to in places if to.startswith(UNIX)):
        with contextlib.suppress(OSError):
            parent = libc.openat2(str(PurePosixPath(path).parent), _PARENT, resolve=_RESOLVE)
            try:
                name, uid = PurePosixPath(path).name, os.fstat(parent).st_uid
                with _as_owner(uid):
                    if os.stat(name, dir_fd=parent, follow_symlinks=False).st_uid == uid and is_stale(parent, name):
                        os.unlink(name, dir_fd=parent)
            finally:
                os.close(parent)


@contextlib.contextmanager
def _as_owner(uid: int) -> Iterator[None]:
    """Make and remove files in the name of this user: the rights over all files go with it."""
    before = libc.fsuid()
    if uid == before:
        yield
        return
    libc.setfsuid(uid)
    try:
        yield
    finally:
        libc.setfsuid(before)
