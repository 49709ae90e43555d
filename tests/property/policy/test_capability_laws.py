"""Laws of capability tokens: narrowing never widens, bytes say one thing, and hostile scopes are an answer."""

from __future__ import annotations

from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from policy import base58
from policy.capabilities import fields, scopes
from policy.capabilities.facts import RequestFacts
from policy.capabilities.token import MalformedTokenError, Token, canonical_scope, parse

_KEYS = st.sampled_from([base58.encode(bytes([n]) * 32) for n in (7, 8)])
_DIGESTS = st.sampled_from(["ab" * 32, "cd" * 32])
_TEXT = st.sampled_from(["a", "b", "ab"])
_TIME = st.integers(0, 6)
_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "tool": st.just("echo"),
    "arguments": st.sampled_from([{"allow": {}}, {"allow": {"n": 1}}, {"allow": {"n": True}}]),
    "max_uses": st.integers(1, 4),
    "tiers": st.lists(st.sampled_from(["working", "episodic", "longterm", "long_term"]), min_size=1, max_size=3),
    "before_ms": _TIME,
    "apply": st.booleans(),
    "peer_pubkey_b58": _KEYS,
    "manifest_sha256": _DIGESTS,
    "payer_pubkey_b58": _KEYS,
    "duplicate_risk": st.sampled_from(["idempotent", "operator-accepted", "operator_accepted"]),
    "window": st.integers(1, 4),
    "limit": st.integers(1, 4),
    "include_integrity": st.booleans(),
    "self": st.booleans(),
    "force": st.booleans(),
    "token_prefix": _TEXT,
    "resource": st.sampled_from(["tool", "memory"]),
    "names": st.lists(_TEXT, min_size=1, max_size=2),
}
_NAMES = """
    memory.read memory.write memory.purge memory.repair.apply memory.compact.dry_run tool.call.echo a2a.send.x@y
    a2a.repair.requeue audit.purge peers.list peers.revoke identity.sign chain.flush secret.access capabilities.purge
    settlement.backfill.apply
"""
_ACTIONS = st.sampled_from(_NAMES.split())
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def _scope(action: str) -> st.SearchStrategy[dict[str, Any]]:
    known = fields.NAMESPACES[action.partition(".")[0]]
    optional = {name: _VALUES.get(name, _TEXT) for name in known} | {"note": st.sampled_from([1, True, "x"])}
    made = st.fixed_dictionaries({"version": st.just(1)}, optional=optional)
    return made | st.just({}) if action != "secret.access" else made


def _facts() -> st.SearchStrategy[RequestFacts]:
    tiers = st.sampled_from(["working", "episodic", "longterm"])
    none = st.none()
    return st.builds(
        RequestFacts,
        tier=none | tiers,
        tiers=none | st.lists(tiers, max_size=3),
        record_id=none | _TEXT,
        before_ms=none | _TIME,
        apply=none | st.booleans(),
        tool=none | st.sampled_from(["echo", "clock"]),
        arguments=st.sampled_from([None, {}, {"n": 1}, {"n": True}]),
        peer_pubkey_b58=none | _KEYS,
        manifest_sha256=none | _DIGESTS,
        task_id=none | _TEXT,
        lease_id=none | _TEXT,
        duplicate_risk=none | st.sampled_from(["idempotent", "operator-accepted", "unsafe"]),
        token_prefix=none | _TEXT,
        self_revoke=none | st.booleans(),
        force=none | st.booleans(),
        limit=none | _TIME,
        resource=none | st.sampled_from(["tool", "memory"]),
        batch_id=none | _TEXT,
        payer_pubkey_b58=none | _KEYS,
        window=none | _TIME,
        created_at=none | _TIME,
        mint=none | _TEXT,
        cluster=none | _TEXT,
        secret_name=none | _TEXT,
        filtered=st.booleans(),
    )


@given(st.data())
def test_what_narrower_scope_admits_wider_admits(data: st.DataObject) -> None:
    action = data.draw(_ACTIONS)
    parent = data.draw(_scope(action))
    # Begun from the parent, so that most of them are narrower.
    child = data.draw(st.one_of(_scope(action), _scope(action).map(lambda more: {**parent, **more})))
    assume(scopes.check(action, parent) is None and scopes.check(action, child) is None)
    assume(scopes.within(action, child, parent) is None)
    facts = data.draw(_facts())
    if scopes.admits(action, child, facts) is None:
        assert scopes.admits(action, parent, facts) is None
    own, above = scopes.max_uses(action, child), scopes.max_uses(action, parent)
    assert above is None or (own is not None and own <= above)


@given(st.data())
def test_narrowing_is_preorder(data: st.DataObject) -> None:
    action = data.draw(_ACTIONS)
    one, two, three = (data.draw(_scope(action)) for _ in range(3))
    assume(all(scopes.check(action, each) is None for each in (one, two, three)))
    assert scopes.within(action, one, one) is None
    if scopes.within(action, one, two) is None and scopes.within(action, two, three) is None:
        assert scopes.within(action, one, three) is None


@given(st.data())
def test_filtered_check_shows_no_record_that_scope_bounds(data: st.DataObject) -> None:
    scope = data.draw(_scope("memory.read"))
    assume(scopes.check("memory.read", scope) is None)
    tier = data.draw(st.sampled_from(["working", "episodic", "longterm"]))
    record_id, created_at = data.draw(_TEXT), data.draw(_TIME)
    facts = RequestFacts(tier=tier, record_id=record_id, created_at=created_at)
    shown = scopes.admits_record(scope, tier=tier, record_id=record_id, created_at=created_at)
    assert shown is (scopes.admits("memory.read", scope, facts) is None)


@given(_ACTIONS, _JSON, _facts())
def test_any_json_has_answer(action: str, scope: Any, facts: RequestFacts) -> None:
    if scopes.check(action, scope) is None:
        scopes.admits(action, scope, facts)
        scopes.within(action, scope, scope)
        scopes.max_uses(action, scope)
    scopes.parent_of(scope)


@given(_ACTIONS, st.dictionaries(st.text(max_size=8), _JSON, max_size=4), st.none() | st.integers(0, 2**64 - 1), _KEYS)
def test_bytes_are_read_as_what_made_them_and_nothing_else(action: str, scope: Any, ends: int | None, key: str) -> None:
    token = Token(key, action, scope, base58.encode(b"\x09" * 32), ends)
    try:
        message = token.message()
    except MalformedTokenError:
        return
    read = parse(message)
    assert read is not None
    assert (read.subject, read.action, read.expires_at) == (token.subject, token.action, token.expires_at)
    assert canonical_scope(read.scope) == canonical_scope(scope)
    assert read.message() == message
    assert parse(message[:-1]) is None
    assert parse(message + b"\0") is None


@given(st.binary(max_size=200))
def test_any_bytes_have_answer(raw: bytes) -> None:
    read = parse(raw)
    assert read is None or read.message() == raw
