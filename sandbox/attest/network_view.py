"""Findings of one look into the network namespaces of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from policy.connections import Connection


@dataclass(frozen=True, slots=True)
class Space:
    """One namespace: the supervisor's descriptor of it, its inode, and what was in it when it was made: things, and the
    number of the last transaction of rules."""

    fd: int
    inode: int
    generation: int
    lines: tuple[str, ...]


@dataclass
class Seen:
    """Listings by what was listed, each with the number of the transaction after which it was taken."""

    listings: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    host: tuple[tuple[str, int], str, bytes] | None = None


@dataclass(frozen=True, slots=True)
class Inside:
    """What one namespace holds now; ``listing`` is empty where there was no transaction since it was made.
    ``connections`` are those that the kernel tracks, ``expected`` is the number that it would take for related."""

    listing: bytes
    lines: frozenset[str]
    settings: Mapping[str, str]
    connections: tuple[Connection, ...] = ()
    expected: int = 0


@dataclass(frozen=True, slots=True)
class View:
    """What was found: in the gateway's namespace, in the agent's, of the host's own table (a digest of how it reads),
    of the run's device there, of the connections that the host tracks for the run, and of the rules of others there
    that touch it."""

    gateway: Inside
    agent: Inside
    host: str
    device: frozenset[str] = frozenset()
    connections: tuple[Connection, ...] = ()
    touching: frozenset[str] = frozenset()
