"""The name side of network grants: which access each host name has.

A pattern is an exact name, ``*.name`` (every name below it, at any depth, not the name itself) or ``*`` (every name).
Patterns nest or are disjoint, so the patterns that hold a name are a chain; each is kept with what it adds to those
above it, which makes the form unique for its meaning. A name only ever leads to public addresses (decisions.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from policy import errors
from policy.grants.sets import access
from policy.grants.sets.access import Access
from policy.manifest import text

EVERY = "*"
Names = tuple[tuple[str, Access], ...]  # sorted by pattern; each access is what the pattern adds

_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")


def check(host: str) -> str:
    """``host`` itself when it is a name or ``*.name`` in lower case.

    Raises ManifestError otherwise; a last label that is a number is refused, since resolvers read such a name as
    an address.
    """
    labels = host.removeprefix("*.").split(".")
    if len(host) > 253 or not all(map(_LABEL.fullmatch, labels)) or _NUMBER.fullmatch(labels[-1]):
        raise errors.ManifestError(
            f"host {text.quote(host)} is no name, `*.name`, address or CIDR block",
            hint="write names in lower-case ASCII",
        )
    return host


def above(pattern: str) -> Iterator[str]:
    """The patterns that hold all names of ``pattern``, the nearest first, without itself."""
    if pattern == EVERY:
        return
    name = pattern.removeprefix("*.")
    dot = name.find(".")
    while dot >= 0:
        yield "*" + name[dot:]
        dot = name.find(".", dot + 1)
    yield EVERY


def total(own: Mapping[str, Access], pattern: str) -> Access:
    """Everything that ``pattern`` may: what it adds and what the patterns above it allow."""
    how = own.get(pattern, access.NOTHING)
    for parent in above(pattern):
        if parent in own:
            how = access.union(how, own[parent])
    return how


def _nest(patterns: Iterable[str]) -> bool:
    """Whether one of them may hold names of another: only a star does."""
    return any(pattern.startswith("*") for pattern in patterns)


def _totals(own: Mapping[str, Access], patterns: Iterable[str]) -> dict[str, Access]:
    """``total`` of each pattern; plain names alone need no look at what stands above them."""
    if _nest(own):
        return {pattern: total(own, pattern) for pattern in patterns}
    return {pattern: own.get(pattern, access.NOTHING) for pattern in patterns}


def _canonical(totals: Mapping[str, Access]) -> Names:
    """Each pattern with what it adds to the nearest one above it; ``totals`` grow towards the leaves."""
    out: list[tuple[str, Access]] = []
    nested = _nest(totals)
    for pattern in sorted(totals):
        parent = next((p for p in above(pattern) if p in totals), None) if nested else None
        adds = access.minus(totals[pattern], totals[parent]) if parent else totals[pattern]
        if adds:
            out.append((pattern, adds))
    return tuple(out)


def join(parts: Iterable[tuple[str, Access]]) -> Names:
    """The union of patterns with their accesses."""
    own: dict[str, Access] = {}
    for pattern, how in parts:
        own[pattern] = access.union(own.get(pattern, access.NOTHING), how)
    return _canonical(_totals(own, own))


def meet(a: Names, b: Names) -> Names:
    """Return the names that both allow.

    Between two patterns of either side nothing changes, so their patterns suffice.
    """
    if a == b:
        return a
    mine, theirs = dict(a), dict(b)
    patterns = mine.keys() | theirs.keys()
    ours, others = _totals(mine, patterns), _totals(theirs, patterns)
    return _canonical({p: access.meet(ours[p], others[p]) for p in patterns})


def minus(a: Names, b: Names) -> Names:
    """The patterns of ``a``, whole, with the access that ``b`` does not give all their names."""
    theirs = _totals(dict(b), (pattern for pattern, _ in a))
    left = [(pattern, access.minus(how, theirs[pattern])) for pattern, how in a]
    return tuple((pattern, how) for pattern, how in left if how)
