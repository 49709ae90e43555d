"""Attack: leave the signatures and change what they stand on."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from policy import errors
from policy.signing import envelope
from policy.signing import root as roots
from tests import signing_kit as kit

NOW = kit.NOW
MADE = kit.signed()


def _document() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(MADE.envelope or b"")
    return document


def _payload() -> dict[str, Any]:
    statement: dict[str, Any] = json.loads(base64.b64decode(_document()["payload"]))
    return statement


def _refused(document: dict[str, Any]) -> None:
    with pytest.raises(errors.SignatureError):
        kit.verify(MADE.with_envelope(json.dumps(document).encode()))


def _with_payload(payload: bytes) -> dict[str, Any]:
    return _document() | {"payload": base64.b64encode(payload).decode()}


def test_control_envelope_written_anew_verifies() -> None:
    kit.verify(MADE.with_envelope(json.dumps(_document(), indent=3).encode()))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("agent_id", "other"),
        ("serial", NOW + 1),
        ("not_before", 0),
        ("expires_at", NOW + 91 * kit.DAY),
        ("audience", "host-b"),
        ("roles_version", 2),
        ("deny_version", 0),
        ("parent_digest", "0" * 64),
        ("approve_unlimited", True),
        ("unknown_sections", ["x"]),
    ],
)
def test_each_field_of_predicate_is_signed(field: str, value: object) -> None:
    payload = _payload()
    assert payload["predicate"][field] != value
    payload["predicate"][field] = value
    _refused(_with_payload(json.dumps(payload, sort_keys=True, separators=(",", ":")).encode()))


def test_each_subject_is_signed() -> None:
    for index in range(len(kit.FILES)):
        payload = _payload()
        payload["subject"][index]["digest"]["sha256"] = "0" * 64
        _refused(_with_payload(json.dumps(payload).encode()))


def test_same_statement_in_other_bytes_is_not_what_was_signed() -> None:
    payload = base64.b64decode(_document()["payload"])
    assert json.loads(payload) == _payload()
    for other in (
        payload + b"\n",
        b" " + payload,
        json.dumps(_payload()).encode(),
        json.dumps(_payload(), indent=1).encode(),
    ):
        _refused(_with_payload(other))


def test_two_payloads_in_one_envelope_are_refused() -> None:
    raw = json.dumps(_document())
    swapped = _with_payload(b"{}")["payload"]
    for twice in (
        raw[:-1] + f', "payload": "{swapped}"}}',
        f'{{"payload": "{swapped}", ' + raw[1:],
    ):
        with pytest.raises(errors.SignatureError, match="stands twice"):
            kit.verify(MADE.with_envelope(twice.encode()))


def test_payload_is_not_moved_across_border_to_its_type() -> None:
    signed = envelope.decode(MADE.envelope or b"")
    kind, payload = signed.payload_type, signed.payload
    for other, rest in ((f"{kind} {len(payload)}", payload), (kind[:-1], kind[-1:].encode() + payload)):
        moved = envelope.Envelope(rest, other, signed.signatures)
        assert not envelope.signers(moved, [kit.public(1)])
    assert envelope.signers(signed, [kit.public(1)]) == (kit.public(1),)


def test_payload_of_root_is_signed_too() -> None:
    present = kit.root()
    document = kit.root_document(version=2)
    raw = json.loads(kit.root_bytes(document))
    assert present.successor(json.dumps(raw).encode(), NOW).version == 2
    wider = {**document, "keys": [*document["keys"], kit.operator(2)]}
    raw["payload"] = base64.b64encode(json.dumps(wider).encode()).decode()
    with pytest.raises(errors.TrustError, match="is not signed by the keys"):
        present.successor(json.dumps(raw).encode(), NOW)
    with pytest.raises(errors.TrustError, match="not signed"):
        roots.TrustRoot.parse(json.dumps(raw).encode())
