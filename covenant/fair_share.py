"""Share a limited number of places among peers, so that no peer takes all of them.

A run takes minutes, a scan of the log depends on its rows, and a peer may send many requests at once. Without shares
the requests of one peer would take every place, and its next ones would queue before all others.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import anyio


@dataclass
class _Peer:
    places: anyio.CapacityLimiter
    coming: int = 0


class Shares:
    """``most`` places. Every peer without the key ``operator`` has at most half of them, and all those together at most
    three in four, so that the operator always finds one. A request waits first for its peer's own share."""

    def __init__(self, most: int, *, operator: str = "") -> None:
        self._operator = operator
        self._of_one = max(1, most // 2)
        self._all = anyio.CapacityLimiter(most)
        self._of_others = anyio.CapacityLimiter(max(1, most * 3 // 4))
        self._peers: dict[str, _Peer] = {}

    @contextlib.asynccontextmanager
    async def place(self, pubkey: str) -> AsyncIterator[None]:
        """Wait for a place, and hold it during the block."""
        async with contextlib.AsyncExitStack() as stack:
            if pubkey != self._operator:
                await stack.enter_async_context(self._of(pubkey))
                await stack.enter_async_context(_held(self._of_others))
            await stack.enter_async_context(_held(self._all))
            yield

    @contextlib.asynccontextmanager
    async def _of(self, pubkey: str) -> AsyncIterator[None]:
        peer = self._peers.setdefault(pubkey, _Peer(anyio.CapacityLimiter(self._of_one)))
        peer.coming += 1
        try:
            async with _held(peer.places):
                yield
        finally:
            peer.coming -= 1
            if not peer.coming:
                del self._peers[pubkey]


@contextlib.asynccontextmanager
async def _held(places: anyio.CapacityLimiter) -> AsyncIterator[None]:
    # A task may hold several places, so the owner is this call.
    this = object()
    await places.acquire_on_behalf_of(this)
    try:
        yield
    finally:
        places.release_on_behalf_of(this)
