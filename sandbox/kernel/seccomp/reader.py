"""Read filters through a process without a filter, for processes that have one.

The kernel shows no filters to a process that has a filter itself (PTRACE_SECCOMP_GET_FILTER: EACCES, ptrace(2)). The
supervisor loads one when it drops its rights, and all its forks inherit it. The reader process is forked before that
(sandbox.serve.filter_reader). It answers as long as a process holds the other end of its socket.

A request is one packet: a pid, with the socket for the answer (SCM_RIGHTS). So any number of clients share one socket,
and none gets another's answer. An answer is one packet of JSON. Each request is handled in its own thread: a tracer is
a thread, and a wait for a traced process then delays no other request.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import socket
import struct
import threading
import time
from typing import Any, Final

from sandbox.kernel.seccomp import dump

# Longer than a read can take: 5 s for another tracer, and 1 s for the stop.
ANSWER_SECONDS: Final = 15.0
# The most requests handled at once; further ones wait in the socket's queue.
AT_ONCE: Final = 64
# The most filters of one process, each as its length and 64 digits, fill less than half.
_ANSWER_BYTES: Final = 16384
_QUESTION: Final = struct.Struct("=I")
_GONE: Final = "the process that reads filters does not answer"

_asking: socket.socket | None = None


def through(sock: socket.socket | None) -> None:
    """Read filters over ``sock`` from now on, in this process and its forks. With None it reads directly again."""
    global _asking  # noqa: PLW0603 - one value for the process, like its filter
    _asking = sock


def descriptors() -> tuple[int, ...]:
    """Return the descriptors that a fork must keep to read filters."""
    return () if _asking is None else (_asking.fileno(),)


def digests(pid: int) -> tuple[str, ...] | None:
    """Return the result of ``dump.digests``, read directly or by the reader process.

    Raises:
        OSError: Raised as by ``dump.digests``, and when the reader has ended or does not answer in time.
    """
    if _asking is None:
        return dump.digests(pid)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        until = time.monotonic() + ANSWER_SECONDS
        with theirs:
            _send(_asking, _QUESTION.pack(pid), theirs.fileno(), until)
        if not _ready(ours, select.POLLIN, until):
            raise TimeoutError(errno.ETIMEDOUT, _GONE)
        raw = ours.recv(_ANSWER_BYTES)
    if not raw:
        raise OSError(errno.EPIPE, _GONE)
    answer: dict[str, Any] = json.loads(raw)
    if number := answer.get("errno"):
        raise OSError(int(number), str(answer["text"]))  # Python picks the subclass by the number
    found = answer["digests"]
    return None if found is None else tuple(found)


def serve(sock: socket.socket) -> None:
    """Handle requests until no other process holds the socket's other end."""
    room = threading.BoundedSemaphore(AT_ONCE)
    while True:
        room.acquire()
        # One byte more than a request has, so that a longer packet is not taken for one.
        raw, fds, _, _ = socket.recv_fds(sock, _QUESTION.size + 1, 1, socket.MSG_CMSG_CLOEXEC)
        if not raw and not fds and _nobody_is_left(sock):
            return
        try:
            threading.Thread(target=_answer, args=(raw, fds, room), daemon=True).start()
        except (RuntimeError, MemoryError):  # Python raises RuntimeError for EAGAIN: there is no thread left now
            _say(fds, {"digests": None})
            room.release()


def _answer(raw: bytes, fds: list[int], room: threading.BoundedSemaphore) -> None:
    try:
        if len(raw) == _QUESTION.size and fds:
            _say(fds, _read(*_QUESTION.unpack(raw)))
    finally:
        _close(fds)
        room.release()


def _say(fds: list[int], answer: dict[str, Any]) -> None:
    # A full, closed or unwritable socket is the client's problem.
    with contextlib.suppress(OSError):
        for fd in fds:
            os.set_blocking(fd, False)
            os.write(fd, json.dumps(answer).encode())
    _close(fds)


def _close(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())


def _nobody_is_left(sock: socket.socket) -> bool:
    # A packet may be empty as well. The end is final even if one client shut down the socket for all (shutdown(2)).
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(0))


def _read(pid: int) -> dict[str, Any]:
    try:
        return {"digests": dump.digests(pid)}
    except OSError as e:
        return {"errno": e.errno or errno.EIO, "text": e.strerror or type(e).__name__}


def _send(sock: socket.socket, raw: bytes, fd: int, until: float) -> None:
    while True:
        try:
            socket.send_fds(sock, [raw], [fd], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            return
        except BlockingIOError:
            if not _ready(sock, select.POLLOUT, until):
                raise TimeoutError(errno.ETIMEDOUT, _GONE) from None
        except (BrokenPipeError, ConnectionError):
            raise OSError(errno.EPIPE, _GONE) from None


def _ready(sock: socket.socket, what: int, until: float) -> bool:
    poll = select.poll()
    poll.register(sock, what)
    return bool(poll.poll(max(0.0, until - time.monotonic()) * 1000))
