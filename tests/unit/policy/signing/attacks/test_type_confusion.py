"""Attack: have a signature on one kind of document taken for one on another, or a value of one type for another's."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from policy import errors, package
from policy.audit_log import chain
from policy.signing import envelope, statement, strict_json
from policy.signing import root as roots
from tests import signing_kit as kit

NOW = kit.NOW
TYPES = (
    envelope.IN_TOTO_PAYLOAD_TYPE,
    roots.PAYLOAD_TYPE,
    "application/vnd.in-toto+json ",
    "APPLICATION/VND.IN-TOTO+JSON",
    "application/vnd.in-toto+json; charset=utf-8",
    "application/json",
    "",
)
STATEMENT = kit.statement(package.Package(kit.FILES)).encode()
ROOT = strict_json.dumps(kit.root_document(version=2))


@pytest.mark.parametrize("kind", TYPES)
def test_statement_is_one_under_its_own_type_only(kind: str) -> None:
    made = package.Package(kit.FILES, kit.envelope(STATEMENT, payload_type=kind))
    if kind == envelope.IN_TOTO_PAYLOAD_TYPE:
        kit.verify(made)
        return
    with pytest.raises(errors.SignatureError, match="payload type"):
        kit.verify(made)


@pytest.mark.parametrize("kind", TYPES)
def test_root_is_one_under_its_own_type_only(kind: str) -> None:
    raw = kit.envelope(ROOT, payload_type=kind)
    if kind == roots.PAYLOAD_TYPE:
        assert kit.root().successor(raw, NOW).version == 2
        return
    with pytest.raises(errors.TrustError, match="payload type"):
        kit.root().successor(raw, NOW)


def test_signature_made_for_one_type_is_none_under_other() -> None:
    for payload, own, other in (
        (STATEMENT, envelope.IN_TOTO_PAYLOAD_TYPE, roots.PAYLOAD_TYPE),
        (ROOT, roots.PAYLOAD_TYPE, envelope.IN_TOTO_PAYLOAD_TYPE),
    ):
        signed = envelope.sign(payload, own, [kit.key(1)])
        assert envelope.signers(signed, [kit.public(1)])
        assert not envelope.signers(envelope.Envelope(payload, other, signed.signatures), [kit.public(1)])


def test_root_is_no_statement_and_statement_no_root_even_when_signed_as_one() -> None:
    with pytest.raises(errors.SignatureError, match="the statement is malformed"):
        kit.verify(package.Package(kit.FILES, kit.envelope(ROOT)))
    with pytest.raises(errors.TrustError, match="the trust root is malformed"):
        kit.root().successor(kit.envelope(STATEMENT, payload_type=roots.PAYLOAD_TYPE), NOW)


@pytest.mark.parametrize(("field", "value"), [("_type", "https://in-toto.io/Statement/v0.1"), ("_type", None)])
@pytest.mark.parametrize("predicate", [statement.PREDICATE_TYPE, "https://slsa.dev/provenance/v1", "x"])
def test_statement_of_another_tool_is_none_of_ours(field: str, value: object, predicate: str) -> None:
    document = json.loads(STATEMENT)
    document["predicateType"] = predicate
    if predicate != statement.PREDICATE_TYPE:
        with pytest.raises(errors.SignatureError, match="malformed"):
            kit.verify(package.Package(kit.FILES, kit.envelope(strict_json.dumps(document))))
    document[field] = value
    with pytest.raises(errors.SignatureError, match="malformed"):
        kit.verify(package.Package(kit.FILES, kit.envelope(strict_json.dumps(document))))


def test_signed_head_of_log_is_no_envelope_and_no_root() -> None:
    # The log's key signs its heads; were it ever listed in a root, what it signed is still nothing to `verify`.
    head = chain.sign_head(chain.Head(), Ed25519PrivateKey.from_private_bytes(bytes([1]) * 32))
    with pytest.raises(errors.SignatureError, match="malformed"):
        kit.verify(package.Package(kit.FILES, head))
    with pytest.raises(errors.TrustError, match="malformed"):
        kit.root().successor(head, NOW)


# What a lenient reader takes for a number, a yes or a list.
WRONG: dict[str, list[Any]] = {
    "serial": [str(NOW), True, None, [NOW], {"v": NOW}, -1, 2**53],
    "not_before": ["0", False, None],
    "expires_at": [str(NOW), True, None],
    "audience": [1, True, [], ["host-a"], ""],
    "approve_unlimited": [1, 0, "true", "false", None, []],
    "unknown_sections": ["x", {}, None, [1], ["b", "a"], ["a", "a"]],
    "agent_id": [1, None, ["hello"], "", "a b"],
    "parent_digest": [0, "", "0" * 63, "0" * 65, "G" * 64, "A" * 64],
    "roles_version": ["1", True, None],
    "deny_version": [[], False],
}


@pytest.mark.parametrize("field", WRONG)
def test_each_field_has_one_type(field: str) -> None:
    for value in WRONG[field]:
        document = json.loads(STATEMENT)
        document["predicate"][field] = value
        with pytest.raises(errors.SignatureError, match="malformed"):
            kit.verify(package.Package(kit.FILES, kit.envelope(strict_json.dumps(document))))


@pytest.mark.parametrize("text", ["1.0", "1e3", "NaN", "Infinity", "-0", "01", "+1", "0x1", "1_000", "9" * 5000])
def test_number_has_one_form(text: str) -> None:
    payload = STATEMENT.replace(f'"serial":{NOW}'.encode(), f'"serial":{text}'.encode())
    assert payload != STATEMENT
    made = package.Package(kit.FILES, kit.envelope(payload))
    if text == "-0":
        # The one other spelling of a number that JSON has without a fraction; it is the same number.
        assert kit.verify(made).statement.serial == 0
        return
    with pytest.raises(errors.SignatureError, match="malformed"):
        kit.verify(made)


@pytest.mark.parametrize(
    ("field", "value"),
    [("threshold", "1"), ("threshold", True), ("version", 2.0), ("version", True), ("keys", {}), ("revoked", [])],
)
def test_fields_of_root_have_one_type_too(field: str, value: object) -> None:
    kit.root().successor(kit.root_bytes(kit.root_document(version=2)), NOW)
    raw = envelope.sign(
        json.dumps({**kit.root_document(version=2), field: value}).encode(), roots.PAYLOAD_TYPE, [kit.key(1)]
    ).encode()
    with pytest.raises(errors.TrustError, match="malformed"):
        kit.root().successor(raw, NOW)


def test_true_is_no_one_in_keys_own_fields() -> None:
    for changes in ({"threshold": True}, {"root": 1}, {"not_before": False}, {"name": 1}, {"public": 1}):
        raw = kit.root_bytes(kit.root_document(kit.operator(1, **changes), version=2))
        with pytest.raises(errors.TrustError, match="malformed"):
            kit.root().successor(raw, NOW)
