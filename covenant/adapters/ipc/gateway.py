"""The daemon's socket: frames to requests, responses to frames, with one task for each connection.

    bytes ──Splitter──> frame ──parse──> request ──Server.respond──> response ──> frame
              requests of one connection run in order, those of several concurrently

This module limits the connections. ``ipc_connection`` handles one of them, and ``ipc_channel`` its frames.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Final

import anyio
import anyio.abc

from covenant.adapters.ipc.connection import Connection
from covenant.adapters.ipc.limits import IpcBounds, Peer
from covenant.handlers.access import auth_failures
from covenant.handlers.caller import Caller
from covenant.handlers.server import Server
from policy import errors

_LOG = logging.getLogger(__name__)

_PAUSE_SECONDS: Final = 0.1


class IpcGateway:
    """The server of one socket."""

    def __init__(self, server: Server, group: anyio.abc.TaskGroup, *, bounds: IpcBounds | None = None) -> None:
        self.server = server
        self.bounds = bounds or IpcBounds()
        self.refusals = auth_failures.Refusals(
            server, "ipc", group, most=self.bounds.refusals, seconds=self.bounds.refusal_seconds
        )
        self.peers: dict[str, Peer] = {}
        self.connections: set[Connection] = set()
        # Unauthenticated connections in order of arrival.
        self.strangers: dict[Connection, None] = {}
        # The number of connections of peers other than the operator.
        self.others = 0
        self.stopping = False
        self.group = group
        self._listening: anyio.CancelScope | None = None
        self._empty = anyio.Event()

    async def listen(self, sock: socket.socket) -> None:
        """Accept connections until ``stop``. ``sock`` is listening, and its owner closes it."""
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        with anyio.CancelScope() as self._listening:
            while True:
                try:
                    one, _ = await loop.sock_accept(sock)
                except OSError as e:
                    # No descriptor or memory left: open connections continue, and waiting clients wait longer.
                    _LOG.error("a connection could not be taken: %s", e.strerror)
                    await anyio.sleep(_PAUSE_SECONDS)
                    continue
                # Not asyncio's Server: when it closes while a client connects, that connection stays open.
                await loop.connect_accepted_socket(lambda: Connection(self), one)

    async def stop(self, *, grace_seconds: float) -> None:
        """Accept no more; finish running requests within ``grace_seconds``, and abort the rest."""
        self.stopping = True
        if self._listening is not None:
            self._listening.cancel()
        for each in tuple(self.connections):
            each.stop()
        with anyio.move_on_after(grace_seconds):
            if self.connections:
                await self._empty.wait()
        for each in tuple(self.connections):
            each.abort()

    def admits(self, one: Connection) -> bool:
        """Whether there is a place for one more; the oldest unauthenticated connection is closed for a new one."""
        if self.stopping or len(self.connections) >= self.bounds.connections:
            return False
        if len(self.strangers) >= self.bounds.strangers:
            oldest = next(iter(self.strangers))
            del self.strangers[oldest]
            oldest.displace()
        self.connections.add(one)
        self.strangers[one] = None
        return True

    def known(self, one: Connection, caller: Caller) -> Peer:
        """Count an authenticated connection for its peer.

        Raises:
            errors.BusyError: this peer, or all peers together, have the maximum of connections.
        """
        mine = self.peers.get(caller.agent.pubkey)
        full = not caller.operator and self.others >= self.bounds.of_others
        if full or (mine is not None and mine.connections >= self.bounds.of_one_peer):
            # A revoked token's connections that send nothing would stay, and keep out the peer with its new token too.
            for each in tuple(self.connections):
                each.end_revoked()
        if not caller.operator and self.others >= self.bounds.of_others:
            raise errors.BusyError("there are as many connections as peers may have", hint="try again")
        peer = self.peers.setdefault(caller.agent.pubkey, Peer(self.bounds.large_frames))
        if peer.connections >= self.bounds.of_one_peer:
            raise errors.BusyError("this peer has as many connections as one may have", hint="end some")
        peer.connections += 1
        self.others += not caller.operator
        # This connection may just have been chosen to make room: then it ends at its next wait.
        self.strangers.pop(one, None)
        return peer

    def forget(self, one: Connection, peer: Peer | None, caller: Caller | None) -> None:
        """Release the place of an ended connection."""
        self.connections.discard(one)
        self.strangers.pop(one, None)
        if peer is not None and caller is not None:
            peer.connections -= 1
            self.others -= not caller.operator
            if not peer.connections:
                self.peers.pop(caller.agent.pubkey, None)
        if self.stopping and not self.connections:
            self._empty.set()
