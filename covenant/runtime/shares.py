"""Who may have runs at one time: so many in all, and of these no peer so many that others have none.

What an agent takes is minutes, and whoever has a connection may ask for one run after the other: without a share of
each, the runs of one would be all that there is, and what they asked next would stand before everybody else.
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
    # A task may have more than one run: the place is the run's.
    run = object()
    await places.acquire_on_behalf_of(run)
    try:
        yield
    finally:
        places.release_on_behalf_of(run)
