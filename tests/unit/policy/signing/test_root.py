"""The trust root: closed, self-signed, ending, and followed only by N + 1 under both thresholds."""

from __future__ import annotations

from typing import Any

import pytest

from policy import errors
from policy.signing import envelope, root, strict_json
from tests import signing_kit as kit

NOW, DAY = kit.NOW, kit.DAY
op, document, raw = kit.operator, kit.root_document, kit.root_bytes


def test_root_is_read_as_it_was_signed() -> None:
    made = root.TrustRoot.load(raw(document(op(1), op(2)), 1), NOW)
    assert made.version == 1
    assert [k.name for k in made.keys] == ["op1", "op2"]
    assert made.keys[0].key == kit.public(1)
    assert root.RootDocument.model_validate(document(op(1), op(2))).encode() == strict_json.dumps(
        document(op(1), op(2))
    )


MALFORMED: dict[str, dict[str, Any]] = {
    "version 0": document(version=0),
    "version as text": document(version="1"),
    "unknown key": document(extra=1),
    "no keys": document() | {"keys": []},
    "threshold 0": document(threshold=0),
    "threshold over the keys": document(threshold=2),
    "an end before the start": document(expires_at=0),
    "no end": {k: v for k, v in document().items() if k != "expires_at"},
    "a key twice": document(op(1), op(1, name="other")),
    "a name twice": document(op(1), op(2, name="op1")),
    "a key id beside the key": document(op(1) | {"keyid": "0" * 64}),
    "a short key": document(op(1, public="00")),
    "a key of small order": document(op(1, public="01" + "00" * 31)),
    "a key that is not canonical": document(op(1, public="ee" + "ff" * 30 + "7f")),
    "an upper-case key": document(op(1, public=kit.public(1).raw.hex().upper())),
    "a name with a control": document(op(1, name="a\x1b")),
    "an empty name": document(op(1, name="")),
    "a star in the middle": document(op(1, scope={"agents": ["a*b"], "roles": ["*"], "approve_unlimited": True})),
    "two stars": document(op(1, scope={"agents": ["a**"], "roles": ["*"], "approve_unlimited": True})),
    "a role with a star": document(op(1, scope={"agents": ["*"], "roles": ["read*"], "approve_unlimited": True})),
    "no agents": document(op(1), op(2, root=False, scope=kit.scope(agents=()))),
    "agents as text": document(op(1, scope={"agents": "*", "roles": ["*"], "approve_unlimited": True})),
    "no scope": document({k: v for k, v in op(1).items() if k != "scope"}),
    "a scope without its approval": document(op(1, scope={"agents": ["*"], "roles": ["*"]})),
    "an approval as a number": document(op(1, scope={"agents": ["*"], "roles": ["*"], "approve_unlimited": 1})),
    "a scope with a key too many": document(op(1, scope={**kit.scope(), "x": 1})),
    "root not said": document({k: v for k, v in op(1).items() if k != "root"}),
    "root as text": document(op(1, root="yes")),
    "no root key": document(op(1, root=False)),
    "a key that may sign nothing": document(op(1), op(2, root=False, scope=kit.scope(roles=()))),
    "key threshold 0": document(op(1, threshold=0)),
    "root threshold over 8": document(*(op(n) for n in range(1, 10)), threshold=9),
    "a root key with a threshold over 8": document(*(op(n) for n in range(1, 10)), op(10, threshold=9)),
    "a threshold that the demands of the keys cannot meet": document(op(1), op(2, threshold=3), threshold=2),
    "no revocations": {k: v for k, v in document().items() if k != "revoked"},
    "a list of revocations missing": document(revoked={"keys": [], "manifests": []}),
    "a list of revocations too many": document(revoked=kit.revoked(others=[])),
    "a key listed and revoked": document(op(1), op(2), revoked=kit.revoked(keys=[kit.revoked_key(2)])),
    "a key revoked twice": document(revoked=kit.revoked(keys=[kit.revoked_key(2), kit.revoked_key(2, at=1)])),
    "a revocation without a reason": document(revoked=kit.revoked(keys=[kit.revoked_key(2, reason="")])),
    "a reason with a control": document(revoked=kit.revoked(keys=[kit.revoked_key(2, reason="a\x1b[2J")])),
    "a reason that turns the line around": document(revoked=kit.revoked(keys=[kit.revoked_key(2, reason="a\u202eb")])),
    "an upper-case key id": document(revoked=kit.revoked(keys=[kit.revoked_key(2, keyid=kit.public(2).keyid.upper())])),
    "key end before start": document(op(1, expires_at=0)),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_root_is_refused(name: str) -> None:
    with pytest.raises(errors.TrustError, match="malformed"):
        root.TrustRoot.load(raw(MALFORMED[name], 1), NOW)


@pytest.mark.parametrize("data", [b"", b"{}", b"null", b" " * (root.MAX_BYTES + 1)])
def test_file_no_envelope_is_refused(data: bytes) -> None:
    with pytest.raises(errors.TrustError, match="malformed"):
        root.TrustRoot.load(data, NOW)


def test_root_has_at_most_mebibyte() -> None:
    made = raw(document(op(1)), 1)
    assert root.MAX_BYTES == 2**20
    full = made + b" " * (root.MAX_BYTES - len(made))
    assert root.TrustRoot.load(full, NOW).version == 1
    with pytest.raises(errors.TrustError, match="larger than 1048576 bytes"):
        root.TrustRoot.load(full + b" ", NOW)


def test_root_must_be_signed_by_its_own_threshold() -> None:
    two = document(op(1), op(2), threshold=2)
    assert root.TrustRoot.load(raw(two, 1, 2), NOW).version == 1
    for signers in ((1,), (2,), (1, 1), (1, 3), (3,)):
        with pytest.raises(errors.TrustError, match="not signed by its own keys"):
            root.TrustRoot.load(raw(two, *signers), NOW)


def test_signature_on_package_cannot_be_one_on_root() -> None:
    payload = strict_json.dumps(document())
    as_package = envelope.sign(payload, envelope.IN_TOTO_PAYLOAD_TYPE, [kit.key(1)])
    renamed = envelope.Envelope(payload, root.PAYLOAD_TYPE, as_package.signatures)
    with pytest.raises(errors.TrustError, match="payload type"):
        root.TrustRoot.load(as_package.encode(), NOW)
    with pytest.raises(errors.TrustError, match="not signed"):
        root.TrustRoot.load(renamed.encode(), NOW)


def test_root_holds_from_its_start_to_just_before_its_end() -> None:
    data = raw(document(not_before=NOW - 10, expires_at=NOW + 10), 1)
    for moment in (NOW - 10, NOW, NOW + 9):
        root.TrustRoot.load(data, moment)
    with pytest.raises(errors.TrustError, match="not valid yet"):
        root.TrustRoot.load(data, NOW - 11)
    with pytest.raises(errors.TrustError, match="has ended"):
        root.TrustRoot.load(data, NOW + 10)
    assert root.TrustRoot.parse(data).version == 1


# --- versions -------------------------------------------------------------------------------------------


def test_next_version_is_signed_by_old_and_new() -> None:
    old = kit.root(op(1))
    assert old.successor(raw(document(op(2), version=2), 1, 2), NOW).version == 2
    for signers in ((1,), (2,), (3,), (2, 3)):
        with pytest.raises(errors.TrustError, match="is not signed by the keys"):
            old.successor(raw(document(op(2), version=2), *signers), NOW)


@pytest.mark.parametrize("version", [1, 3, 100])
def test_version_is_never_skipped_or_repeated(version: int) -> None:
    with pytest.raises(errors.TrustError, match="cannot follow"):
        kit.root(op(1)).successor(raw(document(op(1), version=version), 1), NOW)


def test_old_threshold_counts_distinct_old_keys() -> None:
    old = kit.root(op(1), op(2), threshold=2, signers=(1, 2))
    new = document(op(1), op(3), version=2)
    old.successor(raw(new, 1, 2), NOW)
    for signers in ((1, 3), (1, 1), (3, 1)):
        with pytest.raises(errors.TrustError, match="is not signed by the keys of version 1"):
            old.successor(raw(new, *signers), NOW)


NARROW = {
    "narrow agents": {"agents": ["a*"], "roles": ["*"], "approve_unlimited": True},
    "narrow roles": {"agents": ["*"], "roles": ["reader"], "approve_unlimited": True},
}


@pytest.mark.parametrize("scope", NARROW)
def test_key_that_may_not_sign_roots_cannot_widen_itself_by_next_version(scope: str) -> None:
    narrow = op(2, scope=NARROW[scope], root=False)
    old = kit.root(op(1), narrow)
    new = document(op(2), version=2)
    assert old.successor(raw(new, 1, 2), NOW).version == 2
    with pytest.raises(errors.TrustError, match="is not signed by the keys of version 1"):
        old.successor(raw(new, 2), NOW)
    # Nor does it make up a threshold, of either side.
    old = kit.root(op(1), narrow, op(3), threshold=2, signers=(1, 3))
    new = document(op(1), narrow, op(3), threshold=2, version=2)
    assert old.successor(raw(new, 1, 3), NOW).version == 2
    with pytest.raises(errors.TrustError, match="is not signed by the keys of version 1"):
        old.successor(raw(new, 1, 2), NOW)
    with pytest.raises(errors.TrustError, match="is not signed by the keys of version 2"):
        kit.root(op(1), op(3)).successor(raw(new, 1, 2), NOW)


def test_key_of_unlimited_scope_signs_no_root_unless_root_says_so() -> None:
    old = kit.root(op(1), op(2, root=False))
    with pytest.raises(errors.TrustError, match="is not signed by the keys of version 1"):
        old.successor(raw(document(op(2), version=2), 2), NOW)


def test_root_key_may_have_empty_scope_and_any_narrow_one() -> None:
    only = op(1, scope={"agents": [], "roles": [], "approve_unlimited": False})
    assert kit.root(only).successor(raw(document(only, version=2), 1), NOW).version == 2


def test_next_version_takes_back_no_revocation_and_may_add_one() -> None:
    lists = kit.revoked(keys=[kit.revoked_key(3)])
    old = kit.root(op(1), revoked=lists)
    more = kit.revoked(
        keys=sorted([kit.revoked_key(3), kit.revoked_key(4)], key=lambda k: k["keyid"]),
        serials=[{"agent_id": "hello", "serial_at_most": 5, "at": NOW, "reason": "r"}],
    )
    second = old.successor(raw(document(op(1), version=2, revoked=more), 1), NOW)
    higher = {**more, "serials": [{**more["serials"][0], "serial_at_most": 6, "reason": "another"}]}
    second.successor(raw(document(op(1), version=3, revoked=higher), 1), NOW)
    for fewer in (
        kit.revoked(),
        kit.revoked(keys=[kit.revoked_key(4)]),
        kit.revoked(keys=[kit.revoked_key(3, reason="other")]),
        {**more, "serials": [{**more["serials"][0], "serial_at_most": 4}]},
    ):
        with pytest.raises(errors.TrustError, match="takes back a revocation of version 2"):
            second.successor(raw(document(op(1), version=3, revoked=fewer), 1), NOW)


def test_key_that_has_ended_does_not_sign_next_version_while_root_holds() -> None:
    old = kit.root(op(1), op(2, expires_at=NOW + DAY))
    new = document(op(1), op(2), version=2)
    assert old.successor(raw(new, 2), NOW + DAY - 1).version == 2
    with pytest.raises(errors.TrustError, match="is not signed by the keys of version 1"):
        old.successor(raw(new, 2), NOW + DAY)
    with pytest.raises(errors.TrustError, match="is not signed by the keys of version 1"):
        kit.root(op(1), op(2, not_before=NOW + 1)).successor(raw(new, 2), NOW)


def test_key_that_needs_second_signer_needs_one_for_next_version() -> None:
    old = kit.root(op(1), op(2, threshold=2))
    new = document(op(1), op(2), version=2)
    assert old.successor(raw(new, 1, 2), NOW).version == 2
    assert old.successor(raw(new, 1), NOW).version == 2
    with pytest.raises(errors.TrustError, match="is not signed by the keys of version 1"):
        old.successor(raw(new, 2), NOW)


def test_ended_root_names_its_successor_but_not_ended_one() -> None:
    old = root.TrustRoot.parse(raw(document(op(1), expires_at=NOW - 1), 1))
    assert old.successor(raw(document(op(1), version=2), 1), NOW).version == 2
    with pytest.raises(errors.TrustError, match="has ended"):
        old.successor(raw(document(op(1), version=2, expires_at=NOW), 1), NOW)


# --- scopes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "agent_id", "covered"),
    [
        ("*", "anything", True),
        ("hello", "hello", True),
        ("hello", "hello2", False),
        ("hello", "Hello", False),
        ("team-*", "team-a", True),
        ("team-*", "team-", True),
        ("team-*", "team", False),
        ("team-*", "xteam-a", False),
        ("a.b", "axb", False),
    ],
)
def test_scope_covers_ids_by_name_or_prefix(pattern: str, agent_id: str, covered: bool) -> None:
    assert root.Scope(agents=(pattern,), roles=("*",), approve_unlimited=True).covers_agent(agent_id) is covered


def test_no_role_is_no_ceiling_and_needs_star() -> None:
    limited = root.Scope(agents=("*",), roles=("reader", "observer"), approve_unlimited=True)
    assert limited.covers_role("reader")
    assert not limited.covers_role("coordinator")
    assert not limited.covers_role(None)
    assert root.Scope(agents=("*",), roles=("*",), approve_unlimited=True).covers_role(None)
