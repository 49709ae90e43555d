"""Names of actions: what one looks like, and which grant of one stands for another.

There are no wildcards. An action stands for another in one case only: ``memory.read`` for reading one tier.
"""

from __future__ import annotations

import re
from typing import Final

MAX_LENGTH: Final = 512
TIERS: Final = ("working", "episodic", "longterm")

# ASCII alone: two actions that look alike are alike.
_ACTION: Final = re.compile(r"[a-z0-9_]+(\.[A-Za-z0-9_@:/+-]+)+\Z")
_READ: Final = "memory.read"
_READS: Final = {f"{_READ}.{tier}": tier for tier in TIERS}


def well_formed(action: str) -> bool:
    """Whether it can be an action's name: dot-separated ASCII labels after a namespace."""
    return len(action) <= MAX_LENGTH and _ACTION.match(action) is not None


def namespace(action: str) -> str:
    """Return the part before the first dot."""
    return action.partition(".")[0]


def verb(action: str) -> str:
    """The second label: ``purge`` of ``memory.purge``."""
    return action.split(".", 2)[1] if "." in action else ""


def standing_for(action: str, tier: str | None = None) -> tuple[str, ...]:
    """The actions whose grants stand for ``action``, itself first; ``tier`` is the one that is read."""
    if action in _READS:
        return (action, _READ)
    if action == _READ and tier in TIERS:
        return (_READ, f"{_READ}.{tier}")
    return (action,)


def within(action: str, parent: str) -> bool:
    """Whether ``action`` is ``parent``, or a part of it."""
    return action == parent or (parent == _READ and action in _READS)
