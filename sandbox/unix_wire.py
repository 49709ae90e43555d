"""Unix sockets of the supervisor and of warm sandboxes: peer credentials, frames, deadlines and descriptors.

A frame is four bytes of length, big-endian, and that many bytes of JSON in UTF-8. Descriptors come with the first bytes
of a frame (SCM_RIGHTS, unix(7)), and are taken there and nowhere else.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

# An intent of 1 MiB in UTF-8 (policy.contract), of which two bytes may be an escape of six.
REQUEST_BYTES: Final = 4 << 20
# A result of 4 MiB, escaped as well, with stderr and denials.
ANSWER_BYTES: Final = 32 << 20
# A package's directory, the three pipes of a session, and the pipe of its recording.
DESCRIPTORS: Final = 5
LENGTH: Final = struct.Struct(">I")
_CHUNK = 1 << 16
_INT = struct.Struct("i")
_UCRED: Final = struct.Struct("3i")


class FrameError(ValueError):
    """The received bytes are no frame. The text says why, in one lower-case line."""


class SlowError(FrameError):
    """It did not come in time."""


class Peer(NamedTuple):
    """The process at the other end, as the kernel recorded it at its connect(2) or listen(2) (SO_PEERCRED, unix(7))."""

    pid: int
    uid: int
    gid: int


def peer(sock: socket.socket) -> Peer:
    """Return the credentials of the other end of a connected unix socket."""
    return Peer(*_UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)))


def encode(document: Mapping[str, Any]) -> bytes:
    """One frame with this document."""
    return framed(json.dumps(document, ensure_ascii=True, separators=(",", ":")).encode())


def framed(body: bytes) -> bytes:
    """Return a frame with these bytes."""
    return LENGTH.pack(len(body)) + body


def receive(sock: socket.socket, *, max_bytes: int, until: float | None, fds: list[int] | None = None) -> bytes | None:
    """The body of the next frame; None at an end of file before it. ``until`` is a time of ``time.monotonic``.

    Descriptors that come with its first bytes are added to ``fds``, whose owner closes them; without ``fds`` they are
    closed by the kernel.

    Raises:
        FrameError: it is too large, ends early, or brings more descriptors than a request has.
        SlowError: it is not whole in time.
    """
    head = b""
    while len(head) < LENGTH.size:
        part = _some(sock, LENGTH.size - len(head), until, fds if not head else None)
        if not part:
            if head:
                raise FrameError("it ends within its length")
            return None
        head += part
    (size,) = LENGTH.unpack(head)
    if size > max_bytes:
        raise FrameError(f"it is {size} bytes, at most {max_bytes} are taken")
    # Grown as it comes: a length is a word, and costs no memory.
    body = bytearray()
    while len(body) < size:
        part = _some(sock, min(_CHUNK, size - len(body)), until, None)
        if not part:
            raise FrameError(f"it ends after {len(body)} of {size} bytes")
        body += part
    return bytes(body)


def send(sock: socket.socket, frame: bytes, *, until: float | None, fds: Sequence[int] = ()) -> None:
    """Send a frame whole, with ``fds``.

    Raises:
        OSError: the other side is gone, or does not read (TimeoutError).
    """
    view = memoryview(frame)
    _set_timeout(sock, until)
    if fds:
        view = view[socket.send_fds(sock, [view], list(fds)) :]
    while view:
        _set_timeout(sock, until)
        view = view[sock.send(view[: 1 << 18]) :]


def _some(sock: socket.socket, size: int, until: float | None, fds: list[int] | None) -> bytes:
    try:
        _set_timeout(sock, until)
        if fds is None:
            return sock.recv(size)
        return _with_descriptors(sock, size, fds)
    except TimeoutError:
        raise SlowError("it did not come whole in time") from None
    except ConnectionError:
        return b""


def _with_descriptors(sock: socket.socket, size: int, fds: list[int]) -> bytes:
    # Room for one more than is taken: what does not fit, the kernel closes and says so.
    room = socket.CMSG_SPACE((DESCRIPTORS + 1) * _INT.size)
    data, messages, flags, _ = sock.recvmsg(size, room, socket.MSG_CMSG_CLOEXEC)
    got: list[int] = []
    for level, kind, content in messages:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            whole = len(content) - len(content) % _INT.size
            got += [fd for (fd,) in _INT.iter_unpack(content[:whole])]
    # Their owner closes those that are too many as well: closing a file asks its file system, which may hang.
    fds += got
    if flags & socket.MSG_CTRUNC or len(got) > DESCRIPTORS:
        raise FrameError(f"it brings more than {DESCRIPTORS} descriptors")
    return data


def _set_timeout(sock: socket.socket, until: float | None) -> None:
    if until is None:
        if sock.gettimeout() is not None:
            sock.settimeout(None)
        return
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    sock.settimeout(left)
