"""Serve one connection in a shim: read the request within its limits, do it, answer, end."""

from __future__ import annotations

import contextlib
import os
import socket

from msgspec import Struct

from policy import errors
from sandbox import config, unix_wire
from sandbox.kernel import libc
from sandbox.kernel.fs import hanging
from sandbox.serve.api import protocol, rlimits, routes
from sandbox.serve.api.session import Caller, Session
from sandbox.supervisor import Supervisor


class Opening(Struct, frozen=True):
    """A connection as the main loop hands it on. ``until`` is when its request must be whole (time.monotonic)."""

    sock: socket.socket
    caller: Caller
    until: float
    alive: int
    host_network: int

    def descriptors(self) -> tuple[int, ...]:
        """Return the descriptors that the shim keeps. On 2 it writes what only the operator should read."""
        given = (2, self.sock.fileno(), self.alive, self.host_network)
        return tuple(fd for fd in given if fd >= 0)


def serve(opening: Opening, supervisor: Supervisor) -> None:
    """Serve one request with one answer, in the shim.

    Raises:
        Exception: a fault of ours, after the client was told that there is one.
    """
    enter_host_network(supervisor, opening.host_network)
    session = Session(opening.sock, opening.caller, supervisor, alive=opening.alive)
    supervisor.below = session.ends_with_us()
    hanging.serves(opening.caller.uid, opening.sock.fileno())
    try:
        asked = _request(session, opening.until)
        if asked is not None:
            session.caller = session.caller.with_groups(opening.sock)
            routes.HANDLERS[asked.kind](session, asked)
    except errors.CovenantError as e:
        # What a request would have taken of memory is its author's matter, and not the machine's.
        told = e if isinstance(e, errors.RequestError) else errors.exhausted(e) or e
        session.answer(errors.place_file(told, str(config.file_of(supervisor.path))).to_json())
    except Exception as e:
        fault = errors.exhausted(e) or errors.InternalError(f"the supervisor failed: {type(e).__name__}")
        session.answer(fault.to_json())
        raise
    except KeyboardInterrupt:
        session.answer(errors.KilledError("the supervisor ended").to_json())
    finally:
        supervisor.below = {}
        with contextlib.suppress(OSError):
            # Unread input at close(2) would make the kernel drop the answer that the client still has to read.
            opening.sock.shutdown(socket.SHUT_WR)
        # After it: closing a file asks its file system (FUSE_FLUSH), and the client has its answer by now.
        with hanging.within("a descriptor that the request brought"):
            for fd in session.fds:
                os.close(fd)
        opening.sock.close()


def recover(supervisor: Supervisor, host_network: int) -> None:
    """In a shim: take away what another left."""
    if host_network >= 0:
        libc.setns(host_network, libc.CLONE_NEWNET)
    with supervisor.in_shim() as own:
        own.recover()


def enter_host_network(supervisor: Supervisor, host_network: int) -> None:
    """Return to the host's network if the operator named an uplink, a proxy or a server with the secrets.

    With a proxy alone the run's connectors need it, and trusted-local agents still get no network.
    """
    if host_network >= 0:
        config = supervisor.config
        supervisor.isolated = not config.in_host_network
        if not supervisor.isolated or config.proxy.url:
            libc.setns(host_network, libc.CLONE_NEWNET)
        os.close(host_network)


def _request(session: Session, until: float) -> protocol.ServiceRequest | None:
    """The request with its descriptors; None when the client left instead."""
    try:
        raw = unix_wire.receive(session.sock, max_bytes=unix_wire.REQUEST_BYTES, until=until, fds=session.fds)
    except unix_wire.FrameError as e:
        raise errors.RequestError(f"the request is refused: {e}") from e
    if raw is None:
        return None
    # Unknown fields cost memory before they are refused.
    with rlimits.memory(rlimits.REQUEST_MEMORY):
        asked = protocol.parse(raw)
    if len(session.fds) != asked.descriptors:
        raise errors.RequestError(
            f"the request is refused: it brings {len(session.fds)} descriptors, "
            f"`{asked.kind}` takes {asked.descriptors}"
        )
    return asked
