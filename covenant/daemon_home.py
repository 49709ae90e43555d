"""The lock of a home, so that a single daemon serves it, and its socket there."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from covenant.wire import client
from policy import errors
from sandbox.serve import systemd
from sandbox.storage import atomic_file

LOCK: Final = "daemon.lock"
_BACKLOG: Final = 512
_UNHEARD: Final = f".{client.SOCKET}"
_PROBE_SECONDS: Final = 2.0


@contextlib.contextmanager
def held(home: Path) -> Iterator[int]:
    """Yield the home's directory, locked by this process until the block ends.

    Raises:
        errors.DaemonRunsError: another daemon serves it.
        errors.HomeError: it is not ours alone.
    """
    with contextlib.ExitStack() as stack:
        directory = atomic_file.open_directory(home, error=errors.HomeError)
        stack.callback(os.close, directory)
        try:
            lock = os.open(LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=directory)
        except OSError as e:
            raise errors.HomeError(f"`{home / LOCK}` cannot be used: {e.strerror}", where=str(home)) from e
        stack.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise errors.DaemonRunsError(
                f"another daemon serves `{home}`", hint="end it, or give another COVENANT_HOME", where=str(home)
            ) from None
        yield directory


@contextlib.contextmanager
def listening(directory: int, home: Path) -> Iterator[socket.socket]:
    """Yield the socket from systemd, or ``$COVENANT_HOME/sock``, which is removed at the end.

    The stale socket of a killed daemon is replaced. INVARIANT: the lock is held, so no daemon of this version listens
    there. A socket on which another process listens (Covenant version 1 takes no such lock) is left alone.

    Raises:
        errors.DaemonRunsError: a process listens there.
        errors.HomeError: the socket cannot be made there.
    """
    try:
        given = systemd.listener()
    except ValueError as e:
        raise errors.SettingError(f"the socket of the unit cannot be used: {e}") from e
    if given is not None:
        with given:
            yield given
        return
    where = str(home / client.SOCKET)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            _remove_stale(directory, client.address(directory), where)
            _listen(sock, directory)
            own = os.stat(client.SOCKET, dir_fd=directory, follow_symlinks=False)
        except OSError as e:
            raise errors.HomeError(f"the socket `{where}` cannot be made: {e.strerror}", where=where) from e
        try:
            yield sock
        finally:
            with contextlib.suppress(OSError):
                now = os.stat(client.SOCKET, dir_fd=directory, follow_symlinks=False)
                if (now.st_dev, now.st_ino) == (own.st_dev, own.st_ino):
                    os.unlink(client.SOCKET, dir_fd=directory)


def _listen(sock: socket.socket, directory: int) -> None:
    # Under another name until listen(2): a client that sees the socket can connect to it. link(2) does not replace an
    # existing name.
    with contextlib.suppress(FileNotFoundError):
        os.unlink(_UNHEARD, dir_fd=directory)
    before = os.umask(0o177)
    try:
        sock.bind(client.address(directory, _UNHEARD))
    finally:
        os.umask(before)
    try:
        sock.listen(_BACKLOG)
        os.link(_UNHEARD, client.SOCKET, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)
    finally:
        os.unlink(_UNHEARD, dir_fd=directory)


def _remove_stale(directory: int, address: str, where: str) -> None:
    try:
        info = os.stat(client.SOCKET, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(info.st_mode):
        raise errors.HomeError(f"`{where}` is there and is no socket", hint="move it away", where=where)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_SECONDS)
        status = probe.connect_ex(address)
    if status != errno.ECONNREFUSED:
        raise errors.DaemonRunsError(f"somebody listens at `{where}`", hint="end it first", where=where)
    os.unlink(client.SOCKET, dir_fd=directory)
