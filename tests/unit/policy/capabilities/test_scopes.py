"""Scopes by namespace: what is refused when granted, what is admitted when used, what is narrower."""

from __future__ import annotations

from typing import Any

import pytest

from policy import base58
from policy.capabilities import actions, fields, scopes
from policy.capabilities.facts import RequestFacts

KEY = base58.encode(b"k" * 32)
OTHER = base58.encode(b"o" * 32)


def v1(**named: Any) -> dict[str, Any]:
    return {"version": 1} | named


@pytest.mark.parametrize(
    ("action", "scope"),
    [
        ("memory.write", {}),
        ("memory.write", v1()),
        ("memory.write", v1(note={"any": ["thing", 1.5, None]})),
        ("intent.delegate", v1(anything=1)),
        ("memory.purge", v1(tiers=["long-term", "working"], before_ms=0, apply=True, record_id="r")),
        ("tool.call.echo", v1(tool="echo", arguments={"allow": {}}, max_uses=1)),
        ("a2a.repair.requeue", v1(peer_pubkey_b58=KEY, task_id="t", lease_id="l", duplicate_risk="operator_accepted")),
        ("audit.purge", v1(window=1, before_ms=5, include_integrity=False)),
        ("peers.revoke", v1(peer_pubkey_b58=KEY, token_prefix="abc", self=False, force=True, before_ms=1)),
        ("chain.flush", v1(limit=1, mint="m", cluster="devnet", payer_pubkey_b58=KEY, resource="tool", batch_id="b")),
        ("secret.access", v1(names=["mail"])),
        ("secret.access.mail", {}),
        ("other.thing", ["anything"]),
    ],
)
def test_well_formed(action: str, scope: Any) -> None:
    assert scopes.check(action, scope) is None


@pytest.mark.parametrize(
    ("action", "scope"),
    [
        ("memory.write", None),
        ("memory.write", []),
        ("memory.write", "x"),
        ("memory.write", {"tiers": ["working"]}),
        ("memory.write", {"version": True}),
        ("memory.write", {"version": 1.0}),
        ("memory.write", {"version": "1"}),
        ("memory.write", {"version": 2}),
        ("memory.write", v1(tiers=[])),
        ("memory.write", v1(tiers="working")),
        ("memory.write", v1(tiers=["Working"])),
        ("memory.write", v1(tiers=[["working"]])),
        ("memory.write", v1(record_id="")),
        ("memory.write", v1(before_ms=-1)),
        ("memory.write", v1(before_ms=True)),
        ("memory.write", v1(before_ms=1.5)),
        ("memory.write", v1(before_ms=2**53)),
        ("memory.write", v1(apply=1)),
        ("memory.write", v1(parent_b58="x")),
        ("memory.write", v1(parent_b58=None)),
        ("tool.call.echo", v1(tool="clock")),
        ("tool.call.echo", v1(arguments={})),
        ("tool.call.echo", v1(arguments={"allow": {}, "deny": {}})),
        ("tool.call.echo", v1(arguments={"allow": []})),
        ("tool.call.echo", v1(max_uses=0)),
        ("tool.call.echo", v1(max_uses=True)),
        ("tool.list", v1(max_uses=1)),
        ("a2a.send.x@y", v1(peer_pubkey_b58="x")),
        ("a2a.send.x@y", v1(peer_pubkey_b58="1" * 32)),
        ("a2a.send.x@agent", v1(manifest_sha256="ab" * 31)),
        ("a2a.send.x@agent", v1(manifest_sha256="AB" * 32)),
        ("a2a.send.x@y", v1(duplicate_risk="unsafe")),
        ("a2a.send.x@y", v1(duplicate_risk=["idempotent"])),
        ("audit.purge", v1(window=0)),
        ("peers.revoke", v1(token_prefix="0OIl")),
        ("peers.revoke", v1(self="true")),
        ("chain.flush", v1(limit=0)),
        ("chain.flush", v1(resource="money")),
        ("chain.flush", v1(resource={"a": 1})),
        ("secret.access", {}),
        ("secret.access", v1()),
        ("secret.access", v1(names=[])),
        ("secret.access", v1(names="mail")),
        ("settlement.backfill.apply", v1(apply="yes")),
        ("capabilities.purge", v1(before_ms="1")),
    ],
)
def test_malformed(action: str, scope: Any) -> None:
    assert scopes.check(action, scope) is not None


@pytest.mark.parametrize(
    ("action", "scope", "admitted", "refused"),
    [
        ("memory.read", v1(tiers=["working"]), RequestFacts(tier="working"), RequestFacts(tier="episodic")),
        ("memory.read", v1(tiers=["long_term"]), RequestFacts(tier="longterm"), RequestFacts()),
        (
            "memory.read",
            v1(tiers=["working"]),
            RequestFacts(filtered=True),
            RequestFacts(filtered=True, tier="episodic"),
        ),
        ("memory.read", v1(record_id="a"), RequestFacts(record_id="a"), RequestFacts(record_id="b")),
        ("memory.read", v1(record_id="a"), RequestFacts(filtered=True), RequestFacts()),
        ("memory.read", v1(before_ms=5), RequestFacts(created_at=4), RequestFacts(created_at=5)),
        ("memory.read", v1(before_ms=5), RequestFacts(filtered=True), RequestFacts(before_ms=1)),
        ("memory.read", v1(apply=False), RequestFacts(), RequestFacts(apply=True)),
        ("memory.write", v1(apply=True), RequestFacts(), RequestFacts(apply=False)),
        ("memory.purge", v1(before_ms=5), RequestFacts(before_ms=5), RequestFacts(before_ms=6)),
        (
            "memory.purge",
            v1(tiers=["working", "episodic", "longterm"]),
            RequestFacts(),
            RequestFacts(tiers=["working", "x"]),
        ),
        ("memory.repair.apply", v1(apply=True), RequestFacts(), RequestFacts(apply=False)),
        ("memory.compact.dry_run", v1(apply=False), RequestFacts(), RequestFacts(apply=True)),
        (
            "tool.call.echo",
            v1(tool="echo", arguments={"allow": {"n": 1}}),
            RequestFacts(tool="echo", arguments={"n": 1.0}),
            RequestFacts(tool="echo", arguments={"n": True}),
        ),
        (
            "tool.call.echo",
            v1(arguments={"allow": {"t": "\u00e9"}}),
            RequestFacts(arguments={"t": "\u00e9"}),
            RequestFacts(arguments={"t": "e\u0301"}),
        ),
        ("tool.call.echo", v1(arguments={"allow": {}}), RequestFacts(arguments={}), RequestFacts()),
        ("tool.call.echo", v1(tool="echo"), RequestFacts(tool="echo"), RequestFacts(tool="clock")),
        (
            "a2a.send.x@y",
            v1(peer_pubkey_b58=KEY),
            RequestFacts(peer_pubkey_b58=KEY),
            RequestFacts(peer_pubkey_b58=OTHER),
        ),
        ("a2a.send.x@agent", v1(manifest_sha256="ab" * 32), RequestFacts(manifest_sha256="ab" * 32), RequestFacts()),
        ("a2a.send.x@y", v1(task_id="t"), RequestFacts(task_id="t"), RequestFacts()),
        (
            "a2a.repair.requeue",
            v1(duplicate_risk="operator-accepted"),
            RequestFacts(duplicate_risk="operator_accepted"),
            RequestFacts(duplicate_risk="idempotent"),
        ),
        ("audit.purge", v1(before_ms=5, window=1), RequestFacts(before_ms=5), RequestFacts(before_ms=6)),
        ("audit.read", v1(window=5), RequestFacts(window=5), RequestFacts()),
        (
            "peers.list",
            v1(peer_pubkey_b58=KEY),
            RequestFacts(peer_pubkey_b58=KEY),
            RequestFacts(peer_pubkey_b58=KEY[:8]),
        ),
        ("peers.revoke", v1(token_prefix="ab"), RequestFacts(token_prefix="abc"), RequestFacts(token_prefix="a")),
        ("peers.revoke", v1(force=False), RequestFacts(force=False), RequestFacts(force=True)),
        ("peers.revoke", v1(self=True), RequestFacts(self_revoke=True), RequestFacts(self_revoke=False)),
        ("chain.flush", v1(limit=3), RequestFacts(limit=3), RequestFacts(limit=4)),
        ("chain.receipts", v1(resource="tool"), RequestFacts(resource="tool"), RequestFacts(resource="memory")),
        ("secret.access", v1(names=["a", "b"]), RequestFacts(secret_name="b"), RequestFacts(secret_name="c")),
        ("secret.access", v1(names=["a"]), RequestFacts(secret_name="a"), RequestFacts()),
        ("capabilities.purge", v1(before_ms=5), RequestFacts(before_ms=5), RequestFacts(before_ms=6)),
    ],
)
def test_admitted_and_refused(action: str, scope: Any, admitted: RequestFacts, refused: RequestFacts) -> None:
    assert scopes.check(action, scope) is None
    assert scopes.admits(action, scope, admitted) is None
    assert scopes.admits(action, scope, refused) is not None
    assert scopes.admits(action, v1(note=1) if action != "secret.access" else scope, admitted) is None


@pytest.mark.parametrize(
    ("child", "parent", "holds"),
    [
        ({}, {}, True),
        (v1(), {}, True),
        ({}, v1(tiers=["working"]), False),
        (v1(tiers=["working"]), v1(tiers=["working", "episodic"]), True),
        (v1(tiers=["working", "longterm"]), v1(tiers=["working", "episodic"]), False),
        (v1(before_ms=4), v1(before_ms=5), True),
        (v1(before_ms=6), v1(before_ms=5), False),
        (v1(tiers=["working"], record_id="a"), v1(tiers=["working"]), True),
        (v1(record_id="b"), v1(record_id="a"), False),
        (v1(apply=False), v1(apply=True), False),
        (v1(note=1), v1(note=1), True),
        (v1(note=True), v1(note=1), False),
        (v1(), v1(note=1), False),
    ],
)
def test_narrower(child: Any, parent: Any, *, holds: bool) -> None:
    assert (scopes.within("memory.read", child, parent) is None) is holds


def test_actions() -> None:
    assert actions.standing_for("memory.read", "working") == ("memory.read", "memory.read.working")
    assert actions.standing_for("memory.read.working") == ("memory.read.working", "memory.read")
    assert actions.standing_for("memory.write", "working") == ("memory.write",)
    assert actions.within("memory.read.episodic", "memory.read")
    assert not actions.within("memory.read", "memory.read.episodic")
    assert not actions.within("memory.readx", "memory.read")
    assert not actions.within("memory.read.other", "memory.read")


def test_every_field_has_test_or_says_that_it_bounds_nothing() -> None:
    silent = {(ns, name) for ns, table in fields.NAMESPACES.items() for name, one in table.items() if not one.admits}
    assert silent == {("tool", "max_uses"), ("audit", "include_integrity")}


# covenant-v1-differences.md, section 3: version 1 writes null for a field that bounds nothing, and `name` of a secret.
V1_MEMORY = {"version": 1, "tiers": ["working"], "before_ms": None, "record_id": None, "apply": None}
V1_A2A = {"version": 1, "peer_pubkey_b58": None, "task_id": "t", "lease_id": None, "duplicate_risk": None}
V1_SECRET = {"version": 1, "name": "mail"}


def test_scopes_of_version_1_are_taken() -> None:
    assert scopes.check("memory.read", V1_MEMORY) is None
    assert scopes.check("a2a.repair.requeue", V1_A2A) is None
    assert scopes.check("secret.access", V1_SECRET) is None


def test_null_bounds_nothing_and_the_rest_does() -> None:
    assert scopes.admits("memory.read", V1_MEMORY, RequestFacts(tier="working", record_id="r", created_at=5)) is None
    assert scopes.admits("memory.read", V1_MEMORY, RequestFacts(tier="episodic")) is not None
    assert scopes.admits("a2a.repair.requeue", V1_A2A, RequestFacts(task_id="t")) is None
    assert scopes.admits("a2a.repair.requeue", V1_A2A, RequestFacts(task_id="u")) is not None


def test_secret_by_version_1s_name_is_that_secret_alone() -> None:
    assert scopes.admits("secret.access", V1_SECRET, RequestFacts(secret_name="mail")) is None
    assert scopes.admits("secret.access", V1_SECRET, RequestFacts(secret_name="bank")) is not None
    assert scopes.admits("secret.access", V1_SECRET, RequestFacts()) is not None
    both = {"version": 1, "name": "mail", "names": ["bank"]}
    assert scopes.admits("secret.access", both, RequestFacts(secret_name="mail")) is not None
    assert scopes.check("secret.access", {"version": 1, "name": None, "names": None}) is not None


def test_null_is_no_narrower_than_a_bound() -> None:
    bound = V1_MEMORY | {"before_ms": 10}
    assert scopes.within("memory.read", V1_MEMORY, bound) is not None
    assert scopes.within("memory.read", bound, V1_MEMORY) is None
    assert scopes.within("memory.read", {"version": 1, "tiers": ["working"]}, V1_MEMORY) is None


@pytest.mark.parametrize(
    ("action", "scope", "named"),
    [
        ("memory.read", {}, ()),
        ("memory.read", v1(tiers=["working"], parent_b58="p"), ()),
        ("memory.read", v1(teirs=["working"], max_uses=2), ("max_uses", "teirs")),
        ("tool.call.echo", v1(max_uses=2), ()),
        ("other.thing", v1(a=1), ("a",)),
        ("other.thing", ["anything"], ()),
    ],
)
def test_fields_that_bound_nothing_are_named(action: str, scope: Any, named: tuple[str, ...]) -> None:
    assert scopes.notes(action, scope) == named
