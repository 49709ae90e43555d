"""A run's control socket: ``runs/<id>/control``, over which any root process sends requests to the run's shim.

    one message, one answer      SOCK_SEQPACKET, JSON: {"op": NAME, ...} -> {"answer": {...}} | {"error": {...}}
    callers                      root only: the directory is 0700 below COVENANT_STATE, and SO_PEERCRED is checked
    served                       as one watch of the exchange: nothing here blocks; a silent client costs one of a few
                                 descriptors, and the client that was silent longest makes room for another

The socket exists from before the sandbox's start until after its end. Its end of file is the end of the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from policy import errors
from policy.signing import strict_json
from sandbox import unix_wire
from sandbox.kernel.net import unix_address

NAME = "control"
REQUEST_BYTES = 16 * 1024
# Below the default limit of one message on such a socket (net.core.wmem_default).
ANSWER_BYTES = 128 * 1024
CLIENTS = 16
# The most descriptors of one request: stdin, stdout and the sizes of a caller that attaches.
DESCRIPTORS = 3
ASK_SECONDS = 15.0

# The most events in one turn: a client that sends without a pause must take turns with the run itself.
_EVENTS = 8


class Reply(Struct, frozen=True):
    """Answer to a request. ``end`` ends the run once the answer is sent."""

    answer: Mapping[str, Any]
    end: errors.RunError | None = None


# Called with the request's fields. A CovenantError that it raises is the answer; a LedgerError also ends the run.
Handler = Callable[[Mapping[str, Any]], Reply]


class ControlServer:
    """The shim's end, a context manager. Its ``watches`` belong to those of the exchange.

    ``table`` maps each operation to its handler.

    Raises:
        errors.KernelError: Raised when the socket cannot be made.
    """

    def __init__(self, directory: Path, table: Mapping[str, Handler]) -> None:
        self._table = table
        self._descriptors: list[int] = []
        self._clients: dict[int, socket.socket] = {}
        with contextlib.ExitStack() as stack:
            try:
                self._epoll = stack.enter_context(contextlib.closing(select.epoll()))
                listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
                self._listener = stack.enter_context(listener)
                with unix_address.within(directory, NAME) as place:
                    listener.bind(place)
                    os.chmod(place, 0o600)
                listener.listen(CLIENTS)
                self._epoll.register(listener.fileno(), select.EPOLLIN)
            except OSError as e:
                raise errors.KernelError(
                    f"the control socket cannot be made: {e.strerror}", where=str(directory)
                ) from e
            self._stack = stack.pop_all()

    def __enter__(self) -> ControlServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections. Clients that wait for the run's end see it now."""
        for fd in list(self._clients):
            self._drop(fd)
        self._stack.close()

    @property
    def watches(self) -> dict[int, Callable[[], errors.RunError | None]]:
        """The one descriptor that is readable when there is work, with its handler."""
        return {self._epoll.fileno(): self.ready}

    def taken(self) -> list[int]:
        """Return the descriptors that came with the present request. A handler that asks for them closes them."""
        taken, self._descriptors = self._descriptors, []
        return taken

    def ready(self) -> errors.RunError | None:
        """Handle the pending events. A returned error ends the run.

        Raises:
            errors.LedgerError: Raised when a row cannot be written; the client got it as its answer.
        """
        for fd, _ in self._epoll.poll(0, _EVENTS):
            if fd == self._listener.fileno():
                self._accept()
            elif fd in self._clients and (end := self._serve(fd)) is not None:
                return end
        return None

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:
            return  # the client left, or there is no descriptor left: it must connect again
        if unix_wire.peer(client).uid != os.geteuid():
            client.close()
            return
        client.setblocking(False)
        if len(self._clients) >= CLIENTS:
            self._drop(next(iter(self._clients)))
        self._clients[client.fileno()] = client
        self._epoll.register(client.fileno(), select.EPOLLIN)

    def _serve(self, fd: int) -> errors.RunError | None:
        client = self._clients.pop(fd)
        self._clients[fd] = client  # most recent last
        try:
            # Read one byte more than the limit, to notice a longer message. The kernel closes the descriptors of a
            # message that brings too many.
            raw, self._descriptors, _, _ = socket.recv_fds(
                client, REQUEST_BYTES + 1, DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        except OSError:
            raw = b""
        if not raw:
            self._close_taken()
            self._drop(fd)
            return None
        try:
            reply = self._answer(raw)
        except errors.CovenantError as e:
            self._send(fd, {"error": e.to_json()})
            if isinstance(e, errors.LedgerError):
                raise
            return None
        finally:
            self._close_taken()
        self._send(fd, {"answer": dict(reply.answer)})
        return reply.end

    def _close_taken(self) -> None:
        for fd in self.taken():
            os.close(fd)

    def _answer(self, raw: bytes) -> Reply:
        try:
            request = strict_json.loads(raw, max_bytes=REQUEST_BYTES)
        except strict_json.MalformedJsonError as e:
            raise errors.UsageError(f"the request is malformed: {e}") from None
        if not isinstance(request, dict) or not isinstance(request.get("op"), str):
            raise errors.UsageError("the request names no operation")
        handler = self._table.get(request.pop("op"))
        if handler is None:
            raise errors.UsageError("there is no such operation", hint=f"there are: {', '.join(self._table)}")
        return handler(request)

    def _send(self, fd: int, document: dict[str, Any]) -> None:
        # A client that does not read its answers is disconnected.
        try:
            self._clients[fd].send(json.dumps(document).encode())
        except OSError:
            self._drop(fd)

    def _drop(self, fd: int) -> None:
        client = self._clients.pop(fd)
        with contextlib.suppress(OSError):
            self._epoll.unregister(fd)
        client.close()


class ControlConnection:
    """The client's end, a context manager.

    Raises:
        errors.NoRunError: Raised when the run has ended, or does not listen yet.
        errors.KeeperError: Raised when its shim accepts no connection.
    """

    def __init__(self, directory: Path, *, seconds: float = ASK_SECONDS) -> None:
        self._directory, self._seconds = directory, seconds
        with contextlib.ExitStack() as stack:
            self._socket = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            self._socket.settimeout(seconds)
            try:
                with unix_address.within(directory, NAME) as place:
                    self._socket.connect(place)
                self.keeper = os.pidfd_open(unix_wire.peer(self._socket).pid)
            except (FileNotFoundError, ConnectionRefusedError, ProcessLookupError) as e:
                raise self._ended() from e
            except OSError as e:
                raise self._silent(e) from e
            stack.callback(os.close, self.keeper)
            self._stack = stack.pop_all()

    def __enter__(self) -> ControlConnection:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def ask(self, op: str, *, fds: Sequence[int] = (), **fields: Any) -> dict[str, Any]:
        """Send a request, with descriptors, and return the shim's answer.

        Raises:
            errors.CovenantError: Raised with the shim's error when it refuses.
            errors.NoRunError: Raised when the run ends before the answer.
            errors.KeeperError: Raised when the answer is late or malformed.
        """
        self.send(op, fds=fds, **fields)
        return self.receive()

    def send(self, op: str, *, fds: Sequence[int] = (), **fields: Any) -> None:
        """Send a request without a wait for the answer, so that many shims can work at the same time.

        Raises:
            errors.NoRunError, errors.KeeperError: Raised as by ``ask``.
        """
        try:
            socket.send_fds(self._socket, [json.dumps({"op": op, **fields}).encode()], list(fds))
        except (BrokenPipeError, ConnectionResetError) as e:
            raise self._ended() from e
        except OSError as e:
            raise self._silent(e) from e

    def receive(self) -> dict[str, Any]:
        """Return the answer to the last request.

        Raises:
            errors.CovenantError: Raised as by ``ask``.
        """
        try:
            raw = self._socket.recv(ANSWER_BYTES)
        except (BrokenPipeError, ConnectionResetError) as e:
            raise self._ended() from e
        except OSError as e:
            raise self._silent(e) from e
        if not raw:
            raise self._ended()
        try:
            document = strict_json.loads(raw, max_bytes=ANSWER_BYTES)
        except strict_json.MalformedJsonError as e:
            raise errors.KeeperError(f"the keeper of run `{self._directory.name}` answered nonsense: {e}") from None
        if "error" in document:
            raise errors.restored(document["error"])
        answer = document.get("answer")
        if not isinstance(answer, dict):
            raise errors.KeeperError(f"the keeper of run `{self._directory.name}` answered nonsense")
        return answer

    def closed(self, seconds: float) -> bool:
        """Whether the shim has closed this connection, or does so within ``seconds``."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | select.POLLHUP)
        return bool(poll.poll(max(0.0, seconds) * 1000))

    def _ended(self) -> errors.NoRunError:
        return errors.NoRunError(f"run `{self._directory.name}` has ended, or has not begun yet")

    def _silent(self, error: OSError) -> errors.KeeperError:
        what = f"within {self._seconds:g} s" if isinstance(error, TimeoutError) else f": {error.strerror}"
        return errors.KeeperError(
            f"the keeper of run `{self._directory.name}` does not answer {what}",
            hint="if it hangs, end it by its process id (`covenant ps --json` has it): its sandbox ends with it",
        )


def ask(
    directory: Path, op: str, *, seconds: float = ASK_SECONDS, fds: Sequence[int] = (), **fields: Any
) -> dict[str, Any]:
    """Send one request to the shim of the run in ``directory`` (``runs/<id>``), as any root process may.

    Raises:
        errors.CovenantError: Raised as by ``ControlConnection`` and its ``ask``.
    """
    with ControlConnection(directory, seconds=seconds) as connection:
        return connection.ask(op, fds=fds, **fields)


def until_there(directory: Path, seconds: float) -> bool:
    """Whether the run listens, or begins to within ``seconds``."""
    until = time.monotonic() + seconds
    while not (directory / NAME).exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True
