"""Grants that last as long as the process: for tests, and what the durable store decides by."""

from __future__ import annotations

from collections.abc import Sequence

from covenant.stores.capabilities import interface
from covenant.stores.capabilities.book import GrantBook
from covenant.stores.capabilities.interface import Grant, Use
from covenant.wire.types import SignedCapability


class InMemoryCapabilities:
    """``interface.Capabilities`` without a file. ``root`` is the daemon's key."""

    def __init__(self, root: str) -> None:
        self._book = GrantBook(root)

    def find(self, pubkey: str, action: str, now_ms: int) -> SignedCapability | None:
        """See ``interface.Capabilities``."""
        held = self._book.candidates(pubkey, action, now_ms)
        return held[0].signed if held else None

    def candidates(self, pubkey: str, action: str, now_ms: int) -> Sequence[Grant]:
        """See ``interface.Capabilities``."""
        return self._book.candidates(pubkey, action, now_ms)

    def lineage(self, signature: str) -> Sequence[Grant]:
        """See ``interface.Capabilities``."""
        return self._book.lineage(signature)

    def get(self, signature: str) -> Grant | None:
        """See ``interface.Capabilities``."""
        return self._book.get(signature)

    def effective(self, grant: Grant, now_ms: int) -> bool:
        """See ``interface.Capabilities``."""
        return self._book.effective(grant, now_ms)

    def set_clock(self, now_ms: int) -> None:
        """See ``interface.Capabilities``."""
        self._book.set_clock(now_ms)

    def check(self, signed: SignedCapability, now_ms: int) -> None:
        """See ``interface.Capabilities``."""
        self._book.check(new(signed, now_ms), now_ms)

    async def grant(self, signed: SignedCapability, now_ms: int) -> Grant:
        """See ``interface.Capabilities``."""
        made = new(signed, now_ms)
        present = self._book.check(made, now_ms)
        if present is None:
            self._book.add(made)
        return present or made

    async def revoke(self, signature: str, now_ms: int) -> Sequence[Grant]:
        """See ``interface.Capabilities``."""
        ended = self._book.descent(signature)
        for grant in ended:
            self._book.bury(grant.signature, grant.generation, now_ms)
        return ended

    def recent(self, limit: int, pubkey: str) -> Sequence[Grant]:
        """See ``interface.Capabilities``."""
        return self._book.recent(limit, pubkey)

    def usage(self, limit: int, pubkey: str) -> Sequence[Grant]:
        """See ``interface.Capabilities``."""
        return self._book.usage(limit, pubkey)

    async def purge(self, before_ms: int, now_ms: int) -> int:
        """See ``interface.Capabilities``."""
        dropped = self._book.to_purge(before_ms, now_ms)
        self._book.drop(dropped)
        return len(dropped)

    def left(self, signatures: Sequence[str]) -> None:
        """See ``interface.Capabilities``."""
        self._book.left(signatures)

    async def use(self, signatures: Sequence[str]) -> Sequence[Use]:
        """See ``interface.Capabilities``."""
        self._book.count(signatures)
        return self._book.uses(signatures)

    async def close(self) -> None:
        """See ``interface.Capabilities``."""


def new(signed: SignedCapability, now_ms: int) -> Grant:
    """A grant that is not in a store yet."""
    capability = signed.capability
    return Grant(
        token=interface.of_wire(signed),
        signature=signed.signature,
        subject_display=capability.subject.display,
        granted_by_display=capability.granted_by.display,
        granted_at_ms=now_ms,
    )
