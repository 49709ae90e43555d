"""The index of all tokens, by digest."""

from __future__ import annotations

import hmac
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

from covenant.stores.peers.interface import PREFIX_LENGTH, Listing, PeerToken, Random, Status, digest, mint

_TRIES = 1000


class TokenBook:
    """Entries by the digest of their token, the newest last."""

    def __init__(self) -> None:
        self._entries: dict[bytes, PeerToken] = {}
        # Several entries of one prefix occur only in version 1's registries.
        self._named: defaultdict[str, list[PeerToken]] = defaultdict(list)
        self._noted_ms = 0

    def __iter__(self) -> Iterator[PeerToken]:
        return iter(self._entries.values())

    def lookup(self, token: str, now_ms: int) -> PeerToken | None:
        """Return the live entry of a token.

        Compares digests of secrets with 256 random bits, so its duration reveals nothing about a secret.
        """
        asked = digest(token)
        entry = self._entries.get(asked)
        if entry is None or not hmac.compare_digest(entry.digest, asked):
            return None
        return entry if entry.live(now_ms) else None

    def add(self, entry: PeerToken) -> None:
        """Add an entry; an existing one stays unchanged."""
        if entry.digest not in self._entries:
            self._entries[entry.digest] = entry
            self._named[entry.token_prefix].append(entry)

    def bury(self, token_digest: bytes, revoked_at_ms: int) -> None:
        """Revoke an entry; only the first time counts."""
        entry = self._entries.get(token_digest)
        if entry is not None and entry.revoked_at_ms is None:
            entry.revoked_at_ms = revoked_at_ms

    def newest(self) -> Iterator[PeerToken]:
        """Iterate over all entries, the last registered first."""
        return reversed(self._entries.values())

    def of_prefix(self, token_prefix: str) -> Sequence[PeerToken]:
        """Return the entries with exactly this prefix."""
        return self._named.get(token_prefix, ())

    def matching(self, prefix: str) -> list[PeerToken]:
        """See ``interface.Peers``."""
        if len(prefix) > PREFIX_LENGTH:
            found = self._entries.get(digest(prefix))
            return [found] if found is not None else []
        return [entry for entry in self.newest() if entry.token_prefix.startswith(prefix)]

    def listing(self, limit: int, pubkey_prefix: str | None, status: Status | None, now_ms: int) -> Listing:
        """See ``interface.Peers``."""
        asked = (
            entry
            for entry in self.newest()
            if entry.agent_id.pubkey.startswith(pubkey_prefix or "") and _has(entry, status, now_ms)
        )
        found = list(itertools.islice(asked, limit + 1))
        return Listing(found[:limit], len(found) > limit)

    def newly_expired(self, now_ms: int) -> list[PeerToken]:
        """See ``interface.Peers``."""
        since, self._noted_ms = self._noted_ms, max(now_ms, self._noted_ms)
        return [
            entry
            for entry in self
            if entry.expires_at_ms is not None
            and entry.revoked_at_ms is None
            and since <= entry.expires_at_ms < self._noted_ms
        ]

    def set_clock(self, now_ms: int) -> None:
        """See ``interface.Peers``."""
        self._noted_ms = min(self._noted_ms, now_ms)

    def over(self, before_ms: int, now_ms: int) -> list[PeerToken]:
        """Return the entries that were revoked or expired before ``before_ms``."""
        return [
            entry
            for entry in self
            if (entry.revoked_at_ms is not None and entry.revoked_at_ms < before_ms)
            # A cut-off in the future removes no entry that still admits its peer.
            or (entry.expires_at_ms is not None and entry.expires_at_ms < before_ms and entry.expired(now_ms))
        ]

    def drop(self, entries: Sequence[PeerToken]) -> None:
        """Remove entries."""
        for entry in entries:
            self._entries.pop(entry.digest, None)
            self._named[entry.token_prefix].remove(entry)
            if not self._named[entry.token_prefix]:
                del self._named[entry.token_prefix]

    def mint(self, random: Random) -> str:
        """Generate a token with an unused prefix, so that the prefix alone identifies it."""
        made = (mint(random) for _ in range(_TRIES))
        return next(token for token in made if token[:PREFIX_LENGTH] not in self._named)


def _has(entry: PeerToken, status: Status | None, now_ms: int) -> bool:
    if status == "revoked":
        return entry.revoked_at_ms is not None
    return status is None or entry.live(now_ms)
