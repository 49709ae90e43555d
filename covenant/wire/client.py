"""The daemon as its clients see it: one connection, dicts in, dicts out, errors as they were raised.

Light: ``covenant --help`` minds no import of this (no pydantic, no event loop).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from covenant import homes
from covenant.wire import frames
from policy import errors

SOCKET: Final = "sock"
TOKEN: Final = "peers/operator.token"  # noqa: S105 - a place, not a token
CONNECT_SECONDS: Final = 10.0


class Client:
    """A conversation with the daemon; ``ask`` and ``stream`` in turn, never two at once."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        """The response to one request; fields that are None are left out.

        Raises:
            errors.CovenantError: the daemon refused, as it says.
            errors.DaemonSilentError: it ended before it answered, or does not speak as one.
        """
        self._send(kind, fields)
        return self._answer()

    def stream(self, kind: str, **fields: Any) -> Iterator[dict[str, Any]]:
        """The parts of a streamed response (``prefer_stream``): each envelope, the last is ``stream_end``. A daemon
        that does not stream answers with its one response, which then is the only part.

        Raises:
            errors.CovenantError: as ``ask``; also in the middle, where the daemon ends the stream so.
        """
        self._send(kind, {**fields, "prefer_stream": True})
        while True:
            document = self._answer()
            yield document
            if document.get("kind") not in ("stream_begin", "stream_chunk"):
                return

    def _send(self, kind: str, fields: dict[str, Any]) -> None:
        given = {name: value for name, value in fields.items() if value is not None}
        # The daemon may have said no already, and have closed its half: what it said is still to be read.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._sock.sendall(encoded(kind, given))

    def _answer(self) -> dict[str, Any]:
        return decoded(self._exactly(frames.length(self._exactly(frames.HEADER_BYTES))))

    def _exactly(self, size: int) -> bytes:
        parts = []
        while size:
            try:
                part = self._sock.recv(min(size, 1 << 20))
            except TimeoutError:
                raise errors.DaemonSilentError("the daemon did not answer in time") from None
            except ConnectionResetError:
                part = b""
            if not part:
                raise errors.DaemonSilentError(
                    "the daemon ended the conversation before its answer", hint="see its log"
                )
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


@contextlib.contextmanager
def connected(home: Path, *, token: str | None = None, answer_seconds: float | None = None) -> Iterator[Client]:
    """Yield an authenticated client of the daemon of ``home``: the operator, or the peer of ``token``.

    Raises:
        errors.DaemonSilentError: no daemon listens there.
        errors.AuthenticationError: the token is not accepted.
    """
    with opened(home, answer_seconds=answer_seconds) as client:
        if token is None and not has_token(home):
            # systemd starts the daemon for this connection; its answer says that it has made the token.
            client.ask("protocol_info")
        client.ask("authenticate", token_b58=operator_token(home) if token is None else token)
        yield client


@contextlib.contextmanager
def opened(home: Path, *, answer_seconds: float | None = None) -> Iterator[Client]:
    """A connection without a token: only ``protocol_info`` and ``authenticate`` are answered.

    Raises:
        errors.DaemonSilentError: no daemon listens there.
    """
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        sock.settimeout(CONNECT_SECONDS)
        try:
            directory = os.open(home, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, directory)
            sock.connect(address(directory))
        except OSError as e:
            raise silent(home, e) from e
        sock.settimeout(answer_seconds)
        yield Client(sock)


def address(directory: int, name: str = SOCKET) -> str:
    """The daemon's socket by its home, open as ``directory``: a path may be longer than an address (unix(7))."""
    return f"/proc/self/fd/{directory}/{name}"


def silent(home: Path, error: OSError) -> errors.DaemonSilentError:
    """The error of a socket that could not be connected to."""
    return errors.DaemonSilentError(
        f"no daemon answers at `{home / SOCKET}`: {error.strerror or 'it takes too long'}",
        hint=_start(home),
        where=str(home),
    )


def _start(home: Path) -> str:
    """The hint that starts a daemon. It refuses root without an option, and the home of root is for root alone."""
    try:
        belongs_to_root = home.stat().st_uid == 0
    except OSError:
        belongs_to_root = False
    return "start it: covenantd --allow-root" if os.geteuid() == 0 and belongs_to_root else "start it: covenantd"


def has_token(home: Path) -> bool:
    """Whether a daemon has run in this home."""
    return os.path.lexists(home / TOKEN)


def operator_token(home: Path) -> str:
    """The operator's token of ``home``.

    Raises:
        errors.DaemonSilentError: there is none, since no daemon ran there yet.
        errors.KeyFileError: others can read it.
    """
    path = home / TOKEN
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError as e:
        raise errors.DaemonSilentError("no daemon has run in this home", hint=_start(home), where=str(home)) from e
    except OSError as e:
        raise errors.KeyFileError(f"the operator's token: {e.strerror}", where=str(path)) from e
    with os.fdopen(fd, "rb") as stream:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_mode & 0o077:
            raise errors.KeyFileError(
                "the operator's token can be read by others", hint=homes.close_hint(path, "0600"), where=str(path)
            )
        return stream.read(256).decode("ascii", "replace").strip()


def encoded(kind: str, fields: dict[str, Any]) -> bytes:
    """The frame of a request.

    Raises:
        errors.UsageError: it is longer than a frame may be, or no Unicode.
    """
    try:
        return frames.encode(json.dumps({"kind": kind, **fields}, ensure_ascii=False, separators=(",", ":")).encode())
    except UnicodeEncodeError as e:
        raise errors.UsageError("the request is not valid Unicode") from e
    except errors.FrameError as e:
        raise errors.UsageError(f"the request is too long: {e.message}") from e


def decoded(raw: bytes) -> dict[str, Any]:
    """The document of a frame.

    Raises:
        errors.CovenantError: it says that something was refused.
        errors.DaemonSilentError: it is none.
    """
    try:
        document = json.loads(raw)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise errors.DaemonSilentError("the daemon's answer is none of this protocol")
    kind = document.get("kind")
    if kind == "authentication_failed":
        raise errors.AuthenticationError(f"the daemon let nobody in: {document.get('reason')}")
    if kind in ("error", "stream_error"):
        raise errors.restored(document)
    return document
