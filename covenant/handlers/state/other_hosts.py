"""The other hosts that a daemon knows, and the envelopes of theirs that it took."""

from __future__ import annotations

from dataclasses import dataclass

from covenant.providers.known_hosts import KnownHosts
from covenant.stores.mailbox.seen_envelopes import SeenEnvelopes


@dataclass(frozen=True, slots=True)
class OtherHosts:
    """The known hosts, and the store of envelopes that were taken."""

    known: KnownHosts
    seen: SeenEnvelopes
