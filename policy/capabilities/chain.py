"""Verify a chain of grants: it leads to the daemon's identity, and each grant is within the one above it.

A holder grants less of what it holds in one of two ways. Either it signs itself: then ``granted_by`` is its key. Or it
asks the daemon, which knows the caller and signs for it: then ``granted_by`` is the daemon's. In both the scope's
``parent_b58`` names the grant above, so that a holder of the tokens can check all of it offline.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from policy.capabilities import actions, scopes
from policy.capabilities.token import Token

MAX_DEPTH: Final = 8


class Signed(Struct, frozen=True):
    """A token and its signature in base58."""

    token: Token
    signature: str


def verify(links: Sequence[Signed], *, root: str, now_ms: int) -> str | None:
    """Return the reason why the first of ``links`` grants nothing, None if it grants.

    Each link is followed by the one above it, and the last is the daemon's own. ``root`` is the daemon's key.

    1. There are links, and not too many.
    2. Each is well formed, has not ended, and bears its grantor's signature.
    3. The last is granted by the daemon, and names none above it.
    4. Each other names the next, is granted by the next one's subject or by the daemon, and is within it.
    """
    # (1) a bounded chain
    if not 0 < len(links) <= MAX_DEPTH:
        return f"a chain has 1 to {MAX_DEPTH} grants"
    # (2) each by itself
    for link in links:
        if link.token.expired(now_ms):
            return "it has ended"
        reason = scopes.check(link.token.action, link.token.scope)
        if reason is not None:
            return reason
        if not link.token.verifies(link.signature):
            return "its signature does not verify"
    # (3) the root
    last = links[-1].token
    if last.granted_by != root or _names_parent(last):
        return "it is not granted by this daemon"
    # (4) each within the next
    for child, parent in itertools.pairwise(links):
        reason = step(child.token, parent, root=root)
        if reason is not None:
            return reason
    return None


def step(child: Token, parent: Signed, *, root: str) -> str | None:
    """Why ``child`` is no part of ``parent``: rule (4); None when it is."""
    if scopes.parent_of(child.scope) != parent.signature:
        return "it does not name the grant above it"
    if child.granted_by not in {parent.token.subject, root}:
        return "its grantor does not hold the grant above it"
    return narrower(child, parent.token)


def narrower(child: Token, parent: Token) -> str | None:
    """Why ``child`` allows more than ``parent``, or for longer; None when it does not."""
    if not actions.within(child.action, parent.action):
        return f"the grant that is held is of `{parent.action}`"
    if parent.expires_at is not None and (child.expires_at is None or child.expires_at > parent.expires_at):
        return "it would outlast the grant that is held"
    return scopes.within(parent.action, child.scope, parent.scope)


def _names_parent(token: Token) -> bool:
    return isinstance(token.scope, dict) and scopes.PARENT in token.scope
