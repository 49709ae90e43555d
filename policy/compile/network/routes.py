"""Each destination of the compiled network back to the entry of the manifest that wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from msgspec import Struct

from policy.compile.artefacts import Cause
from policy.compile.causes import Origins
from policy.compile.network.destinations import DestinationRow, Destinations
from policy.grants.network import WITHOUT_TABLE
from policy.grants.sets import access, addresses, hostnames, spans
from policy.grants.sets.access import Access
from policy.manifest.permissions import DEFAULT_ASK_SECONDS, NetworkEntry

_PARENT = "asked for more"
# The protocols of an entry that cover a grant of each.
_COVERED_BY = {"tcp": ("tcp",), "tls": ("tls", "tcp"), "udp": ("udp",)}


class Traced(Struct, frozen=True):
    """The destinations, their rows, the cause of each row by its key, and how long each asked row is held (seconds)."""

    found: Destinations
    rows: tuple[DestinationRow, ...]
    causes: Mapping[str, Cause]
    seconds: Mapping[str, int]

    @classmethod
    def of(cls, found: Destinations, origins: Origins) -> Traced:
        """Trace every row.

        Raises:
            errors.UnexplainedError: nothing in the manifest covers one.
        """
        rows, entries = found.rows(), _Entries(origins)
        seconds = {row.key: entries.seconds(row) for row in rows if row.kind == "asked"}
        return cls(found, rows, {row.key: entries.cause(row) for row in rows}, seconds)


class _Entries:
    """The entries of a manifest, to be looked up by destination."""

    def __init__(self, origins: Origins) -> None:
        self._origins = origins
        self._entries = origins.manifest.permissions.network
        self._table = bool(self._entries) or origins.manifest.wrote("permissions.network")

    def cause(self, row: DestinationRow) -> Cause:
        """The entry that covers a destination, or the mode where the manifest has no table.

        A row may stand for neighbours that were written apart; then it is the first of them.
        """
        parent = "" if self._asked is None or row.key in self._asked else _PARENT
        if not self._table and self._by_mode(row):
            return self._origins.of("resources.network", parent=parent)
        index = self._exact.get((row.host, row.protocol, row.ports))
        if index is None:
            index = next((i for i, entry in enumerate(self._entries) if self._covers(i, entry, row)), None)
        if index is None:
            raise self._origins.uncovered("permissions.network", f"{row.host} {row.protocol}")
        return Cause("manifest", f"permissions.network[{index}]", row.host, parent)

    def seconds(self, row: DestinationRow) -> int:
        """How long a name is held for an operator: the least of the entries, a default where a parent asks alone."""
        asked = (one for i, one in enumerate(self._entries) if one.asked and self._covers(i, one, row))
        return min((one.ask_seconds for one in asked), default=DEFAULT_ASK_SECONDS)

    def _by_mode(self, row: DestinationRow) -> bool:
        allowed = WITHOUT_TABLE[self._origins.manifest.resources.network]
        within = not access.minus(Access.of(row.protocol, row.ports), allowed)
        return within and not spans.minus(row.where, addresses.PUBLIC)

    def _covers(self, index: int, entry: NetworkEntry, row: DestinationRow) -> bool:
        if entry.protocol not in _COVERED_BY[row.protocol] or not spans.meet(entry.ports, row.ports):
            return False
        if row.kind in ("name", "asked"):
            return entry.host == row.host or entry.host in hostnames.above(row.host)
        span = self._spans[index]
        return span is not None and bool(spans.meet((span,), row.where))

    @cached_property
    def _exact(self) -> dict[tuple[str, str, object], int]:
        return {(e.host, e.protocol, e.ports): i for i, e in reversed(tuple(enumerate(self._entries)))}

    @cached_property
    def _spans(self) -> tuple[tuple[int, int] | None, ...]:
        return tuple(addresses.parse(entry.host) for entry in self._entries)

    @cached_property
    def _asked(self) -> frozenset[str] | None:
        requested = self._origins.requested
        return None if requested is None else frozenset(row.key for row in Destinations.of(requested.network).rows())
