"""The interface of a registry of peers, and a peer in it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from covenant.wire.types import AgentId, PeerSummary
from policy import base58

TOKEN_BYTES: Final = 32
# The visible part of a token: six characters, as in version 1.
PREFIX_LENGTH: Final = 6

Clock = Callable[[], int]
Random = Callable[[int], bytes]
Status = Literal["live", "revoked"]


@dataclass(slots=True, eq=False)
class PeerToken:
    """A token's digest, its owner and its lifetime. Only the store changes it."""

    digest: bytes
    token_prefix: str
    agent_id: AgentId
    registered_at_ms: int
    expires_at_ms: int | None = None
    revoked_at_ms: int | None = None

    def expired(self, now_ms: int) -> bool:
        """Whether it has expired: an entry that expires at t is still valid at t."""
        return self.expires_at_ms is not None and now_ms > self.expires_at_ms

    def live(self, now_ms: int) -> bool:
        """Whether its token is accepted."""
        return self.revoked_at_ms is None and not self.expired(now_ms)

    def summary(self) -> PeerSummary:
        """Return the peer in the form shown to an operator."""
        return PeerSummary(
            agent_id=self.agent_id,
            token_prefix=self.token_prefix,
            registered_at=self.registered_at_ms,
            revoked_at=self.revoked_at_ms,
            expires_at=self.expires_at_ms,
        )


@dataclass(frozen=True, slots=True)
class Enrolled:
    """A new token, returned only once, and its entry."""

    token: str
    entry: PeerToken

    def __repr__(self) -> str:
        return f"Enrolled({self.entry.token_prefix}...)"


@dataclass(frozen=True, slots=True)
class Rotation:
    """The operator's new token, returned only once, and the prefix of the old one."""

    token: str
    old_prefix: str
    new_prefix: str

    def __repr__(self) -> str:
        return f"Rotation({self.old_prefix}... to {self.new_prefix}...)"


@dataclass(frozen=True, slots=True)
class Listing:
    """Some peers, newest first. ``truncated``: there are more."""

    entries: Sequence[PeerToken]
    truncated: bool


class Peers(Protocol):
    """The registry. Lookups run in memory; a change is durable when its method returns."""

    async def authenticate(self, token_b58: str) -> PeerSummary | None:
        """Return the owner of a token; None for an unknown, revoked or expired one."""

    def admits(self, pubkey: str, token_prefix: str) -> bool:
        """Whether a token of this key with this prefix is still accepted."""

    def named(self, display: str) -> Sequence[PeerToken]:
        """Return the live entries of a display name."""

    def of(self, pubkey: str) -> Sequence[PeerToken]:
        """Return the live entries of a key."""

    def matching(self, prefix: str) -> Sequence[PeerToken]:
        """Return the entries, newest first, whose token has this prefix; a longer text must be a whole token."""

    def listing(self, limit: int, pubkey_prefix: str | None, status: Status | None) -> Listing:
        """Return the newest entries with this prefix of the key and this status."""

    def newly_expired(self) -> Sequence[PeerToken]:
        """Return the entries that expired since the last call."""

    def set_clock(self, now_ms: int) -> None:
        """Report from ``now_ms`` on again which entries expire."""

    async def enroll(self, agent: AgentId, expires_at_ms: int | None) -> Enrolled:
        """Create a token for a peer."""

    async def rotate_operator(self) -> Rotation:
        """Replace the operator's token; the old one is no longer accepted.

        Raises:
            errors.StoreError: it could not be written; the token in the operator's file still works.
        """

    async def revoke(self, entry: PeerToken) -> None:
        """Reject this token from now on."""

    async def purge(self, before_ms: int) -> int:
        """Remove entries that were revoked or expired before ``before_ms``. Returns their number."""

    async def close(self) -> None:
        """Close the files."""


def digest(token: str) -> bytes:
    """Return the SHA-256 of a token's text: it has 256 random bits, so that no salt is needed."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def mint(random: Random) -> str:
    """Generate a token."""
    return base58.encode(random(TOKEN_BYTES))
