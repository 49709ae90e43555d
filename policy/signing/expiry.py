"""When trust roots, keys, envelopes, grants and tokens end, with a warning two weeks ahead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct

from policy.signing.root import TrustRoot

_DAY_MS = 86_400_000
# The warning comes so long before the end.
SOON_MS = 14 * _DAY_MS


class Expiry(Struct, frozen=True):
    """Something that ends. ``what`` is a kind (trust_root, key, envelope, grant, token), ``name`` its name."""

    what: str
    name: str
    expires_at_ms: int

    def line(self, now_ms: int) -> str:
        """Return it in words."""
        named = f"{self.what.replace('_', ' ')}{f' `{self.name}`' if self.name else ''}"
        left = self.expires_at_ms - now_ms
        if left <= 0:
            return f"{named} has expired"
        return f"{named} expires in {left // _DAY_MS} days" if left >= _DAY_MS else f"{named} expires within a day"


def of_root(root: TrustRoot) -> Iterator[Expiry]:
    """Yield the end of a trust root, and of each of its keys that ends before it."""
    yield Expiry("trust_root", "", root.document.expires_at)
    for key in root.keys:
        if key.expires_at < root.document.expires_at:
            yield Expiry("key", key.name, key.expires_at)


def soon(found: Iterable[Expiry], now_ms: int) -> list[Expiry]:
    """Return what has ended or ends within ``SOON_MS``, the first to end first."""
    return sorted(
        (one for one in found if one.expires_at_ms - now_ms < SOON_MS), key=lambda one: (one.expires_at_ms, one.name)
    )
