"""Limits of the Unix socket, and the peer of a connection."""

from __future__ import annotations

from dataclasses import dataclass

import anyio
import anyio.abc


@dataclass(frozen=True, slots=True)
class Bounds:
    """What clients may hold of the daemon.

    ``strangers`` have not authenticated yet: of more, the oldest goes. One peer has at most ``of_one_peer``
    connections, and all but the operator at most ``of_others``, so that it gets in. Of a peer's frames above
    ``small_bytes`` at most ``large_frames`` are on their way at once. A frame that has begun is whole, and an answer
    read, within ``frame_seconds``. Of those who were not let in ``refusals`` have a row of their own in each
    ``refusal_seconds``.
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
    """What one peer holds, over all its connections."""

    def __init__(self, large_frames: int) -> None:
        self.connections = 0
        self.large = anyio.Semaphore(large_frames)
