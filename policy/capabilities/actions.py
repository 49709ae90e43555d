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
# The actions that requests of the daemon need; tests/unit/policy/capabilities/test_actions.py compares its handlers.
NAMED: Final = (
    _READ,
    *_READS,
    "memory.write",
    "memory.purge",
    *(f"memory.{what}.{mode}" for what in ("repair", "compact", "backfill") for mode in ("dry_run", "apply")),
    "settlement.backfill.dry_run",
    "settlement.backfill.apply",
    "a2a.repair.requeue",
    "a2a.repair.force_error",
    "a2a.compact",
    "audit.purge",
    "capabilities.purge",
    "chain.batches",
    "chain.flush",
    "chain.receipts",
    "identity.sign",
    "peers.list",
    "peers.purge",
    "peers.revoke",
    "secret.access",
)
# Beginnings of actions that end in the name of a tool, a peer or a secret.
OPEN: Final = ("tool.call.", "a2a.send.", "a2a.recv.", "a2a.respond.", "secret.access.")
_CLOSED: Final = frozenset(action.partition(".")[0] for action in NAMED)


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


def known(action: str) -> bool:
    """Whether a request of the daemon may need the action. Packages may require others of their callers."""
    return action in NAMED or action.startswith(OPEN)


def may_mean(action: str) -> tuple[str, ...]:
    """Return the known actions that an unknown one may be a misspelling of, with its own name of a tool or peer."""
    found = list(NAMED)
    for begins in OPEN:
        *labels, name = action.split(".", begins.count("."))
        if len(labels) == begins.count("."):
            found.append(begins + name)
    return tuple(found)


def closed(action: str) -> bool:
    """Whether the action is in a namespace of which all actions are known, apart from those of packages."""
    return namespace(action) in _CLOSED
