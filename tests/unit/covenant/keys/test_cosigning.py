"""Check cosigning: a second signature covers the same bytes or is refused with a reason, and none is lost silently."""

from __future__ import annotations

from typing import Any

import pytest

from covenant.keys import cosigning, signers
from policy import errors
from policy import package as packages
from policy.manifest import parse
from policy.signing import envelope, strict_json
from tests import signing_kit as kit

NOW, DAY = kit.NOW, kit.DAY
ROOT = kit.root(kit.operator(1, threshold=2), kit.operator(2, threshold=2), kit.operator(3))


def _door(number: int) -> signers.Signer:
    return signers.Signer(f"op{number}", kit.public(number), kit.key(number).sign)


def _plan(package: packages.Package, number: int, *, now_ms: int = NOW, **more: Any) -> cosigning.SignaturePlan:
    rest = {name: more.pop(name) for name in ("fresh", "known") if name in more}
    manifest = parse.parse(package.manifest)
    return cosigning.plan(package, manifest, cosigning.Wanted(**more), kit.public(number), now_ms=now_ms, **rest)


def _sign(package: packages.Package, number: int, **more: Any) -> packages.Package:
    return package.with_envelope(_plan(package, number, **more).signed_by(_door(number)))


UNSIGNED = packages.Package(kit.FILES)
BY_ONE = _sign(UNSIGNED, 1)


def test_two_operators_sign_one_payload_in_two_calls() -> None:
    with pytest.raises(errors.SignatureError, match="1 operators signed and 2 are needed"):
        kit.verify(BY_ONE, ROOT)
    # An hour later, without options for serial and dates.
    both = _sign(BY_ONE, 2, now_ms=NOW + 3_600_000)
    trusted = kit.verify(both, ROOT)
    assert [s.name for s in trusted.signers] == ["op1", "op2"]
    assert trusted.payload_digest == kit.verify(BY_ONE).payload_digest
    assert envelope.decode(both.envelope or b"").signatures[0] == envelope.decode(BY_ONE.envelope or b"").signatures[0]


def test_what_it_came_to_is_said() -> None:
    changed = packages.Package({**kit.FILES, "main.py": b"2"}, BY_ONE.envelope)
    both = _sign(BY_ONE, 2)
    rows: list[tuple[cosigning.SignaturePlan, str, str]] = [
        (_plan(UNSIGNED, 1), "new", ""),
        (_plan(BY_ONE, 2), "added", "beside 1 others, whom no trust root here could tell, over the same statement"),
        (_plan(BY_ONE, 2, known=ROOT.keys), "added", "beside op1, over the same statement"),
        (_plan(both, 3, known=ROOT.keys), "added", "beside op1 and op2, over the same statement"),
        (_plan(BY_ONE, 1), "replaced", "this key alone had signed the one before"),
        (_plan(BY_ONE, 2, fresh=True), "replaced", "a new statement was asked for"),
        (_plan(changed, 2), "replaced", "the files are not those that were signed"),
        (_plan(BY_ONE, 2, now_ms=NOW + 90 * DAY), "replaced", "the statement that was there has ended"),
        (_plan(UNSIGNED.with_envelope(b"{}"), 1), "replaced", "the envelope that was there could not be read"),
    ]
    for plan, how, why in rows:
        assert (plan.how, plan.why) == (how, why)
        assert bool(plan.envelope.signatures) is (how == "added")


def test_new_statement_has_new_serial_and_keeps_no_signature() -> None:
    fresh = _sign(_sign(BY_ONE, 2), 3, fresh=True, now_ms=NOW + 5)
    signed = envelope.decode(fresh.envelope or b"")
    assert [s.keyid for s in signed.signatures] == [kit.public(3).keyid]
    assert kit.verify(fresh, ROOT).statement.serial == NOW + 5


DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    # the first signer's terms, the second signer's terms, the named difference
    "another audience": ({}, {"audience": "host-b"}, "audience none, not host-b"),
    "another host": ({"audience": "host-a"}, {"audience": "host-b"}, "audience host-a, not host-b"),
    "an approval that the second does not give": (
        {"approve_unlimited": True}, {}, "approve_unlimited True, not False"),
    "an approval that the first did not give": ({}, {"approve_unlimited": True}, "approve_unlimited False, not True"),
    "another serial": ({}, {"serial": 7}, f"serial {NOW}, not 7"),
    "a longer life than goes without saying": ({"lifetime_ms": 91 * DAY}, {}, "expires_at"),
    "a longer life than was asked for": ({}, {"lifetime_ms": DAY}, "expires_at"),
    "a serial that no verifier takes": ({"serial": NOW + 2 * DAY}, {}, f"serial {NOW + 2 * DAY}, not {NOW}"),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENT)
def test_other_terms_are_refused_and_first_signature_stays(name: str) -> None:
    first, second, says = DIFFERENT[name]
    present = _sign(UNSIGNED, 1, **first)
    with pytest.raises(errors.SignatureError, match="something else") as caught:
        _plan(present, 2, **second)
    assert says in caught.value.message
    assert "--fresh" in caught.value.hint
    # A sole signer may change the terms at any time, and any signer may with --fresh.
    assert _plan(present, 1, **second).how == "replaced"
    assert _plan(present, 2, fresh=True, **second).how == "replaced"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"audience": "host-a"}, {}),
        ({"audience": "host-a"}, {"audience": "host-a"}),
        ({"serial": 7}, {"serial": 7}),
        ({"serial": 7}, {}),
        ({"lifetime_ms": DAY}, {}),
        ({"lifetime_ms": 91 * DAY}, {"lifetime_ms": 91 * DAY}),
        ({"lifetime_ms": DAY}, {"lifetime_ms": 2 * DAY}),
        ({"approve_unlimited": True}, {"approve_unlimited": True}),
    ],
)
def test_same_terms_or_narrower_ones_are_signed(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert _plan(_sign(UNSIGNED, 1, **first), 2, now_ms=NOW + 1, **second).how == "added"


def test_key_that_signed_already_has_nothing_to_add() -> None:
    both = _sign(BY_ONE, 2)
    for number in (1, 2):
        with pytest.raises(errors.SignatureError, match="this key and 1 more have signed the package already"):
            _plan(both, number)


def test_false_signature_under_our_id_stops_nobody() -> None:
    signed = envelope.decode(BY_ONE.envelope or b"")
    false = signed.signed_by(envelope.Signature(kit.public(2).keyid, bytes(64)))
    both = _sign(UNSIGNED.with_envelope(false.encode()), 2)
    assert [s.name for s in kit.verify(both, ROOT).signers] == ["op1", "op2"]
    assert len(envelope.decode(both.envelope or b"").signatures) == 2
    # A valid signature without a key id still counts as its signer's: they cannot sign again.
    bare = envelope.Envelope(
        signed.payload, signed.payload_type, (envelope.Signature("", signed.signatures[0].sig), *false.signatures[1:])
    )
    with pytest.raises(errors.SignatureError, match="have signed the package already"):
        _plan(UNSIGNED.with_envelope(bare.encode()), 1)


@pytest.mark.parametrize("keyid", [kit.public(1).keyid, f"{0:064x}", ""])
def test_statement_that_nobody_signed_is_not_taken_for_operators(keyid: str) -> None:
    """Else a user who can write the package would choose the serial, dates and host of the next signature."""
    laid = kit.statement(UNSIGNED, serial=NOW - DAY, audience="elsewhere", not_before=NOW - DAY, expires_at=NOW + 1)
    false = (envelope.Signature(keyid, bytes(64)), envelope.Signature(kit.public(9).keyid, kit.key(9).sign(b"")))
    forged = envelope.Envelope(laid.encode(), envelope.IN_TOTO_PAYLOAD_TYPE, false)
    present = UNSIGNED.with_envelope(forged.encode())
    with pytest.raises(errors.SignatureError, match="signed by no other key of the trust root"):
        _plan(present, 2, known=ROOT.keys)
    # Control: a valid signature beside the false ones is accepted, and so is a request for a fresh statement.
    true = UNSIGNED.with_envelope(forged.signed_by(forged.sign(kit.key(1))).encode())
    assert _plan(true, 2, known=ROOT.keys).why == "beside op1, over the same statement"
    assert _plan(present, 2, known=ROOT.keys, fresh=True).statement.serial == NOW


@pytest.mark.parametrize(
    "narrow",
    [
        {"scope": kit.scope(agents=("other", "hell"))},
        {"scope": kit.scope(roles=("reader",))},
        {"expires_at": NOW},
        {"not_before": NOW + 1},
    ],
)
def test_key_that_may_not_sign_this_chooses_no_dates_for_those_who_may(narrow: dict[str, Any]) -> None:
    known = kit.root(kit.operator(1, **narrow), kit.operator(2), signers=(2,)).keys
    with pytest.raises(errors.SignatureError, match="no other key of the trust root that may sign it"):
        _plan(BY_ONE, 2, known=known)
    assert _plan(BY_ONE, 2, known=kit.root(kit.operator(1), kit.operator(2)).keys).how == "added"


@pytest.mark.parametrize("field", ["serial", "not_before"])
def test_what_begins_in_future_is_asked_for_by_name(field: str) -> None:
    """A serial from tomorrow locks out packages signed today, and a statement for next month does not hold now."""
    later = kit.signed(1, files=dict(UNSIGNED.files), **{field: NOW + DAY - 1})
    with pytest.raises(errors.SignatureError, match=f"{field} {NOW + DAY - 1}, not "):
        _plan(later, 2)
    assert _plan(kit.signed(1, files=dict(UNSIGNED.files), **{field: NOW}), 2).how == "added"


def test_bytes_that_we_would_not_write_are_not_signed() -> None:
    payload = envelope.decode(BY_ONE.envelope or b"").payload
    for other, kind in ((payload + b" ", envelope.IN_TOTO_PAYLOAD_TYPE), (payload, "application/json")):
        present = UNSIGNED.with_envelope(kit.envelope(other, 1, payload_type=kind))
        assert _plan(present, 2).how == "replaced"
    for document in ({}, {"_type": "x"}):
        present = UNSIGNED.with_envelope(kit.envelope(strict_json.dumps(document), 1))
        assert _plan(present, 2).how == "replaced"


def test_envelope_full_takes_no_more() -> None:
    signed = envelope.decode(BY_ONE.envelope or b"")
    strangers = tuple(envelope.Signature(f"{n:064x}", bytes(64)) for n in range(16))
    full = UNSIGNED.with_envelope(envelope.Envelope(signed.payload, signed.payload_type, strangers).encode())
    with pytest.raises(errors.SignatureError, match="holds 16 signatures already"):
        _plan(full, 2)


def test_what_nobody_should_sign_is_refused_for_second_too() -> None:
    files = {**kit.FILES, "agent.toml": kit.MANIFEST + b"[lifetime]\nunlimited = true\n"}
    present = _sign(packages.Package(files), 1, approve_unlimited=True)
    with pytest.raises(errors.ManifestError, match="unlimited lifetime"):
        _plan(present, 2)
    assert _plan(present, 2, approve_unlimited=True).how == "added"


def test_door_that_signs_something_else_is_found_out() -> None:
    false = signers.Signer("op2", kit.public(2), kit.key(3).sign)
    with pytest.raises(errors.KeyFileError, match="does not verify"):
        _plan(BY_ONE, 2).signed_by(false)
