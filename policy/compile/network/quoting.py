"""The one door from a string to the text of an nft ruleset.

What a manifest writes never stands in that text: addresses, ports and rates are printed from integers, and sets,
counters and chains have names of ours, digests among them. Each other string goes through ``name`` or
``quoted``, which refuse every character that could end a word, a string, a statement or a block.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re

from policy.grants.sets.spans import Spans

# Fits an interface (IFNAMSIZ is 16, linux/if.h) and every name of a set, a counter or a chain.
_WORD = re.compile(r"[a-z][a-z0-9_]{0,31}", re.ASCII)
# Where IPv6 begins on the line of policy.grants.sets.addresses.
_V6_BASE = 2**33
_PREFIX = b"covenant-nft-name-v1\n"


def name(text: str) -> str:
    """A bare word: the name of a set, counter or chain.

    Raises:
        ValueError: it is no word of 1 to 32 of ``a-z 0-9 _`` that begins with a letter.
    """
    if not _WORD.fullmatch(text):
        raise ValueError("a name of the ruleset is 1 to 32 of a-z, 0-9 and _, a letter first")
    return text


def quoted(text: str) -> str:
    """A string in double quotes, of the same words: nft knows no escape inside one (nft(8), lexical conventions)."""
    return f'"{name(text)}"'


def digest(*parts: str) -> str:
    """16 hex digits that stand for ``parts``; no two lists of parts are the same bytes."""
    hashed = hashlib.sha256(_PREFIX)
    for part in parts:
        raw = part.encode()
        hashed.update(b"%d:" % len(raw))
        hashed.update(raw)
    return hashed.hexdigest()[:16]


def address(point: int) -> str:
    """A point of the line of policy.grants.sets.addresses, as text."""
    if point >= _V6_BASE:
        return str(ipaddress.IPv6Address(point - _V6_BASE))
    return f"{point >> 24 & 255}.{point >> 16 & 255}.{point >> 8 & 255}.{point & 255}"


def elements(where: Spans) -> str:
    """Addresses as the elements of an interval set: ``a`` or ``a-b``."""
    return ", ".join(address(a) if a == b else f"{address(a)}-{address(b)}" for a, b in where)


def ports(of: Spans) -> str:
    """Ports as an anonymous set: ``{ 80, 8000-8100 }``."""
    return "{ " + ", ".join(f"{a:d}" if a == b else f"{a:d}-{b:d}" for a, b in of) + " }"
