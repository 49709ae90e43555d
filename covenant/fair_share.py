"""Share a limited number of places among peers, so that no peer takes all of them.

A run takes minutes, a scan of the log depends on its rows, and a peer may send many requests at once. Without shares
the requests of one peer would take every place, and its next ones would queue before all others.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import anyio


@dataclass
class _Peer:
    places: anyio.CapacityLimiter
    coming: int = 0


class Shares:
    """``most`` places. Every peer without the key ``operator`` has at most half of them, and all those together at most
    three in four, so that the operator always finds one. A request waits first for its peer's own share. ``of_one`` is
    another bound of a peer than half of the places."""

    def __init__(self, most: int, *, operator: str = "", of_one: int | None = None) -> None:
        self._operator = operator
        self.of_one = max(1, most // 2) if of_one is None else of_one
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

    @contextlib.contextmanager
    def place_now(self, pubkey: str) -> Iterator[None]:
        """Hold a place during the block, without waiting for one. The operator too has at most ``of_one`` of these.

        Any other peer with places gets a further one only while more are free than it has. So some peers together
        cannot take all: half of what they left is there for the next one.

        Raises:
            anyio.WouldBlock: there is none for this peer now.
        """
        with self._counted(pubkey) as peer, contextlib.ExitStack() as stack:
            has = peer.places.borrowed_tokens
            if pubkey != self._operator and has and self._of_others.available_tokens <= has:
                raise anyio.WouldBlock
            for places in (peer.places, *([self._of_others] if pubkey != self._operator else []), self._all):
                this = object()
                places.acquire_on_behalf_of_nowait(this)
                stack.callback(places.release_on_behalf_of, this)
            yield

    @contextlib.asynccontextmanager
    async def _of(self, pubkey: str) -> AsyncIterator[None]:
        with self._counted(pubkey) as peer:
            async with _held(peer.places):
                yield

    @contextlib.contextmanager
    def _counted(self, pubkey: str) -> Iterator[_Peer]:
        """Keep what is known of a peer while it has or awaits a place."""
        peer = self._peers.setdefault(pubkey, _Peer(anyio.CapacityLimiter(self.of_one)))
        peer.coming += 1
        try:
            yield peer
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
