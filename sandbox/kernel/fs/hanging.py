"""Tell another process which file system is being waited for, and until when (``within``); read that there (``Page``).

A process that waits for a file system may be unable to act on its own clock: once a FUSE server has read a request,
no signal ends the wait for its answer, SIGKILL included (fs/fuse/dev.c, request_wait_answer). So the process announces
each access before it makes it, on a page that it shares with the process that can send SIGKILL.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Collection, Iterator

from sandbox.kernel import libc

# The end of the time as time.monotonic() has it, 0 for none; the length of the text behind it.
_HEAD = struct.Struct("=dI")
# The client whose request the process serves: uid, and the inode of the socket; 0 for none.
_CLIENT = struct.Struct("=IQ")
_CLIENT_AT, _TEXT_AT = 16, 32
_TEXT_BYTES = 1000
_SHOWN = 8


class Page:
    """Shared by a process and those that it forks: one writes, the other reads."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, mmap.PAGESIZE)

    def close(self) -> None:
        """Unmap it here; the other process keeps its own mapping."""
        self._map.close()

    def write(self, until: float, what: str) -> None:
        """Announce an access; ``until`` 0 takes the announcement back."""
        text = what.encode(errors="replace")[:_TEXT_BYTES]
        # A reader between two of these writes sees no announcement, and never a new time with an old text.
        self._map[: _HEAD.size] = _HEAD.pack(0.0, 0)
        self._map[_TEXT_AT : _TEXT_AT + len(text)] = text
        self._map[: _HEAD.size] = _HEAD.pack(until, len(text))

    def read(self) -> tuple[float, str]:
        """The time and the text; (0, "") where nothing is announced."""
        until, length = _HEAD.unpack_from(self._map)
        if not until:
            return 0.0, ""
        return until, self._map[_TEXT_AT : _TEXT_AT + min(length, _TEXT_BYTES)].decode(errors="replace")

    def set_client(self, uid: int, inode: int) -> None:
        """Name the client whose request is served from now on."""
        _CLIENT.pack_into(self._map, _CLIENT_AT, uid, inode)

    def client(self) -> tuple[int, int]:
        """The uid of the client and the inode of its socket, 0 for none."""
        uid, inode = _CLIENT.unpack_from(self._map, _CLIENT_AT)
        return uid, inode


_page: Page | None = None
_seconds = 0.0


def announce_on(page: Page | None, seconds: float = 0.0) -> None:
    """From now on this process announces on ``page``; on none with None. For a process with one thread. ``seconds`` is
    what an access takes at most that names no time of its own."""
    global _page, _seconds
    _page, _seconds = page, seconds


def serves(uid: int, sock: int) -> None:
    """Announce the client of this process by its uid and its socket."""
    if _page is not None:
        _page.set_client(uid, os.fstat(sock).st_ino)


@contextlib.contextmanager
def within(what: str, seconds: float | None = None) -> Iterator[None]:
    """Announce that the block accesses ``what`` and takes at most ``seconds``; an outer announcement that ends sooner
    keeps its time. Without a page nothing is announced, and nothing bounds the block."""
    page = _page
    if page is None:
        yield
        return
    outer = page.read()
    until = time.monotonic() + (_seconds if seconds is None else seconds)
    page.write(min(until, outer[0]) if outer[0] else until, what)
    try:
        yield
    finally:
        page.write(*outer)


def take_socket(pid: int, pidfd: int, inode: int) -> int | None:
    """A descriptor of the socket with this inode that another process has open (pidfd_getfd(2)); None without one.

    Only before that process is killed: one that has begun to exit gives nothing away.
    """
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{name}") == f"socket:[{inode}]":
                    return libc.pidfd_getfd(pidfd, int(name))
    return None


def place(pid: int) -> str:
    """Where a process waits: the state and the kernel's function of its first thread that no signal reaches, else of
    its main thread, in words (proc_pid_stat(5), proc_pid_wchan(5)). A main thread may have ended before the others."""
    found = [("?", "?")]
    with contextlib.suppress(OSError):
        found = [_thread(pid, name) for name in sorted(os.listdir(f"/proc/{pid}/task"), key=int)] or found
    state, function = next((one for one in found if one[0] == "D"), found[0])
    return f"state {state}, in the kernel's `{function}`"


def _thread(pid: int, name: str) -> tuple[str, str]:
    state, function = "?", "?"
    with contextlib.suppress(OSError, IndexError):
        with open(f"/proc/{pid}/task/{name}/stat", encoding="ascii", errors="replace") as file:
            state = file.read().rpartition(")")[2].split()[0]
        with open(f"/proc/{pid}/task/{name}/wchan", encoding="ascii") as file:
            function = file.read().strip()
    return state, function


def survivors(pids: Collection[int]) -> str:
    """Processes that SIGKILL does not end, each with where it waits; so many of them that a line holds them."""
    shown = ", ".join(f"{pid} ({place(pid)})" for pid in sorted(pids)[:_SHOWN])
    return f"processes {shown}" + (f" and {len(pids) - _SHOWN} more" if len(pids) > _SHOWN else "")
