"""One connection in the shim that serves it: its caller, its descriptors, and the frames to the client.

Frames to the client are ``{"kind": "state", ...}``, any number of them, then one that ends the session: the kind's own
answer, or ``{"kind": "error", ...}`` as every error of ours is written (``CovenantError.to_json``).
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from msgspec import Struct

from policy import base58, errors
from sandbox import unix_wire
from sandbox.kernel import libc
from sandbox.kernel.fs import hanging
from sandbox.kernel.proc import pipes
from sandbox.run_io import Outcome
from sandbox.supervisor import Supervisor

OPERATOR: Final = "operator@local"
# How long a client may take to read its answer.
ANSWER_SECONDS: Final = 30.0
# A client that does not read what little is said on the way is gone.
_STATE_SECONDS = 1.0
_SO_PEERGROUPS = 59  # asm-generic/socket.h
# What socket.getsockopt takes at most, in bytes.
_GROUPS_BYTES = 1024


class Caller(Struct, frozen=True):
    """The peer of a connection, as the kernel noted it at connect(2) (SO_PEERCRED, unix(7))."""

    pid: int
    uid: int
    gid: int
    groups: tuple[int, ...] = ()

    @classmethod
    def of(cls, sock: socket.socket) -> Caller:
        """Read the peer of a connected socket."""
        return cls(*unix_wire.peer(sock))

    def with_groups(self, sock: socket.socket) -> Caller:
        """Add the supplementary groups, for reads with the caller's rights. None where there are over 256."""
        try:
            raw = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES)
        except OSError as e:
            if e.errno != errno.ERANGE:
                raise
            raw = b""
        return Caller(self.pid, self.uid, self.gid, tuple(gid for (gid,) in struct.iter_unpack("I", raw)))

    @property
    def display(self) -> str:
        """Return the caller's name in rows and labels. It is never the caller's own word."""
        return OPERATOR if self.uid == 0 else f"uid{self.uid}@local"

    @contextlib.contextmanager
    def rights(self) -> Iterator[None]:
        """Open files with this caller's rights while the block lasts, and not with ours.

        A directory's descriptor proves little of the files below: a caller that holds one of /home may not read all of
        it.
        """
        if self.uid == 0:
            yield
            return
        groups = os.getgroups()
        # setfsuid(2) takes the capabilities that override modes away with uid 0, and gives them back with it.
        os.setgroups(self.groups)
        try:
            libc.setfsgid(self.gid)
            libc.setfsuid(self.uid)
            yield
        finally:
            libc.setfsuid(0)
            libc.setfsgid(os.getegid())
            os.setgroups(groups)


@dataclass
class Session:
    """Hold one connection for a handler.

    ``fds`` came with the request and are closed with the connection. ``alive`` becomes readable when the supervisor
    ends; it is -1 where there is none.
    """

    sock: socket.socket
    caller: Caller
    supervisor: Supervisor
    alive: int = -1
    fds: list[int] = field(default_factory=list)
    _opened: Supervisor | None = field(default=None, repr=False)
    _gone: bool = field(default=False, repr=False)
    _answered: bool = field(default=False, repr=False)

    @contextlib.contextmanager
    def opened(self) -> Iterator[Supervisor]:
        """Open the supervisor with a state and a log of this process's own."""
        with self.supervisor.in_shim() as own:
            yield own

    def issuer(self, own: Supervisor) -> dict[str, str]:
        """Return the issuer of the caller's runs: its name by the kernel, and the key of the log that vouches."""
        return {"display": self.caller.display, "pubkey": base58.encode(own.ledger.public_key.public_bytes_raw())}

    def directory(self, index: int) -> int:
        """Return the descriptor with this number, which must be a directory opened for reading.

        Raises:
            errors.RequestError: Raised when it is something else.
        """
        fd = self.fds[index]
        # One that was opened by path alone says nothing of what its holder may read.
        by_path = libc.status_flags(fd) & os.O_PATH
        with hanging.within("the file system of the package's directory"):
            mode = 0 if by_path else os.fstat(fd).st_mode
        if not stat.S_ISDIR(mode):
            raise errors.RequestError(f"descriptor {index} is no directory that was opened for reading")
        return fd

    def pipe(self, index: int, access: int) -> int:
        """Return the descriptor with this number, which must be a pipe that was opened for ``access`` (O_RDONLY, ...).

        The pipe is opened once more in its place. What the client holds is another open file description, so that it
        cannot take O_NONBLOCK away and make the shim wait.

        Raises:
            errors.RequestError: Raised when it is something else.
        """
        fd = self.fds[index]
        flags = libc.status_flags(fd)
        # INVARIANT: reads and writes of a pipe ask no file system, which might never answer.
        with hanging.within("the file system of a descriptor of the session"):
            fits = not flags & os.O_PATH and flags & os.O_ACCMODE == access and stat.S_ISFIFO(os.fstat(fd).st_mode)
            if fits:
                _open_again(fd, access)
        if not fits:
            raise errors.RequestError(f"descriptor {index} is no pipe that was opened for its direction")
        return fd

    def line(self, index: int) -> int:
        """Return the descriptor with this number, which must be a Unix socket for a stream.

        The client holds the same open file: it can make the tool gate of its own run wait, and no other process.

        Raises:
            errors.RequestError: Raised when it is something else.
        """
        fd, fits = self.fds[index], False
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as found:
            fits = (found.family, found.type) == (socket.AF_UNIX, socket.SOCK_STREAM)
        if not fits:
            raise errors.RequestError(f"descriptor {index} is no Unix socket for a stream")
        return fd

    def state(self, name: str, **fields: Any) -> None:
        """Send the state of the run. A client that does not read counts as gone (``watches``) and gets no more."""
        if self._gone:
            return
        try:
            frame = unix_wire.encode({"kind": "state", "state": name, **fields})
            unix_wire.send(self.sock, frame, until=time.monotonic() + _STATE_SECONDS)
        except OSError:
            self._gone = True

    def answer(self, document: Mapping[str, Any]) -> None:
        """Send the one answer. Later errors are not sent to a client that has it, and nothing to one that has left."""
        if self._answered:
            return
        self._answered = True
        frame = unix_wire.encode(document)
        if len(frame) > unix_wire.ANSWER_BYTES:
            frame = unix_wire.encode(errors.ServiceError("the answer is too large for its frame").to_json())
        self._send(frame)

    def send_rows(self, document: Mapping[str, Any]) -> None:
        """Send the rows of a run, before its answer. Their maker bounds the size."""
        self._send(unix_wire.encode(document))

    def _send(self, frame: bytes) -> None:
        if self._gone:
            return
        try:
            unix_wire.send(self.sock, frame, until=time.monotonic() + ANSWER_SECONDS)
        except OSError:
            self._gone = True

    def watches(self, *, detach: bool = False) -> dict[int, Callable[[], Outcome]]:
        """Return the watches of the run (run_io.ContainerIO.watches).

        A run ends when its client leaves, and with the supervisor where the operator configured that.
        """
        watches: dict[int, Callable[[], Outcome]] = {}
        if not detach:
            watches[self.sock.fileno()] = self._left
        return {**watches, **self.ends_with_us()}

    def ends_with_us(self) -> dict[int, Callable[[], Outcome]]:
        """Return the watches that children of the run have as well."""
        if self.alive >= 0 and self.supervisor.config.on_supervisor_exit == "end":
            return {self.alive: _supervisor_ended}
        return {}

    def left(self) -> bool:
        """Whether the client has left. A further byte from it means the same."""
        return self._gone or pipes.readable(self.sock.fileno(), 0)

    def _left(self) -> Outcome:
        self._gone = True
        return errors.KilledError("whoever asked for it went away", hint="ask with `detach` to let it go on")


def _supervisor_ended() -> Outcome:
    return errors.KilledError(
        "the supervisor ended", hint='on_supervisor_exit = "continue" in config.toml lets runs go on'
    )


def _open_again(fd: int, access: int) -> None:
    """Replace a pipe by an open file description of our own, non-blocking.

    Raises:
        errors.RequestError: Raised when it cannot be opened.
    """
    try:
        own = os.open(f"/proc/self/fd/{fd}", access | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as e:
        if e.errno != errno.ENXIO:
            raise errors.RequestError(f"a pipe of the session cannot be opened: {e.strerror}") from e
        # No reader is left: writes fail as they would have.
        read, own = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.close(read)
    try:
        os.dup2(own, fd, inheritable=False)
    finally:
        os.close(own)
