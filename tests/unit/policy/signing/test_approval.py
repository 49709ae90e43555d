"""An operator's approval of an apply: who may give it, until when, and what is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from policy import errors
from policy.signing import approval, envelope, statement, strict_json, trust
from tests import signing_kit as kit

NOW, DAY = kit.NOW, kit.DAY
FIELDS: dict[str, Any] = {
    "agent_id": "hello",
    "run_id": "0b5c3a52-0f5e-4a55-9a07-2f4f3f1f9b52",
    "policy_digest": "1" * 64,
    "changes_sha256": "2" * 64,
    "not_before": NOW - 1000,
    "expires_at": NOW + DAY,
}


def approved(*signers: int, payload_type: str = approval.PAYLOAD_TYPE, **changes: Any) -> bytes:
    """An approval by these fixed keys, well-formed or not."""
    return kit.envelope(strict_json.dumps({**FIELDS, **changes}), *signers, payload_type=payload_type)


def verify(raw: bytes, root: trust.TrustRoot | None = None, **changes: Any) -> approval.Approval:
    values: dict[str, Any] = {"role": None, "now_ms": NOW, **changes}
    return approval.verify(raw, root or kit.root(), **values)


def test_approval_of_an_operator_is_verified() -> None:
    found = verify(approved())
    assert found.signers == ("op1",)
    assert found.statement.model_dump() == FIELDS
    assert len(found.sha256) == 64


Case = tuple[Callable[[], bytes], dict[str, Any], type[errors.CovenantError]]
REFUSED: dict[str, Case] = {
    "a statement over a package": (lambda: kit.signed().envelope or b"", {}, errors.SignatureError),
    "another payload type": (lambda: approved(payload_type="text/plain"), {}, errors.SignatureError),
    "no JSON": (lambda: b"x", {}, errors.SignatureError),
    "too long": (lambda: approved() + b" " * approval.MAX_BYTES, {}, errors.SignatureError),
    "a field more": (lambda: approved(more=1), {}, errors.SignatureError),
    "a digest that is none": (lambda: approved(changes_sha256="2"), {}, errors.SignatureError),
    "31 days": (lambda: approved(expires_at=NOW + 31 * DAY), {}, errors.SignatureError),
    "another's key": (lambda: approved(2), {}, errors.UnknownKeyError),
    "ended": (approved, {"now_ms": NOW + DAY}, errors.ExpiredError),
    "ended by the greatest time": (approved, {"greatest_time_ms": NOW + DAY}, errors.ExpiredError),
    "not yet": (lambda: approved(not_before=NOW + 1, expires_at=NOW + 2), {}, errors.ExpiredError),
}


@pytest.mark.parametrize("name", REFUSED)
def test_approval_that_does_not_hold_is_refused(name: str) -> None:
    raw, changes, kind = REFUSED[name]
    with pytest.raises(kind) as caught:
        verify(raw(), **changes)
    assert caught.value.where in ("approval", "")


def test_scope_of_the_key_covers_agent_and_role() -> None:
    narrow = kit.root(kit.operator(1), kit.operator(2, root=False, scope=kit.scope(agents=("other-*",))))
    with pytest.raises(errors.UnknownKeyError, match="agent `hello`"):
        verify(approved(2), narrow)
    assert verify(approved(2, agent_id="other-1"), narrow).signers == ("op2",)
    by_role = kit.root(kit.operator(1), kit.operator(2, root=False, scope=kit.scope(roles=("reader",))))
    with pytest.raises(errors.UnknownKeyError, match="role"):
        verify(approved(2), by_role, role="developer")
    assert verify(approved(2), by_role, role="reader").signers == ("op2",)


def test_threshold_of_the_keys_holds() -> None:
    both = kit.root(kit.operator(1), kit.operator(2, root=False, threshold=2))
    with pytest.raises(errors.SignatureError, match="are needed"):
        verify(approved(2), both)
    assert verify(approved(1, 2), both).signers == ("op1", "op2")


def test_revoked_key_approves_nothing() -> None:
    root = kit.root(kit.operator(1), revoked=kit.revoked(keys=[kit.revoked_key(2)]))
    with pytest.raises(errors.RevokedError):
        verify(approved(2), root)


def test_approval_is_no_package_signature() -> None:
    raw = approved()
    with pytest.raises(errors.SignatureError):
        kit.verify(kit.signed().with_envelope(raw))
    payload = envelope.decode(raw).payload
    with pytest.raises(strict_json.MalformedJsonError):
        statement.parse(payload)
