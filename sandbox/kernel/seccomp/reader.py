"""The filters of a process, for whoever is under one: asked of a process that is under none.

The kernel shows filters to nobody who is under a filter (PTRACE_SECCOMP_GET_FILTER: EACCES, ptrace(2)), which a
supervisor that gave up its rights is, with everything that it forks. One process is forked before that
(sandbox.serve.filter_reader) and answers for as long as somebody holds the other end of its socket.

A question is one packet: a number of a process, and with it the socket on which the answer comes (SCM_RIGHTS), so that
any number of askers share one socket and nobody hears another's answer. An answer is one packet of JSON. Each question
is answered in a thread of its own, since a tracer is a thread, and one that waits for a traced process holds up nobody.
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

# Longer than a read can take: what is traced is asked for 5 s, and stops within 1 s.
ANSWER_SECONDS: Final = 15.0
# So many are answered at once; whoever asks beyond that waits in the socket's queue.
AT_ONCE: Final = 64
# As many filters as are read of one process, each told by its length and 64 digits, fill less than half.
_ANSWER_BYTES: Final = 16384
_QUESTION: Final = struct.Struct("=I")
_GONE: Final = "the process that reads filters does not answer"

_asking: socket.socket | None = None


def through(sock: socket.socket | None) -> None:
    """From now on this process, and what it forks, asks over ``sock``; with None it reads by itself again."""
    global _asking  # noqa: PLW0603 - of the process, as the filter is that makes it ask
    _asking = sock


def descriptors() -> tuple[int, ...]:
    """What a fork has to keep to be able to ask."""
    return () if _asking is None else (_asking.fileno(),)


def digests(pid: int) -> tuple[str, ...] | None:
    """As ``dump.digests``.

    Raises:
        As that, and OSError: the reader has ended, or does not answer in time.
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
        raise OSError(int(number), str(answer["text"]))  # of the class that the number has
    found = answer["digests"]
    return None if found is None else tuple(found)


def serve(sock: socket.socket) -> None:
    """Answer until nobody is left who could ask."""
    room = threading.BoundedSemaphore(AT_ONCE)
    while True:
        room.acquire()
        # One byte more than a question has, so that a longer one is not taken for one.
        raw, fds, _, _ = socket.recv_fds(sock, _QUESTION.size + 1, 1, socket.MSG_CMSG_CLOEXEC)
        if not raw and not fds and _nobody_is_left(sock):
            return
        try:
            threading.Thread(target=_answer, args=(raw, fds, room), daemon=True).start()
        except (RuntimeError, MemoryError):  # the first is how Python says EAGAIN: nothing can be read just now
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
    # What is full, closed, or cannot be written at all is its owner's matter.
    with contextlib.suppress(OSError):
        for fd in fds:
            os.set_blocking(fd, False)
            os.write(fd, json.dumps(answer).encode())
    _close(fds)


def _close(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())


def _nobody_is_left(sock: socket.socket) -> bool:
    # A packet may be empty as well. The end is final also where one of them said it for all (shutdown(2)).
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
