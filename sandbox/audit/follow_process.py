"""Read audit logs in a process with rights, for a worker without any.

``separate`` forks. The parent keeps its rights, opens nothing but the logs, and answers with rows that lead to a signed
head. The child drops every right and gets bytes, never a descriptor: a lock on a log's file would stop its writers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Mapping
from types import FrameType
from typing import Final, Protocol

import msgspec

from policy import errors
from sandbox import unix_wire
from sandbox.audit.log_follow import Checkpoints, Chunk, Follower, Position
from sandbox.kernel import libc
from sandbox.kernel.proc import privdrop
from sandbox.network.gate import uids

WORKER_UID: Final = uids.EXPORT
_MOST_REQUEST: Final = 64 * 1024
_MOST_ANSWER: Final = 16 * 1024 * 1024


class Readers(Protocol):
    """The logs of this machine by name."""

    def read(self, log: str, at: Position | None, limit: int) -> Chunk | None:
        """As ``Follower.read``."""

    def checkpoints(self, log: str) -> Checkpoints:
        """As ``Follower.checkpoints``."""


class LocalReaders:
    """Read the logs in this process."""

    def __init__(self, followers: Mapping[str, Follower]) -> None:
        self._followers = followers
        self._turn = threading.Lock()

    def read(self, log: str, at: Position | None, limit: int) -> Chunk | None:
        """As ``Follower.read``."""
        with self._turn:
            return self._followers[log].read(at, limit)

    def checkpoints(self, log: str) -> Checkpoints:
        """As ``Follower.checkpoints``."""
        with self._turn:
            return self._followers[log].checkpoints()


class _Request(msgspec.Struct, frozen=True):
    log: str
    act: str
    at: Position | None = None
    limit: int = 0


class _Answer(msgspec.Struct, frozen=True):
    chunk: Chunk | None = None
    checkpoints: Checkpoints | None = None
    error: dict[str, str | None] | None = None


_requests = msgspec.msgpack.Decoder(_Request)
_answers = msgspec.msgpack.Decoder(_Answer)
_encode = msgspec.msgpack.Encoder().encode


class RemoteReaders:
    """Ask the process with rights."""

    def __init__(self, door: socket.socket) -> None:
        self._door = door
        self._turn = threading.Lock()

    def read(self, log: str, at: Position | None, limit: int) -> Chunk | None:
        """As ``Follower.read``."""
        return self._ask(_Request(log, "read", at, limit)).chunk

    def checkpoints(self, log: str) -> Checkpoints:
        """As ``Follower.checkpoints``."""
        return self._ask(_Request(log, "checkpoints")).checkpoints or Checkpoints()

    def _ask(self, request: _Request) -> _Answer:
        with self._turn:
            _send(self._door, _encode(request))
            raw = _receive(self._door, _MOST_ANSWER)
        if raw is None:
            raise errors.LedgerError("the process that reads the audit logs ended")
        answer = _answers.decode(raw)
        if answer.error is not None:
            raise errors.restored(answer.error)
        return answer


def separate(followers: Mapping[str, Follower], uid: int = WORKER_UID) -> RemoteReaders | int:
    """Fork. In the child, without rights, return the readers; in the parent serve it, and return its exit status.

    Raises:
        OSError: the kernel refused a step. No child runs then.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        ours.close()
        for follower in followers.values():
            follower.close()
        _drop(uid, parent)
        return RemoteReaders(theirs)
    theirs.close()

    def forward(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    try:
        serve(ours, LocalReaders(followers))
    finally:
        ours.close()
        _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def serve(door: socket.socket, readers: Readers) -> None:
    """Answer a worker until it closes its end. Malformed requests end the service."""
    while (raw := _receive(door, _MOST_REQUEST)) is not None:
        try:
            request = _requests.decode(raw)
        except msgspec.DecodeError:
            return
        try:
            if request.act == "read":
                answer = _Answer(chunk=readers.read(request.log, request.at, request.limit))
            else:
                answer = _Answer(checkpoints=readers.checkpoints(request.log))
        except errors.CovenantError as e:
            said: dict[str, str | None] = {"code": e.code, "message": e.message, "hint": e.hint, "where": e.where}
            answer = _Answer(error=said)
        except (OSError, KeyError, ValueError, OverflowError) as e:
            answer = _Answer(error={"code": errors.LedgerError.code, "message": f"the log cannot be read: {e}"})
        with contextlib.suppress(BrokenPipeError):
            _send(door, _encode(answer))


def _drop(uid: int, parent: int) -> None:
    """Become a user without rights. In a process with one thread."""
    privdrop.become(uid, parent, on_death=signal.SIGTERM)
    libc.set_no_new_privs()


def _send(door: socket.socket, raw: bytes) -> None:
    unix_wire.send(door, unix_wire.framed(raw), until=None)


def _receive(door: socket.socket, most: int) -> bytes | None:
    """Receive one frame. None: the other end is closed, or the frame is too long."""
    with contextlib.suppress(unix_wire.FrameError):
        return unix_wire.receive(door, max_bytes=most, until=None)
    return None
