"""The interface of a store of grants, and a grant in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from covenant.wire.types import AgentId, Capability, SignedCapability
from policy.capabilities import scopes
from policy.capabilities.chain import Signed
from policy.capabilities.token import Token


@dataclass(slots=True, eq=False)
class Grant:
    """A grant in a store. Only the store changes it.

    ``generation`` counts how often an equal token was granted again after it was revoked or used up: an equal token has
    the same signature. ``sound`` is None until the token and its step to the grant above were verified. ``concerns``
    are the keys that may see it: subject, grantor, and the holder of the grant above.
    """

    token: Token
    signature: str
    subject_display: str
    granted_by_display: str
    granted_at_ms: int = 0
    generation: int = 0
    revoked_at_ms: int | None = None
    used: int = 0
    sound: bool | None = None
    concerns: frozenset[str] = frozenset()
    parent: str | None = field(init=False)
    max_uses: int | None = field(init=False)
    _signed: SignedCapability | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        # An empty scope has neither; nearly all grants have an empty scope.
        scope = self.token.scope
        self.parent = scopes.parent_of(scope) if scope else None
        self.max_uses = scopes.max_uses(self.token.action, scope) if scope else None

    @property
    def signed(self) -> SignedCapability:
        """The grant as it goes over the wire."""
        if self._signed is None:
            self._signed = to_wire(self.token, self.signature, self.subject_display, self.granted_by_display)
        return self._signed

    @property
    def link(self) -> Signed:
        """The grant as a link of a chain."""
        return Signed(self.token, self.signature)


@dataclass(frozen=True, slots=True)
class Use:
    """A counted use of a metered grant: number ``used`` of ``max_uses``."""

    signature: str
    action: str
    max_uses: int
    used: int


def to_wire(token: Token, signature: str, subject_display: str, granted_by_display: str) -> SignedCapability:
    """Combine a token and its signature with the display names."""
    return SignedCapability(
        capability=Capability(
            subject=AgentId(display=subject_display, pubkey=token.subject),
            action=token.action,
            scope=token.scope,
            granted_by=AgentId(display=granted_by_display, pubkey=token.granted_by),
            expires_at=token.expires_at,
        ),
        signature=signature,
    )


def of_wire(signed: SignedCapability) -> Token:
    """Return the token of a grant in its wire format."""
    capability = signed.capability
    return Token(
        subject=capability.subject.pubkey,
        action=capability.action,
        scope=capability.scope,
        granted_by=capability.granted_by.pubkey,
        expires_at=capability.expires_at,
    )


class Capabilities(Protocol):
    """Grants by subject. Lookups run in memory; a change is durable when its method returns."""

    def find(self, pubkey: str, action: str, now_ms: int) -> SignedCapability | None:
        """Return the first effective grant, used up or not, of exactly this action for this key."""

    def candidates(self, pubkey: str, action: str, now_ms: int) -> Sequence[Grant]:
        """Return all grants that ``find`` considers, the daemon's own before those that other holders gave."""

    def lineage(self, signature: str) -> Sequence[Grant]:
        """Return the grant and those above it, or an empty sequence if one of them is missing."""

    def get(self, signature: str) -> Grant | None:
        """Return a grant, effective or not."""

    def effective(self, grant: Grant, now_ms: int) -> bool:
        """Whether the grant and all those above it verify, and none is revoked, expired or used up."""

    def check(self, signed: SignedCapability, now_ms: int) -> None:
        """Check if ``grant`` would accept this grant.

        Raises:
            errors.CapabilityInvalidError: as ``grant``.
            errors.GrantRefusedError: as ``grant``.
        """

    async def grant(self, signed: SignedCapability, now_ms: int) -> Grant:
        """Store a grant. An equal grant that is effective is left unchanged.

        Raises:
            errors.CapabilityInvalidError: it, or the chain of grants above it, does not verify.
            errors.GrantRefusedError: its subject, or the grant above it, has the maximum number of grants.
        """

    async def revoke(self, signature: str, now_ms: int) -> Sequence[Grant]:
        """Revoke a grant and those below it. Returns the grants that this call ended."""

    def recent(self, limit: int, pubkey: str) -> Sequence[Grant]:
        """Return the newest grants, not revoked, with the key as subject, grantor or holder of the grant above."""

    def usage(self, limit: int, pubkey: str) -> Sequence[Grant]:
        """Return the newest grants for the key, including revoked ones."""

    async def purge(self, before_ms: int, now_ms: int) -> int:
        """Remove grants that were revoked or ended before ``before_ms``, and those below. Returns their number."""

    def set_clock(self, now_ms: int) -> None:
        """Offer grants again that had ended only by a clock that was ahead."""

    def left(self, signatures: Sequence[str]) -> None:
        """Check if ``use`` would succeed now. A later ``use`` may still fail.

        Raises:
            errors.CapabilityExhaustedError: as ``use``.
        """

    async def use(self, signatures: Sequence[str]) -> Sequence[Use]:
        """Count one use of each metered grant and of each metered one above it, before the act: of all or of none.

        Returns for each grant the count of itself, or of the next metered one above it.

        Raises:
            errors.CapabilityExhaustedError: one is used up; nothing was counted. ``details`` has ``use``.
        """

    async def close(self) -> None:
        """Close the files."""
