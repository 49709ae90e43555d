"""What a store of grants does, and the grant as it holds it."""

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
    """A grant in a store. The store alone changes it.

    ``generation`` counts how often the very same token was granted anew after it was revoked or used up: the same
    token has the same signature. ``sound`` is None until the token and its step to the grant above were verified.
    ``concerns`` are the keys to which it is shown: subject, grantor, and who holds the grant above.
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
        # An empty scope says neither; nearly all of many grants have one.
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
    """One use of a metered grant that was counted: the ``used``-th of ``max_uses``."""

    signature: str
    action: str
    max_uses: int
    used: int


def to_wire(token: Token, signature: str, subject_display: str, granted_by_display: str) -> SignedCapability:
    """A token and its signature with the names that people read."""
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
    """The token of what came over the wire."""
    capability = signed.capability
    return Token(
        subject=capability.subject.pubkey,
        action=capability.action,
        scope=capability.scope,
        granted_by=capability.granted_by.pubkey,
        expires_at=capability.expires_at,
    )


class Capabilities(Protocol):
    """Grants by whom they are for. Looking up is in memory; what a change returned for is durable."""

    def find(self, pubkey: str, action: str, now_ms: int) -> SignedCapability | None:
        """The first grant that holds now, used up or not, of this very action for this key."""

    def candidates(self, pubkey: str, action: str, now_ms: int) -> Sequence[Grant]:
        """All of them as ``find``, the daemon's own before those that other holders gave."""

    def lineage(self, signature: str) -> Sequence[Grant]:
        """The grant and those above it, or nothing where one of them is missing."""

    def get(self, signature: str) -> Grant | None:
        """A grant, whether it holds or not."""

    def effective(self, grant: Grant, now_ms: int) -> bool:
        """Whether neither the grant nor one above it was revoked, has ended, is used up or does not verify."""

    def check(self, signed: SignedCapability, now_ms: int) -> None:
        """Whether ``grant`` would take it.

        Raises:
            errors.CapabilityInvalidError: as ``grant``.
            errors.GrantRefusedError: as ``grant``.
        """

    async def grant(self, signed: SignedCapability, now_ms: int) -> Grant:
        """Keep a grant. One that is there and holds is left as it is.

        Raises:
            errors.CapabilityInvalidError: it, or the chain of grants above it, does not verify.
            errors.GrantRefusedError: its subject, or the grant above it, has as many as one may have.
        """

    async def revoke(self, signature: str, now_ms: int) -> Sequence[Grant]:
        """End a grant and those below it; which were ended now."""

    def recent(self, limit: int, pubkey: str) -> Sequence[Grant]:
        """The newest that were not revoked of which the key is the subject, grantor or holder above."""

    def usage(self, limit: int, pubkey: str) -> Sequence[Grant]:
        """The newest for the key, revoked ones too."""

    async def purge(self, before_ms: int, now_ms: int) -> int:
        """Forget what was revoked or has ended before, and what stood below; how many."""

    def left(self, signatures: Sequence[str]) -> None:
        """Whether ``use`` would count now. It promises nobody that it will.

        Raises:
            errors.CapabilityExhaustedError: as ``use``.
        """

    async def use(self, signatures: Sequence[str]) -> Sequence[Use]:
        """Count one use of each metered grant, and of each metered one above it, before the act: of all, or of none.
        What is counted of each: of itself, or of the next above it that is metered.

        Raises:
            errors.CapabilityExhaustedError: one is used up; nothing was counted. ``details`` has ``use``.
        """

    async def close(self) -> None:
        """Let go of the files."""
