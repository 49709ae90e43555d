"""Scopes: whether one is well formed, what it admits, and whether one is within another.

``{}`` bounds nothing. Any other scope of a known namespace is an object with ``version`` 1, whose known fields are
checked when it is granted and again when it is used; fields that are not known are kept as signed notes, which a
narrower scope must repeat, since a later version may give them a meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from policy import base58
from policy.capabilities import actions, fields, token
from policy.capabilities.facts import RequestFacts

# The signature of the grant that this one narrows: within the scope, because that is what a grantor signs.
PARENT: Final = "parent_b58"
MAX_USES: Final = "max_uses"
_CARRIED_BY_ALL: Final = frozenset({"version", PARENT})
# A secret is named, never all of them.
_NEEDS: Final = {"secret.access": ("names", "name")}


def check(action: str, scope: Any) -> str | None:
    """Return why this scope of the action cannot be granted; None when it is well formed."""
    known = fields.NAMESPACES.get(actions.namespace(action))
    if scope == {} or known is None:
        return _unbounded(action, scope)
    if type(scope) is not dict:
        return "a scope is an object"
    if type(scope.get("version")) is not int or scope["version"] != 1:
        return "a scope that bounds something has `version` 1"
    if PARENT in scope and parent_of(scope) is None:
        return f"`{PARENT}` is no signature"
    for name in sorted(scope.keys() & known.keys()):
        # As in version 1, null bounds nothing.
        if scope[name] is not None and not known[name].check(scope[name]):
            return f"`{name}` is not {known[name].what}"
    return _of_tool(action, scope) or _unbounded(action, scope)


def notes(action: str, scope: Any) -> tuple[str, ...]:
    """Return the fields of a well-formed scope that bound nothing, sorted: they are kept as signed notes."""
    if not isinstance(scope, Mapping):
        return ()
    return tuple(sorted(scope.keys() - known_fields(action) - _CARRIED_BY_ALL))


def known_fields(action: str) -> frozenset[str]:
    """Return the names of the fields that can bound the action."""
    return frozenset(fields.NAMESPACES.get(actions.namespace(action), ()))


def admits(action: str, scope: Any, facts: RequestFacts) -> str | None:
    """Why a well-formed scope of the action does not admit the request; None when it does."""
    known = fields.NAMESPACES.get(actions.namespace(action))
    if known is None or scope == {}:
        return None
    for name in known:
        test = known[name].admits
        if (
            test is not None
            and scope.get(name) is not None
            and (reason := test(scope[name], facts, action)) is not None
        ):
            return reason
    return None


def admits_record(scope: Any, *, tier: str, record_id: str, created_at: int) -> bool:
    """Whether one record of memory may be shown under a scope of ``memory.read``."""
    facts = RequestFacts(tier=tier, record_id=record_id, created_at=created_at)
    return admits("memory.read", scope, facts) is None


def within(action: str, child: Any, parent: Any) -> str | None:
    """Why ``child`` admits more than ``parent``, field by field; None when it does not. Both are well formed."""
    if parent == {}:
        return None
    if not isinstance(parent, Mapping) or not isinstance(child, Mapping):
        return None if fields.same(child, parent) else "the scope is not the one that is held"
    known = fields.NAMESPACES.get(actions.namespace(action), {})
    for name in parent.keys() - _CARRIED_BY_ALL:
        if parent[name] is None and name in known:
            continue
        if name not in child or (child[name] is None and name in known):
            return f"`{name}` is bounded in the grant that is held"
        narrower = known[name].narrower if name in known else fields.same
        if not narrower(child[name], parent[name]):
            return f"`{name}` is wider than in the grant that is held"
    return None


def max_uses(action: str, scope: Any) -> int | None:
    """How often a well-formed grant may be used; None for any number."""
    if actions.namespace(action) != "tool" or not isinstance(scope, Mapping):
        return None
    found = scope.get(MAX_USES)
    return found if type(found) is int else None


def parent_of(scope: Any) -> str | None:
    """The signature of the grant that this one narrows."""
    if not isinstance(scope, Mapping) or not isinstance(found := scope.get(PARENT), str):
        return None
    try:
        base58.decode(found, length=token.SIGNATURE_BYTES)
    except ValueError:
        return None
    return found


def _of_tool(action: str, scope: Mapping[str, Any]) -> str | None:
    if actions.namespace(action) != "tool":
        return None
    if scope.get(MAX_USES) is not None and not action.startswith("tool.call."):
        return f"`{MAX_USES}` is counted for `tool.call.` alone"
    suffix = action.removeprefix("tool.call.").removeprefix("tool.")
    return f"`tool` is not `{suffix}`, as in the action" if (scope.get("tool") or suffix) != suffix else None


def _unbounded(action: str, scope: Any) -> str | None:
    needed = _NEEDS.get(action)
    if needed is not None and (type(scope) is not dict or all(scope.get(name) is None for name in needed)):
        return f"a grant of `{action}` has `{needed[0]}`"
    return None
