"""Limits of the Unix socket, and the peer of a connection."""

from __future__ import annotations

from dataclasses import dataclass

import anyio
import anyio.abc


@dataclass(frozen=True, slots=True)
class IpcBounds:
    """The limits of clients.

    At most ``strangers`` connections are unauthenticated: beyond that the oldest is closed. One peer has at most
    ``of_one_peer`` connections, and all but the operator at most ``of_others``, so that the operator can connect. At
    most ``large_frames`` frames of a peer above ``small_bytes`` are in progress at once. A frame that has begun must be
    complete, and a response read, within ``frame_seconds``. The first ``refusals`` refused clients in each
    ``refusal_seconds`` have a row of their own.
    """

    connections: int = 512
    of_one_peer: int = 256
    of_others: int = 384
    strangers: int = 64
    handshake_seconds: float = 10.0
    handshake_bytes: int = 64 * 1024
    small_bytes: int = 256 * 1024
    large_frames: int = 4
    frame_seconds: float = 60.0
    refusals: int = 20
    refusal_seconds: float = 1.0


class Peer:
    """The resources used by one peer over all its connections."""

    def __init__(self, large_frames: int) -> None:
        self.connections = 0
        self.large = anyio.Semaphore(large_frames)
