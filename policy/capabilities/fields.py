"""The fields of scopes, one table: how each must look, when one value of it is less than another, and what it asks of
a request.

A test answers None where the field admits the request, and says why not otherwise. What a request does not name, a
field that bounds it does not admit. Equality is JSON's: ``1`` is not ``true``, and two Unicode forms are two texts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec import Struct

from policy import base58
from policy.capabilities import actions, token
from policy.capabilities.facts import RequestFacts

Test = Callable[[Any, RequestFacts, str], str | None]

# The greatest integer that every reader of JSON keeps exactly (RFC 8785, section 3.2.2.3).
_INT_END: Final = 2**53
_RESOURCES: Final = frozenset({"compute", "memory", "tool", "message", "registration"})
_RISKS: Final = {"idempotent": "idempotent", "operator-accepted": "accepted", "operator_accepted": "accepted"}
_TIERS: Final = {tier: tier for tier in actions.TIERS} | {"long-term": "longterm", "long_term": "longterm"}
_HEX: Final = frozenset("0123456789abcdef")
_BASE58: Final = frozenset(base58.ALPHABET)


class Field(Struct, frozen=True):
    """``what`` says how a value looks; ``narrower(child, parent)``; ``admits`` None where the field bounds nothing."""

    what: str
    check: Callable[[Any], bool]
    narrower: Callable[[Any, Any], bool]
    admits: Test | None


def same(one: Any, other: Any) -> bool:
    """Whether two values of JSON are one."""
    try:
        return token.canonical_scope(one) == token.canonical_scope(other)
    except token.MalformedTokenError:
        return False


def _at_most(one: Any, other: Any) -> bool:
    return bool(one <= other)


def _is_text(value: Any) -> bool:
    return type(value) is str and 0 < len(value) <= 512


def _is_time(value: Any) -> bool:
    return type(value) is int and 0 <= value < _INT_END


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < _INT_END


def _is_bool(value: Any) -> bool:
    return type(value) is bool


def _is_texts(value: Any) -> bool:
    return type(value) is list and 0 < len(value) <= 256 and all(map(_is_text, value))


def _is_tiers(value: Any) -> bool:
    return _is_texts(value) and all(item in _TIERS for item in value)


def _is_key(value: Any) -> bool:
    try:
        return type(value) is str and bool(token.key_bytes(value))
    except token.MalformedTokenError:
        return False


def _is_digest(value: Any) -> bool:
    return type(value) is str and len(value) == 64 and set(value) <= _HEX


def _is_prefix(value: Any) -> bool:
    return _is_text(value) and set(value) <= _BASE58


def _is_arguments(value: Any) -> bool:
    # A second key (deny, ...) would look as if something enforced it.
    return type(value) is dict and value.keys() == {"allow"} and type(value["allow"]) is dict


def _unnamed(name: str) -> str:
    return f"the scope bounds `{name}`, which the request does not name"


def _equals(name: str, of: Callable[[RequestFacts], Any]) -> Test:
    def admits(value: Any, facts: RequestFacts, action: str) -> str | None:
        asked = of(facts)
        if asked is None:
            return _unnamed(name)
        return None if same(asked, value) else f"`{name}` is not the one of the scope"

    return admits


def _bounded(name: str, of: Callable[[RequestFacts], int | None]) -> Test:
    def admits(value: Any, facts: RequestFacts, action: str) -> str | None:
        asked = of(facts)
        if asked is None:
            return _unnamed(name)
        return None if asked <= value else f"`{name}` is beyond the scope's {value}"

    return admits


def _flag(name: str, of: Callable[[RequestFacts], bool | None]) -> Test:
    def admits(value: Any, facts: RequestFacts, action: str) -> str | None:
        return None if (of(facts) or False) is value else f"the scope demands `{name}` = {str(value).lower()}"

    return admits


# --- memory -------------------------------------------------------------------------------------------------------


def _tiers(value: Any, facts: RequestFacts, action: str) -> str | None:
    if facts.filtered and facts.tier is None and facts.tiers is None:
        return None
    # A request that names no tier touches all of them.
    asked = facts.tiers if facts.tiers is not None else (facts.tier,) if facts.tier is not None else actions.TIERS
    left = sorted({_TIERS.get(tier, tier) for tier in asked} - {_TIERS[tier] for tier in value})
    return f"tier `{left[0]}` is not in the scope" if left else None


def _narrower_tiers(child: Any, parent: Any) -> bool:
    return {_TIERS[tier] for tier in child} <= {_TIERS[tier] for tier in parent}


def _record(value: Any, facts: RequestFacts, action: str) -> str | None:
    return None if facts.filtered and facts.record_id is None else _RECORD(value, facts, action)


def _memory_before(value: Any, facts: RequestFacts, action: str) -> str | None:
    if actions.verb(action) not in {"read", "write", "repair"}:
        return _BEFORE(value, facts, action)
    if facts.created_at is None:
        return None if facts.filtered else _unnamed("before_ms")
    return None if facts.created_at < value else "the record is not older than the scope's `before_ms`"


def _apply(value: Any, facts: RequestFacts, action: str) -> str | None:
    asked = facts.apply if facts.apply is not None else _implied_apply(action)
    if asked is None:
        return _unnamed("apply")
    return None if asked is value else f"the scope demands `apply` = {str(value).lower()}"


def _implied_apply(action: str) -> bool | None:
    if action.endswith((".dry_run", ".apply")):
        return action.endswith(".apply")
    return {"read": False, "write": True, "purge": True}.get(actions.verb(action))


# --- tools, audit, a2a, secrets -----------------------------------------------------------------------------------


def _tool(value: Any, facts: RequestFacts, action: str) -> str | None:
    suffix = action.removeprefix("tool.call.").removeprefix("tool.")
    return None if value == suffix and facts.tool == value else "the tool is not the scope's"


def _window(value: Any, facts: RequestFacts, action: str) -> str | None:
    # A purge has a cut-off and no window; version 1 keeps one there as a note.
    return None if action == "audit.purge" else _bounded("window", lambda facts: facts.window)(value, facts, action)


def _risk(value: Any, facts: RequestFacts, action: str) -> str | None:
    if facts.duplicate_risk is None:
        return _unnamed("duplicate_risk")
    asked = _RISKS.get(facts.duplicate_risk)
    return None if asked is not None and asked == _RISKS[value] else "`duplicate_risk` is not the one of the scope"


def _token_prefix(value: Any, facts: RequestFacts, action: str) -> str | None:
    if facts.token_prefix is None:
        return _unnamed("token_prefix")
    return None if facts.token_prefix.startswith(value) else "`token_prefix` does not begin as the scope's"


def _names(value: Any, facts: RequestFacts, action: str) -> str | None:
    return None if facts.secret_name is not None and facts.secret_name in value else "the secret is not in the scope"


_RECORD: Final = _equals("record_id", lambda facts: facts.record_id)
_BEFORE: Final = _bounded("before_ms", lambda facts: facts.before_ms)
_CUT_OFF: Final = Field("a time in Unix milliseconds", _is_time, _at_most, _BEFORE)
_PEER: Final = Field("base58 of 32 bytes", _is_key, same, _equals("peer_pubkey_b58", lambda f: f.peer_pubkey_b58))


def _text(name: str, of: Callable[[RequestFacts], Any]) -> Field:
    return Field("a text", _is_text, same, _equals(name, of))


_APPLY: Final = Field("true or false", _is_bool, same, _apply)
_PEERS: Final = {
    "peer_pubkey_b58": _PEER,
    "token_prefix": Field("base58", _is_prefix, lambda child, parent: child.startswith(parent), _token_prefix),
    "self": Field("true or false", _is_bool, same, _flag("self", lambda facts: facts.self_revoke)),
    "force": Field("true or false", _is_bool, same, _flag("force", lambda facts: facts.force)),
    "before_ms": _CUT_OFF,
}

# Namespaces that are not here have no fields: what their scopes say is kept, signed, and bounds nothing that we do.
NAMESPACES: Final[Mapping[str, Mapping[str, Field]]] = {
    "intent": {},
    "agent": {},
    "tool": {
        "tool": Field("a tool's name", _is_text, same, _tool),
        "arguments": Field(
            '{"allow": an object}',
            _is_arguments,
            same,
            lambda value, facts, action: (
                None if same(facts.arguments, value["allow"]) else "the arguments are not exactly those of the scope"
            ),
        ),
        # Counted by the store, before the act.
        "max_uses": Field("a number from 1", _is_count, _at_most, None),
    },
    "memory": {
        "tiers": Field("a list of the tiers working, episodic and longterm", _is_tiers, _narrower_tiers, _tiers),
        "record_id": Field("a record's id", _is_text, same, _record),
        "before_ms": Field("a time in Unix milliseconds", _is_time, _at_most, _memory_before),
        "apply": _APPLY,
    },
    "a2a": {
        "peer_pubkey_b58": _PEER,
        # Of an agent of this host, whose name and key are those of its id: with any package of that id.
        "manifest_sha256": Field(
            "64 hexadecimal digits", _is_digest, same, _equals("manifest_sha256", lambda facts: facts.manifest_sha256)
        ),
        "task_id": _text("task_id", lambda facts: facts.task_id),
        "lease_id": _text("lease_id", lambda facts: facts.lease_id),
        "duplicate_risk": Field(
            "idempotent or operator-accepted", lambda value: type(value) is str and value in _RISKS, same, _risk
        ),
    },
    "audit": {
        "window": Field("a number from 1", _is_count, _at_most, _window),
        "before_ms": _CUT_OFF,
        "include_integrity": Field("true or false", _is_bool, same, None),
    },
    "peers": _PEERS,
    "identity": _PEERS,
    "chain": {
        "limit": Field("a number from 1", _is_count, _at_most, _bounded("limit", lambda facts: facts.limit)),
        "mint": _text("mint", lambda facts: facts.mint),
        "cluster": _text("cluster", lambda facts: facts.cluster),
        "payer_pubkey_b58": Field(
            "base58 of 32 bytes", _is_key, same, _equals("payer_pubkey_b58", lambda facts: facts.payer_pubkey_b58)
        ),
        "resource": Field(
            "a resource",
            lambda value: type(value) is str and value in _RESOURCES,
            same,
            _equals("resource", lambda facts: facts.resource),
        ),
        "batch_id": _text("batch_id", lambda facts: facts.batch_id),
    },
    # Version 1 does not look at the scopes of these.
    "capabilities": {"before_ms": _CUT_OFF},
    "settlement": {"apply": _APPLY},
    "secret": {
        "names": Field("a list of names", _is_texts, lambda child, parent: set(child) <= set(parent), _names),
        # Version 1's.
        "name": Field("a secret's name", _is_text, same, _equals("name", lambda facts: facts.secret_name)),
    },
}
