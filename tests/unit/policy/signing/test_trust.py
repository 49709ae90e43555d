"""Check the verification procedure step by step: each step refuses, with its code, a case that all others accept."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from policy import errors, package
from policy.signing import envelope, statement, trust
from tests import signing_kit as kit

NOW, DAY = kit.NOW, kit.DAY
op = kit.operator


def _refused(
    code: str, made: package.Package, root: trust.TrustRoot | None = None, **changes: Any
) -> errors.CovenantError:
    with pytest.raises(errors.CovenantError) as caught:
        kit.verify(made, root, **changes)
    assert caught.value.code == code
    assert isinstance(caught.value, errors.SignatureError | errors.TrustError)
    return caught.value


def test_signed_package_is_trusted() -> None:
    made = kit.signed()
    trusted = kit.verify(made)
    assert trusted.package is made
    assert trusted.manifest_bytes == kit.MANIFEST
    assert [(s.name, s.keyid) for s in trusted.signers] == [("op1", kit.public(1).keyid)]
    assert trusted.statement.agent_id == "hello"
    assert trusted.root_version == 1
    assert len(trusted.payload_digest) == 64


def test_only_verify_makes_trusted_package() -> None:
    trusted = kit.verify(kit.signed())
    values = {f.name: getattr(trusted, f.name) for f in dataclasses.fields(trusted)}
    with pytest.raises(TypeError, match="only"):
        trust.TrustedPackage(**values, token=object())
    with pytest.raises((TypeError, ValueError)):
        trust.TrustedPackage(**values)
    with pytest.raises((TypeError, ValueError)):
        dataclasses.replace(trusted, manifest_bytes=b"other")  # type: ignore[call-arg]


# --- again ----------------------------------------------------------------------------------------------


def _again(trusted: trust.TrustedPackage, root: trust.TrustRoot, **changes: Any) -> trust.TrustedPackage:
    values: dict[str, Any] = {"now_ms": NOW, "audience": kit.HOST, "serials": kit.Serials(), **changes}
    return trust.again(trusted, root, **values)


def test_again_no_signature_is_computed_and_no_file_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    root = kit.root()
    trusted = kit.verify(kit.signed(), root)
    monkeypatch.setattr(envelope, "signers", None)
    monkeypatch.setattr(package.Package, "digests", None)
    assert _again(trusted, root) == trusted


def test_again_another_root_is_refused_whatever_its_number() -> None:
    root = kit.root()
    trusted = kit.verify(kit.signed(), root)
    for other in (kit.root(version=2), kit.root(op(1), op(2)), kit.root(op(2), signers=(2,))):
        with pytest.raises(errors.TrustError, match="another than"):
            _again(trusted, other)


def test_again_it_is_asked_what_time_it_is_and_what_was_accepted() -> None:
    root = kit.root(op(1, expires_at=NOW + 9), expires_at=NOW + 20)
    trusted = kit.verify(kit.signed(expires_at=NOW + 5), root)
    assert _again(trusted, root, now_ms=NOW + 4) == trusted
    with pytest.raises(errors.ExpiredError, match="the envelope has expired"):
        _again(trusted, root, now_ms=NOW + 5)
    with pytest.raises(errors.ExpiredError, match="the key of `op1`"):
        _again(trusted, root, now_ms=NOW + 9)
    with pytest.raises(errors.TrustError, match="has ended"):
        _again(trusted, root, greatest_time_ms=NOW + 20)
    newer = kit.Serials(hello=trust.Accepted(NOW + 1, "0" * 64))
    with pytest.raises(errors.SerialError, match="is older than"):
        _again(trusted, root, serials=newer)


def test_again_key_that_counted_and_ends_takes_what_it_alone_allowed_with_it() -> None:
    """The other key remains valid: it is sufficient for the agent, but never was for the role."""
    worker = kit.scope(roles=("worker",), unlimited=True)
    other = kit.scope(roles=("reader",), unlimited=False)
    root = kit.root(op(1, expires_at=NOW + 9, scope=worker), op(2, scope=other))
    trusted = kit.verify(kit.signed(1, 2), root)
    assert trust.authorise(trusted, agent_id="hello", role="worker", operator=None)
    assert _again(trusted, root, now_ms=NOW + 8) == trusted
    with pytest.raises(errors.ExpiredError, match="the key of `op1`, which counted"):
        _again(trusted, root, now_ms=NOW + 9)
    # Setting the clock back does not revive it.
    with pytest.raises(errors.ExpiredError, match="the key of `op1`, which counted"):
        _again(trusted, root, greatest_time_ms=NOW + 9)


# --- (1) the root ---------------------------------------------------------------------------------------


def test_1_an_ended_root_is_refused_at_verification_too() -> None:
    root = kit.root(expires_at=NOW + 5)
    kit.verify(kit.signed(), root, now_ms=NOW + 4)
    _refused("trust_root", kit.signed(), root, now_ms=NOW + 5)
    # Setting the clock back does not revive it.
    _refused("trust_root", kit.signed(), root, now_ms=NOW, greatest_time_ms=NOW + 5)


def test_1_a_root_that_is_not_valid_yet_is_not_made_valid_by_a_clock_that_was_ahead() -> None:
    early = kit.root_bytes(kit.root_document(not_before=NOW + 5))
    root = trust.TrustRoot.parse(early)
    kit.verify(kit.signed(), root, now_ms=NOW + 5)
    _refused("trust_root", kit.signed(), root, now_ms=NOW, greatest_time_ms=NOW + 5)


# --- (2) the envelope -------------------------------------------------------------------------------------


def test_2_a_package_without_an_envelope_is_unsigned() -> None:
    _refused("unsigned", kit.signed().with_envelope(None))


@pytest.mark.parametrize("raw", [b"", b"{}", b"null", b"\xff", b"[" * 50_000])
def test_2_a_malformed_envelope_is_refused(raw: bytes) -> None:
    _refused("rule_2_signature", kit.signed().with_envelope(raw))


def test_2_another_payload_type_is_refused() -> None:
    made = kit.signed()
    payload = envelope.decode(made.envelope or b"").payload
    other = made.with_envelope(kit.envelope(payload, payload_type="application/json"))
    assert "payload type" in _refused("rule_2_signature", other).message


# --- (3) signatures -----------------------------------------------------------------------------------------


def test_3_an_unknown_key_is_refused() -> None:
    _refused("unknown_key", kit.signed(2))


def test_3_an_unknown_key_beside_a_known_one_does_no_harm_and_gives_nothing() -> None:
    assert [s.name for s in kit.verify(kit.signed(2, 1)).signers] == ["op1"]
    _refused("rule_2_signature", kit.signed(2, 1), kit.root(op(1, threshold=2), op(3)))


def test_3_a_known_key_id_with_a_wrong_signature_is_refused() -> None:
    made = kit.signed(2)
    document = json.loads(made.envelope or b"")
    document["signatures"][0]["keyid"] = kit.public(1).keyid
    error = _refused("rule_2_signature", made.with_envelope(json.dumps(document).encode()))
    assert "`op1`" in error.message


def test_3_a_payload_swapped_under_a_signature_is_refused() -> None:
    one, other = kit.signed(), kit.signed(serial=NOW + 1)
    document = json.loads(one.envelope or b"")
    document["payload"] = json.loads(other.envelope or b"")["payload"]
    _refused("rule_2_signature", one.with_envelope(json.dumps(document).encode()))


def test_3_the_payload_is_not_parsed_before_it_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(payload: bytes) -> None:
        raise AssertionError("parsed")

    monkeypatch.setattr(statement, "parse", never)
    with pytest.raises(AssertionError, match="parsed"):
        kit.verify(kit.signed(1))
    _refused("unknown_key", kit.signed(2))


# --- (5) signers ----------------------------------------------------------------------------------------------


def test_5_a_key_signs_only_for_the_agents_of_its_scope() -> None:
    scoped = kit.root(op(1, scope={"agents": ["team-*", "other"], "roles": ["*"], "approve_unlimited": True}))
    kit.verify(kit.signed(agent_id="team-a"), scoped)
    _refused("unknown_key", kit.signed(), scoped)


def test_5_a_key_signs_only_within_its_validity() -> None:
    root = kit.root(op(1, not_before=NOW - 5, expires_at=NOW + 5))
    for moment in (NOW - 5, NOW, NOW + 4):
        kit.verify(kit.signed(not_before=0), root, now_ms=moment)
    for moment in (NOW - 6, NOW + 5):
        _refused("envelope_expired", kit.signed(not_before=0), root, now_ms=moment)
    _refused("envelope_expired", kit.signed(), root, greatest_time_ms=NOW + 5)


def test_5_a_threshold_counts_distinct_keys() -> None:
    root = kit.root(op(1, threshold=2), op(2, threshold=2))
    assert len(kit.verify(kit.signed(1, 2), root).signers) == 2
    for signers in ((1,), (2,), (1, 1), (1, 3)):
        _refused("rule_2_signature", kit.signed(*signers), root)


def test_5_a_key_whose_threshold_is_one_suffices_beside_one_that_needs_two() -> None:
    root = kit.root(op(1), op(2, threshold=3))
    kit.verify(kit.signed(1), root)
    kit.verify(kit.signed(1, 2), root)
    _refused("rule_2_signature", kit.signed(2), root)


def test_5_a_key_that_wants_three_lends_nothing_to_one_that_wants_two() -> None:
    root = kit.root(op(1, threshold=3), op(2, threshold=2), op(3, threshold=2), op(4))
    assert [s.name for s in kit.verify(kit.signed(2, 3), root).signers] == ["op2", "op3"]
    assert [s.name for s in kit.verify(kit.signed(1, 2, 3), root).signers] == ["op1", "op2", "op3"]
    # Nor does it count if another signer alone is sufficient.
    assert [s.name for s in kit.verify(kit.signed(1, 4), root).signers] == ["op4"]
    assert "2 operators signed and 3 are needed" in _refused("rule_2_signature", kit.signed(1, 2), root).message


def test_5_a_key_outside_its_scope_or_time_does_not_count_towards_a_threshold() -> None:
    scoped = op(2, scope={"agents": ["other"], "roles": ["*"], "approve_unlimited": True})
    _refused("rule_2_signature", kit.signed(1, 2), kit.root(op(1, threshold=2), scoped))
    _refused("rule_2_signature", kit.signed(1, 2), kit.root(op(1, threshold=2), op(2, expires_at=NOW)))


# --- (6) revocation: attacks/test_revocation.py has the rest ---------------------------------------------------


def test_6_a_revoked_payload_is_refused_whoever_signed_it() -> None:
    made = kit.signed()
    digest = kit.verify(made).payload_digest
    entry = {"payload_digest": digest, "at": NOW, "reason": "it leaks"}
    error = _refused("revoked", made, kit.root(revoked=kit.revoked(manifests=[entry])))
    assert "it leaks" in error.message
    kit.verify(kit.signed(serial=NOW + 1), kit.root(revoked=kit.revoked(manifests=[entry])))


# --- (7) validity ---------------------------------------------------------------------------------------------


def test_7_an_envelope_holds_from_its_start_to_just_before_its_end() -> None:
    made = kit.signed(not_before=NOW - 5, expires_at=NOW + 5)
    for moment in (NOW - 5, NOW, NOW + 4):
        kit.verify(made, now_ms=moment)
    for moment in (NOW - 6, NOW + 5, NOW + DAY):
        _refused("envelope_expired", made, now_ms=moment)


def test_7_setting_the_clock_back_revives_nothing_and_starts_nothing_early() -> None:
    made = kit.signed(not_before=NOW, expires_at=NOW + 5)
    kit.verify(made, now_ms=NOW, greatest_time_ms=NOW + 4)
    _refused("envelope_expired", made, now_ms=NOW, greatest_time_ms=NOW + 5)
    _refused("envelope_expired", made, now_ms=NOW - 1, greatest_time_ms=NOW)


# --- (8) audience -----------------------------------------------------------------------------------------------


def test_8_an_envelope_for_a_host_holds_on_that_host() -> None:
    made = kit.signed(audience="host-b")
    kit.verify(made, audience="host-b")
    kit.verify(kit.signed(audience=None), audience="host-b")
    for other in ("host-a", "HOST-B", "host-b.example", "host", ""):
        _refused("wrong_audience", made, audience=other)


# --- (9) serials --------------------------------------------------------------------------------------------------


def test_9_the_ratchet() -> None:
    first = kit.verify(kit.signed(serial=10))
    serials = kit.Serials(hello=trust.Accepted(10, first.payload_digest))
    kit.verify(kit.signed(serial=10), serials=serials)
    kit.verify(kit.signed(serial=11), serials=serials)
    _refused("serial_rollback", kit.signed(serial=9), serials=serials)
    # The same serial with another payload, though every file is the same.
    _refused("serial_rollback", kit.signed(serial=10, approve_unlimited=True), serials=serials)
    # Another agent has its own serials.
    kit.verify(kit.signed(serial=1, agent_id="other"), serials=serials)


def test_9_a_serial_may_be_a_day_ahead_and_no_more() -> None:
    kit.verify(kit.signed(serial=NOW + DAY))
    _refused("serial_rollback", kit.signed(serial=NOW + DAY + 1))
    # The bound is the present clock, not the greatest time seen: the stricter of the two.
    _refused("serial_rollback", kit.signed(serial=NOW + DAY + 1), greatest_time_ms=NOW + DAY)


def test_9_a_record_ahead_of_the_clock_is_named() -> None:
    """A new signature is no fix while the record is ahead; `covenant state clock` is."""
    ahead = kit.Serials(hello=trust.Accepted(NOW + 60 * DAY, "0" * 64))
    with pytest.raises(errors.SerialError) as raised:
        kit.verify(kit.signed(serial=NOW), serials=ahead)
    assert "covenant state clock" in raised.value.hint
    behind = kit.Serials(hello=trust.Accepted(NOW - 1, "0" * 64))
    with pytest.raises(errors.SerialError) as raised:
        kit.verify(kit.signed(serial=NOW - 2), serials=behind)
    assert raised.value.hint == "sign the package again"
    with pytest.raises(errors.ExpiredError) as ended:
        kit.verify(kit.signed(expires_at=NOW + DAY), kit.root(), greatest_time_ms=NOW + 2 * DAY)
    assert "covenant state clock" in ended.value.hint


# --- (10) digests ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({**kit.FILES, "main.py": b"print('ho')\n"}, "`main.py` is not the file that was signed"),
        ({**kit.FILES, "agent.toml": kit.MANIFEST + b"\n"}, "`agent.toml` is not the file that was signed"),
        ({**kit.FILES, "extra": b""}, "`extra` is not in the signed statement"),
        ({**kit.FILES, "__pycache__/m.pyc": b""}, "`__pycache__/m.pyc` is not in the signed statement"),
        ({k: v for k, v in kit.FILES.items() if k != "main.py"}, "`main.py` was signed and is missing"),
        (
            {**kit.FILES, "main.py": kit.FILES["lib/data.txt"], "lib/data.txt": kit.FILES["main.py"]},
            "`lib/data.txt` is not",
        ),
    ],
)
def test_10_any_other_file_is_refused(files: dict[str, bytes], says: str) -> None:
    changed = package.Package(files, kit.signed().envelope)
    assert says in _refused("digest_mismatch", changed).message


# --- authorise ------------------------------------------------------------------------------------------------------


def _authorise(trusted: trust.TrustedPackage, **changes: Any) -> tuple[trust.Signer, ...]:
    values: dict[str, Any] = {"agent_id": "hello", "role": None, "operator": None}
    return trust.authorise(trusted, **(values | changes))


def test_authorise_returns_signers_that_count() -> None:
    trusted = kit.verify(
        kit.signed(1, 2),
        kit.root(op(1), op(2, scope={"agents": ["*"], "roles": ["reader"], "approve_unlimited": True})),
    )
    assert [s.name for s in _authorise(trusted, role="reader")] == ["op1", "op2"]
    assert [s.name for s in _authorise(trusted)] == ["op1"]
    assert [s.name for s in _authorise(trusted, role="reader", operator="op2")] == ["op1", "op2"]


def test_authorise_refuses_manifest_of_another_agent() -> None:
    with pytest.raises(errors.SignatureError, match="the manifest is of agent `other`"):
        _authorise(kit.verify(kit.signed()), agent_id="other")


def test_authorise_refuses_role_outside_scope() -> None:
    trusted = kit.verify(
        kit.signed(), kit.root(op(1, scope={"agents": ["*"], "roles": ["reader"], "approve_unlimited": True}))
    )
    assert _authorise(trusted, role="reader")
    for role in ("coordinator", None):
        with pytest.raises(errors.UnknownKeyError):
            _authorise(trusted, role=role)


def test_authorise_counts_threshold_again_by_role() -> None:
    root = kit.root(
        op(1, threshold=2), op(2, threshold=2, scope={"agents": ["*"], "roles": ["reader"], "approve_unlimited": True})
    )
    trusted = kit.verify(kit.signed(1, 2), root)
    assert len(_authorise(trusted, role="reader")) == 2
    with pytest.raises(errors.SignatureError, match="2 are needed"):
        _authorise(trusted, role="coordinator")


def test_approval_counts_with_signer_who_counts_and_may_give_it() -> None:
    junior = op(2, scope=kit.scope(unlimited=False))
    root = kit.root(op(1, scope=kit.scope(roles=("reader",))), junior, op(3, threshold=3))

    def approved(*signers: int, role: str | None, said: bool = True) -> bool:
        return trust.approves_unlimited(kit.verify(kit.signed(*signers, approve_unlimited=said), root), role=role)

    assert approved(1, role="reader")
    assert approved(1, 2, role="reader")
    assert not approved(1, role="reader", said=False)
    assert not approved(2, role="reader")
    # The signer who may approve does not count: for the role, or at all.
    assert not approved(1, 2, role=None)
    assert not approved(2, 3, role=None)


def test_operator_is_one_who_signed() -> None:
    trusted = kit.verify(kit.signed(1), kit.root(op(1), op(2)))
    assert _authorise(trusted, operator="op1")
    for name in ("op2", "nobody", "", "OP1", kit.public(1).keyid):
        with pytest.raises(errors.SignatureError, match="did not sign"):
            _authorise(trusted, operator=name)


def test_operator_whose_signature_does_not_count_is_not_operator() -> None:
    limited = op(2, scope={"agents": ["*"], "roles": ["reader"], "approve_unlimited": True})
    trusted = kit.verify(kit.signed(1, 2), kit.root(op(1), limited))
    _authorise(trusted, role="reader", operator="op2")
    with pytest.raises(errors.SignatureError, match="did not sign"):
        _authorise(trusted, role="coordinator", operator="op2")


def test_listed_keys_may_sign_for_the_agent_now() -> None:
    times = {"not_before": 1_000, "expires_at": 2_000}
    root = kit.root(op(1, **times), op(2, scope=kit.scope(agents=("other",)), **times), signers=(1,))
    one, two = root.keys[0].key.keyid, root.keys[1].key.keyid
    by_name = {row.name: row.key.keyid for row in root.keys}
    assert {one, two} == set(by_name.values())
    for now, open_ in ((999, False), (1_000, True), (1_999, True), (2_000, False)):
        assert trust.listed(root, "hello", now_ms=now) == ({by_name["op1"]} if open_ else set())
        assert trust.listed(root, "other", now_ms=now) == (set(by_name.values()) if open_ else set())
