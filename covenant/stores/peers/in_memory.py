"""A registry that lasts as long as the process: for tests, and what the durable one looks up in."""

from __future__ import annotations

import os
from collections.abc import Sequence

from covenant.stores.peers.book import TokenBook
from covenant.stores.peers.interface import (
    PREFIX_LENGTH,
    Clock,
    Enrolled,
    Listing,
    PeerToken,
    Random,
    Rotation,
    Status,
    digest,
)
from covenant.wire.types import AgentId, PeerSummary


class InMemoryPeers:
    """``interface.Peers`` without a file. ``operator_token`` is the operator's, which the durable one has in a file."""

    def __init__(self, operator: AgentId, now_ms: Clock, *, random: Random = os.urandom) -> None:
        self._operator = operator
        self._now_ms = now_ms
        self._random = random
        self._book = TokenBook()
        self.operator_token = self._book.mint(random)
        self._book.add(self._entry(self.operator_token, operator, None))

    async def authenticate(self, token_b58: str) -> PeerSummary | None:
        """See ``interface.Peers``."""
        entry = self._book.lookup(token_b58, self._now_ms())
        return entry.summary() if entry is not None else None

    def admits(self, pubkey: str, token_prefix: str) -> bool:
        """See ``interface.Peers``."""
        named, now_ms = self._book.of_prefix(token_prefix), self._now_ms()
        return any(entry.agent_id.pubkey == pubkey and entry.live(now_ms) for entry in named)

    def named(self, display: str) -> Sequence[PeerToken]:
        """See ``interface.Peers``."""
        now_ms = self._now_ms()
        return [entry for entry in self._book if entry.agent_id.display == display and entry.live(now_ms)]

    def of(self, pubkey: str) -> Sequence[PeerToken]:
        """See ``interface.Peers``."""
        now_ms = self._now_ms()
        return [entry for entry in self._book if entry.agent_id.pubkey == pubkey and entry.live(now_ms)]

    def matching(self, prefix: str) -> Sequence[PeerToken]:
        """See ``interface.Peers``."""
        return self._book.matching(prefix)

    def listing(self, limit: int, pubkey_prefix: str | None, status: Status | None) -> Listing:
        """See ``interface.Peers``."""
        return self._book.listing(limit, pubkey_prefix, status, self._now_ms())

    def newly_expired(self) -> Sequence[PeerToken]:
        """See ``interface.Peers``."""
        return self._book.newly_expired(self._now_ms())

    def set_clock(self, now_ms: int) -> None:
        """See ``interface.Peers``."""
        self._book.set_clock(now_ms)

    async def enroll(self, agent: AgentId, expires_at_ms: int | None) -> Enrolled:
        """See ``interface.Peers``."""
        token = self._book.mint(self._random)
        entry = self._entry(token, agent, expires_at_ms)
        self._book.add(entry)
        return Enrolled(token, entry)

    async def rotate_operator(self) -> Rotation:
        """See ``interface.Peers``."""
        old, new = self.operator_token, self._book.mint(self._random)
        self._book.add(self._entry(new, self._operator, None))
        self.operator_token = new
        self._book.bury(digest(old), self._now_ms())
        return Rotation(new, old[:PREFIX_LENGTH], new[:PREFIX_LENGTH])

    async def revoke(self, entry: PeerToken) -> None:
        """See ``interface.Peers``."""
        self._book.bury(entry.digest, self._now_ms())

    async def purge(self, before_ms: int) -> int:
        """See ``interface.Peers``."""
        over = self._book.over(before_ms, self._now_ms())
        self._book.drop(over)
        return len(over)

    async def close(self) -> None:
        """See ``interface.Peers``."""

    def _entry(self, token: str, agent: AgentId, expires_at_ms: int | None) -> PeerToken:
        return PeerToken(digest(token), token[:PREFIX_LENGTH], agent, self._now_ms(), expires_at_ms)
