"""Check the new roots that end a live run, those that do not, and the entries a revocation list may drop."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest

from policy import errors
from policy.signing import revocation, trust
from policy.signing import root as roots
from tests import signing_kit as kit

NOW = kit.NOW
op = kit.operator


def _accepted(*signers: int, root: roots.TrustRoot, **statement: Any) -> trust.TrustedPackage:
    return kit.verify(kit.signed(*signers, **statement), root)


def _reason(trusted: trust.TrustedPackage, root: roots.TrustRoot) -> str | None:
    return trust.revoked(root, trusted.payload_digest, trusted.statement, trusted.signers)


def test_nothing_revoked_ends_nothing_and_neither_does_key_that_was_taken_out() -> None:
    trusted = _accepted(1, root=kit.root(op(1), op(2)))
    assert _reason(trusted, kit.root(op(1), op(2))) is None
    assert _reason(trusted, kit.root(op(2))) is None
    assert _reason(trusted, kit.root(op(1), revoked=kit.revoked(keys=[kit.revoked_key(2)]))) is None


def test_revoked_signer_ends_what_rested_on_it_alone() -> None:
    later = kit.root(op(2), op(3), revoked=kit.revoked(keys=[kit.revoked_key(1)]))
    alone = _accepted(1, root=kit.root(op(1), op(2)))
    assert _reason(alone, later) == "the key of `op1`, who signed, was revoked: stolen"
    both = _accepted(1, 2, root=kit.root(op(1), op(2)))
    assert _reason(both, later) is None
    needed = _accepted(1, 2, root=kit.root(op(1, threshold=2), op(2, threshold=2)))
    assert _reason(needed, later) == "the key of `op1`, who signed, was revoked: stolen"


def test_revoked_approver_ends_unlimited_lifetime_and_no_other() -> None:
    first = kit.root(op(1), op(2, scope=kit.scope(unlimited=False)), op(3))
    later = kit.root(op(2), op(3), revoked=kit.revoked(keys=[kit.revoked_key(1)]))
    unlimited = _accepted(1, 2, root=first, approve_unlimited=True)
    assert "who approved the unlimited lifetime, was revoked" in str(_reason(unlimited, later))
    assert _reason(_accepted(1, 2, root=first), later) is None
    # Another signer may still approve it.
    assert _reason(_accepted(1, 2, 3, root=first, approve_unlimited=True), later) is None


def test_revoked_manifest_and_revoked_serials_end_what_they_name() -> None:
    trusted = _accepted(1, root=kit.root(), serial=7)
    entry = {"payload_digest": trusted.payload_digest, "at": NOW, "reason": "it leaks"}
    lists = kit.revoked(manifests=[entry])
    assert _reason(trusted, kit.root(revoked=lists)) == "the signed manifest was revoked: it leaks"
    assert _reason(_accepted(1, root=kit.root(), serial=8), kit.root(revoked=lists)) is None
    for at_most, agent_id, ends in ((6, "hello", False), (7, "hello", True), (8, "hello", True), (8, "hell", False)):
        row = {"agent_id": agent_id, "serial_at_most": at_most, "at": NOW, "reason": "old"}
        found = _reason(trusted, kit.root(revoked=kit.revoked(serials=[row])))
        assert (found is not None) is ends, row


def test_approval_that_never_counted_is_not_what_ends_run() -> None:
    nobody = kit.scope(unlimited=False)
    trusted = _accepted(1, 2, root=kit.root(op(1, scope=nobody), op(2, scope=nobody)), approve_unlimited=True)
    assert _reason(trusted, kit.root(op(2), revoked=kit.revoked(keys=[kit.revoked_key(1)]))) is None


def _entries(kind: str, count: int) -> list[dict[str, Any]]:
    rows: dict[str, Any] = {
        "keys": lambda n: kit.revoked_key(2, keyid=f"{n:064x}"),
        "manifests": lambda n: {"payload_digest": f"{n:064x}", "at": NOW, "reason": "r"},
        "serials": lambda n: {"agent_id": f"{n:08}", "serial_at_most": 0, "at": NOW, "reason": "r"},
    }
    return [rows[kind](n) for n in range(count)]


@pytest.mark.parametrize(("kind", "most"), [("keys", 256), ("manifests", 512), ("serials", 256)])
def test_lists_have_end_and_stay_what_they_are(kind: str, most: int) -> None:
    full = kit.root(revoked=kit.revoked(**{kind: _entries(kind, most)}))
    with pytest.raises(errors.TrustError, match="malformed"):
        kit.root(revoked=kit.revoked(**{kind: _entries(kind, most + 1)}))
    lists = full.document.revoked
    values: tuple[Any, ...] = (full.document, lists, getattr(lists, kind)[0], full.keys[0], full.keys[0].scope)
    for value in values:
        with pytest.raises(pydantic.ValidationError, match="frozen"):
            value.at = 1


@pytest.mark.parametrize("at", ["1", 1.0, True, None, -1, 2**53])
def test_time_is_number(at: object) -> None:
    kit.root(revoked=kit.revoked(keys=[kit.revoked_key(2, at=1)]))
    row = kit.revoked_key(2) | {"at": at}
    with pytest.raises(pydantic.ValidationError):
        revocation.RevokedKey.model_validate(row)


@pytest.mark.parametrize("kind", ["keys", "manifests", "serials"])
def test_each_entry_dropped_is_named(kind: str) -> None:
    three = _entries(kind, 3)
    lists = [
        revocation.Revocations.model_validate(kit.revoked(**{kind: [r for r in three if r is not out]}))
        for out in (None, *three)
    ]
    assert lists[0].dropped_by(lists[0]) is None
    assert revocation.NONE.dropped_by(lists[0]) is None
    for fewer, out in zip(lists[1:], three, strict=True):
        name = out.get("keyid") or out.get("payload_digest") or out["agent_id"]
        assert str(name) in str(lists[0].dropped_by(fewer))
        assert fewer.dropped_by(lists[0]) is None


@pytest.mark.parametrize("kind", ["keys", "manifests", "serials"])
def test_lists_are_sorted(kind: str) -> None:
    entries = {
        "keys": [kit.revoked_key(n) for n in (2, 3, 4)],
        "manifests": [{"payload_digest": d * 64, "at": NOW, "reason": "r"} for d in "abc"],
        "serials": [{"agent_id": d, "serial_at_most": 1, "at": NOW, "reason": "r"} for d in "abc"],
    }[kind]
    name = {"keys": "keyid", "manifests": "payload_digest", "serials": "agent_id"}[kind]
    entries = sorted(entries, key=lambda entry: str(entry[name]))
    kit.root(revoked=kit.revoked(**{kind: entries}))
    for wrong in (entries[::-1], [*entries, entries[-1]]):
        with pytest.raises(Exception, match=rf"`revoked\.{kind}` is not sorted and without repeats"):
            kit.root(revoked=kit.revoked(**{kind: wrong}))
