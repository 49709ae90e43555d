"""Findings of one look into the network namespaces of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec import Struct

from policy.connections import Connection


class Space(Struct, frozen=True):
    """One namespace: the supervisor's descriptor, the inode, and the content when it was made.

    ``lines`` are its objects; ``generation`` is the number of the last transaction of rules.
    """

    fd: int
    inode: int
    generation: int
    lines: tuple[str, ...]


@dataclass
class ListingCache:
    """Cache of listings by name, each with the number of the last transaction before it was taken."""

    listings: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    host: tuple[tuple[str, int], str, bytes] | None = None


class Inside(Struct, frozen=True):
    """Current content of one namespace. ``listing`` is empty if there was no transaction since it was made.

    ``connections`` are those that the kernel tracks. ``expected`` is the number of its conntrack expectations.
    """

    listing: bytes
    lines: frozenset[str]
    settings: Mapping[str, str]
    connections: tuple[Connection, ...] = ()
    expected: int = 0


class View(Struct, frozen=True):
    """Findings in the gateway's namespace, in the agent's and on the host.

    ``host`` is a digest of the listing of the host's own table, ``device`` describes the run's device there.
    ``connections`` are those that the host tracks for the run. ``touching`` are rules of other programs that match it.
    """

    gateway: Inside
    agent: Inside
    host: str
    device: frozenset[str] = frozenset()
    connections: tuple[Connection, ...] = ()
    touching: frozenset[str] = frozenset()
