"""Bring an intent to an instance that waits for one, over a socket in the instance's own run directory.

    runs/<id>/standby-<envelope>   the socket of a ready instance; <envelope> is the digest of the signed bytes
    {"op": "run", ...}             the client's intent
    {"offer": RUN, "since": [...]} the instance would take it; "since" is the log's length before its own first row
    {"go": RUN}                    the client accepts: from now on it does not run the intent elsewhere,
                                   unless the instance sends {"cold": why}, before or after: then no agent was told
    {"answer": {...}}              the result
    {"op": "end", "reason": WHY}   the instance is no longer wanted; the first of this and an intent wins

Both ends are the supervisor's own processes, as root below COVENANT_STATE. A message is four bytes of length and JSON.
The directories are the only list of instances, so that no process has to be told of another's death.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from policy import errors
from policy.package import Package
from sandbox import unix_wire
from sandbox.kernel.net import unix_address
from sandbox.lifecycle.types import Request
from sandbox.network import gateway
from sandbox.run_result import RunResult
from sandbox.rundir import label, registry

_PREFIX = "standby-"
# An instance that is asked answers within a few milliseconds; one that does not is left alone.
_TAKE_SECONDS = 5.0
# After a run has ended in the instance, or was asked to: until its clean-up is done.
_END_SECONDS = 60.0
# A client sends its order with its connection; a stopped one holds up an instance for no longer than this.
ORDER_SECONDS = 1.0


class PeerGoneError(Exception):
    """Raised when the peer has disconnected, or does not follow the protocol."""


# --- the instance's end -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def listening(directory: Path, package: Package) -> Iterator[socket.socket]:
    """The listener of an instance. Clients find it from now on, until the block ends."""
    name = socket_name(package)
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
        unix_address.within(directory, f".{name}") as made,
    ):
        listener.bind(made)
        os.chmod(made, 0o600)
        listener.listen(16)
        listener.setblocking(False)
        # Rename only now: a client that found the name before listen(2) would be refused, and start cold.
        os.rename(made, directory / name)
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                os.unlink(directory / name)


def accepted(listener: socket.socket) -> tuple[socket.socket, dict[str, Any]] | None:
    """Accept a client. Returns its connection and its first message; None where it has gone, says nothing, or is not
    of this process's uid."""
    try:
        connection, _ = listener.accept()
    except OSError:
        return None
    if unix_wire.peer(connection).uid == os.geteuid():
        with contextlib.suppress(PeerGoneError):
            connection.settimeout(ORDER_SECONDS)
            message = receive(connection)
            connection.settimeout(_TAKE_SECONDS)
            return connection, message
    connection.close()
    return None


def told_to_go(connection: socket.socket, run_id: str) -> bool:
    """Whether the client takes the instance that was offered. False when it has disconnected."""
    try:
        return bool(receive(connection).get("go") == run_id)
    except PeerGoneError:
        return False


def order(request: Request, settings: str) -> dict[str, Any]:
    """A request as the instance is asked it. It has the package; the digests say which one is meant. ``settings`` is
    the digest of the configuration under which it is asked (``Config.digest``)."""
    return {
        "op": "run",
        "settings": settings,
        "package": request.package.digest,
        "envelope": _digest(request.package),
        "text": request.text,
        "issuer": dict(request.issuer),
        "timeout_ms": request.timeout_ms,
        "package_name": request.package_name,
        "intent_id": request.intent_id,
        "priority": request.priority,
        "behalf": None if request.behalf is None else dict(request.behalf),
        "told": None if request.told is None else dict(request.told),
    }


def ordered(message: Mapping[str, Any], package: Package) -> Request | None:
    """The request in an order for exactly this package; None for another's."""
    if (message["package"], message["envelope"]) != (package.digest, _digest(package)):
        return None
    return Request(
        package=package,
        text=message["text"],
        issuer=message["issuer"],
        timeout_ms=message["timeout_ms"],
        package_name=message["package_name"],
        intent_id=message["intent_id"],
        priority=message["priority"],
        behalf=message["behalf"],
        told=message["told"],
    )


# --- the asking end -----------------------------------------------------------------------------------------------


def dispatch(runs: Path, request: Request, watches: gateway.Watches, *, settings: str) -> RunResult | None:
    """Have an instance answer, if one is ready for this very package and configuration (``order``); None where a run is
    to be started cold.

    ``watches`` may end it (run_io.ContainerIO.watches).

    Raises:
        errors.CovenantError: the machine failed the run after it was begun.
    """
    if request.package.envelope is None:
        return None
    name, asked = socket_name(request.package), unix_wire.encode(order(request, settings))
    for connection in _ready(runs, name):
        with connection:
            try:
                _send(connection, asked)
                offered = receive(connection)
                run_id = offered.get("offer")
                if run_id is None:
                    continue
                send(connection, {"go": run_id})
            except PeerGoneError:
                continue  # another was first, it died, or it is too slow: nothing was begun for us
            # INVARIANT: from here on only its own word says that the agent was told nothing.
            begun = True
            try:
                answer = _answered(connection, str(run_id), watches)
                begun = answer is not None
            finally:
                if begun:
                    request.began(str(run_id), _mark(offered))
            if answer is not None:
                return answer
    return None


def ready(runs: Path, package: Package) -> int:
    """How many instances wait for an intent to this very package."""
    name = socket_name(package)
    return sum(os.path.lexists(runs / run_id / name) for run_id in os.listdir(runs) if run_id != ".gate")


def end(runs: Path, run_id: str, reason: str) -> bool:
    """Ask an instance to end, and wait for nothing: one that was given an intent at the same moment goes on.

    Whether it was asked, or is gone: one that has too many at its door already must be asked again.
    """
    asked = True
    for name in _sockets(runs / run_id):
        try:
            with connect(runs / run_id, name, seconds=0.0) as connection:
                send(connection, {"op": "end", "reason": reason})
        except (PeerGoneError, ConnectionError, FileNotFoundError):
            continue
        except OSError:  # too many wait there, or there is no descriptor left for it
            asked = False
    return asked


def giving_way(runs: Path) -> Iterator[int]:
    """End one idle instance after the other, the largest first, each when the next is asked for: what it may have taken
    of this machine's memory, in MiB. One that got an intent meanwhile goes on, and is none of them."""
    for one in sorted(_idle(runs), key=lambda one: -one.host_memory_mb):
        end(runs, one.run_id, "a run needs what it holds")
        until = time.monotonic() + _TAKE_SECONDS
        while one.path.exists() and time.monotonic() < until:
            time.sleep(0.005)
        if not one.path.exists():
            yield one.host_memory_mb


def idle_mb(runs: Path) -> int:
    """Return the memory that ``giving_way`` would free at most, in MiB."""
    return sum(one.host_memory_mb for one in _idle(runs))


def _idle(runs: Path) -> list[registry.Entry]:
    return [one for one in registry.live(runs) if label.STANDBY in one.label and _sockets(one.path)]


def _answered(connection: socket.socket, run_id: str, watches: gateway.Watches) -> RunResult | None:
    connection.settimeout(None)
    poll = select.poll()
    for fd in (connection.fileno(), *watches):
        poll.register(fd, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd == connection.fileno():
                return _answer_in(connection, run_id)
            if watches[fd]() is not None:
                # Our end of file is how the instance sees it; what comes of it is still its to say.
                for other in watches:
                    poll.unregister(other)
                connection.shutdown(socket.SHUT_WR)
                connection.settimeout(_END_SECONDS)
                return _answer_in(connection, run_id)


def _mark(offered: Mapping[str, Any]) -> tuple[int, int, int] | None:
    match offered.get("since"):
        case [int(records), int(events_bytes), int(chain_bytes)]:
            return records, events_bytes, chain_bytes
    return None


def _answer_in(connection: socket.socket, run_id: str) -> RunResult | None:
    try:
        message = receive(connection)
    except PeerGoneError:
        raise errors.KeeperError(
            f"the keeper of run `{run_id}` ended before its agent did", hint="run it again; nothing of it is left"
        ) from None
    if "error" in message:
        raise errors.restored(message["error"])
    if "cold" in message:
        return None
    return RunResult.from_json(message["answer"])


def _ready(runs: Path, name: str) -> Iterator[socket.socket]:
    """A connection to each instance that listens under this name."""
    with contextlib.suppress(FileNotFoundError):
        for run_id in os.listdir(runs):
            # Most are no instances of this package, which this call says; it is cheaper than a look at a label.
            if run_id != ".gate" and os.path.lexists(runs / run_id / name):
                with contextlib.suppress(OSError):
                    yield connect(runs / run_id, name)


def connect(directory: Path, name: str, *, seconds: float = _TAKE_SECONDS) -> socket.socket:
    """Connect to the socket in a run directory."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(seconds)
        with unix_address.within(directory, name) as place:
            connection.connect(place)
    except OSError:
        connection.close()
        raise
    return connection


def _sockets(directory: Path) -> list[str]:
    try:
        return [name for name in os.listdir(directory) if name.startswith(_PREFIX)]
    except OSError:
        return []


# --- both ---------------------------------------------------------------------------------------------------------


def send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    """One message.

    Raises:
        PeerGoneError: Raised when the peer has disconnected.
    """
    _send(connection, unix_wire.encode(message))


def _send(connection: socket.socket, raw: bytes) -> None:
    try:
        connection.sendall(raw)
    except OSError as e:
        raise PeerGoneError from e


def receive(connection: socket.socket) -> dict[str, Any]:
    """One message.

    Raises:
        PeerGoneError: Raised when the peer has disconnected, is too slow, or sends no message.
    """
    seconds = connection.gettimeout()
    until = time.monotonic() + (seconds or _END_SECONDS)
    try:
        document = json.loads(unix_wire.receive(connection, max_bytes=unix_wire.ANSWER_BYTES, until=until) or b"")
        connection.settimeout(seconds)
    except (OSError, ValueError, RecursionError) as e:
        raise PeerGoneError from e
    if not isinstance(document, dict):
        raise PeerGoneError
    return document


def _digest(package: Package) -> str:
    return hashlib.sha256(package.envelope or b"").hexdigest()


def socket_name(package: Package) -> str:
    # 32 digits: an address has room for 108 bytes, and an instance compares all of them before it does anything.
    return f"{_PREFIX}{_digest(package)[:32]}"
