"""What a registry of peers does, and the peer as it holds it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from covenant.wire.types import AgentId, PeerSummary
from policy import base58

TOKEN_BYTES: Final = 32
# What may be shown of a token: with version 1, six characters.
PREFIX_LENGTH: Final = 6

Clock = Callable[[], int]
Random = Callable[[int], bytes]
Status = Literal["live", "revoked"]


@dataclass(slots=True, eq=False)
class Entry:
    """A token's digest, whose it is and how long. The store alone changes it."""

    digest: bytes
    token_prefix: str
    agent_id: AgentId
    registered_at_ms: int
    expires_at_ms: int | None = None
    revoked_at_ms: int | None = None

    def expired(self, now_ms: int) -> bool:
        """Whether it has ended: one that ends at t still holds at t."""
        return self.expires_at_ms is not None and now_ms > self.expires_at_ms

    def live(self, now_ms: int) -> bool:
        """Whether its token lets somebody in."""
        return self.revoked_at_ms is None and not self.expired(now_ms)

    def summary(self) -> PeerSummary:
        """The peer as an operator sees it."""
        return PeerSummary(
            agent_id=self.agent_id,
            token_prefix=self.token_prefix,
            registered_at=self.registered_at_ms,
            revoked_at=self.revoked_at_ms,
            expires_at=self.expires_at_ms,
        )


@dataclass(frozen=True, slots=True)
class Enrolled:
    """A new token, said once, and its entry."""

    token: str
    entry: Entry

    def __repr__(self) -> str:
        return f"Enrolled({self.entry.token_prefix}...)"


@dataclass(frozen=True, slots=True)
class Rotation:
    """The operator's new token, said once, and the prefix of the one before."""

    token: str
    old_prefix: str
    new_prefix: str

    def __repr__(self) -> str:
        return f"Rotation({self.old_prefix}... to {self.new_prefix}...)"


@dataclass(frozen=True, slots=True)
class Listing:
    """Some peers, newest first, and whether there are more."""

    entries: Sequence[Entry]
    truncated: bool


class Peers(Protocol):
    """The registry. Looking up is in memory; what a change returned for is durable."""

    async def authenticate(self, token_b58: str) -> PeerSummary | None:
        """Whose token it is; None for nobody's, a revoked one and one that has ended."""

    def admits(self, pubkey: str, token_prefix: str) -> bool:
        """Whether a token of this key that begins so still lets somebody in."""

    def named(self, display: str) -> Sequence[Entry]:
        """The live entries of a display name."""

    def of(self, pubkey: str) -> Sequence[Entry]:
        """The live entries of a key."""

    def matching(self, prefix: str) -> Sequence[Entry]:
        """The entries, newest first, whose token begins so; a longer one is a whole token or nobody's."""

    def listing(self, limit: int, pubkey_prefix: str | None, status: Status | None) -> Listing:
        """The newest entries whose key begins so and whose status is that."""

    def newly_expired(self) -> Sequence[Entry]:
        """The entries that have ended since this was asked last."""

    async def enroll(self, agent: AgentId, expires_at_ms: int | None) -> Enrolled:
        """A token for somebody."""

    async def rotate_operator(self) -> Rotation:
        """Another token for the operator; the old one lets nobody in from then on.

        Raises:
            errors.StoreError: it could not be written; a token of the operator's file works all the same.
        """

    async def revoke(self, entry: Entry) -> None:
        """Let nobody in by this token from now on."""

    async def purge(self, before_ms: int) -> int:
        """Forget what was revoked or ended before; how many."""

    async def close(self) -> None:
        """Let go of the files."""


def digest(token: str) -> bytes:
    """The SHA-256 of a token's text: it has 256 random bits, so that no salt is needed."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def mint(random: Random) -> str:
    """A new token."""
    return base58.encode(random(TOKEN_BYTES))
