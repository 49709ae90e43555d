"""Who may have something of which there is only so much at one time: no peer has so much that others have none.

A run takes minutes, a look through the log as long as there are rows, and whoever has connections may ask for one after
the other: without a share of each, those of one would be all that there are, and what they asked next would stand
before everybody else.
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
    """``most`` places. Whoever has not the key ``operator`` has at most half of them, and all of those together at most
    three in four, so that the operator always finds one. Who waits stands behind their own first."""

    def __init__(self, most: int, *, operator: str = "") -> None:
        self._operator = operator
        self._of_one = max(1, most // 2)
        self._all = anyio.CapacityLimiter(most)
        self._of_others = anyio.CapacityLimiter(max(1, most * 3 // 4))
        self._peers: dict[str, _Peer] = {}

    @contextlib.asynccontextmanager
    async def place(self, pubkey: str) -> AsyncIterator[None]:
        """Wait for a place, and hold it while the block lasts."""
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
    # A task may have more than one: the place is of this time.
    this = object()
    await places.acquire_on_behalf_of(this)
    try:
        yield
    finally:
        places.release_on_behalf_of(this)
