"""Check the authority of a run in its label: a later root judges it as the verification did."""

from __future__ import annotations

from typing import Any

import pytest

from policy.signing import authority, strict_json, trust
from policy.signing import root as roots
from tests import signing_kit as kit

op = kit.operator


def _authority(*signers: int, root: roots.TrustRoot | None = None, **statement: Any) -> authority.Authority:
    trusted = kit.verify(kit.signed(*signers, **statement), root or kit.root(op(1), op(2)))
    signed = trust.authorise(trusted, agent_id="hello", role=None, operator=None)
    return authority.Authority.of("run", trusted, signed)


def test_line_is_read_as_it_was_written() -> None:
    line = (_authority(1), _authority(1, 2))
    assert authority.decode(authority.encode(line)) == line
    assert authority.encode(line).isascii()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"line":[{}]}', '{"line":[],"more":1}', '{"line":1}', "{" * 9000, "x" * 300_000]
)
def test_what_is_no_line_is_refused(text: str) -> None:
    with pytest.raises(strict_json.MalformedJsonError):
        authority.decode(text)


def test_it_is_judged_as_what_was_verified() -> None:
    first = kit.root(op(1), op(2, scope=kit.scope(unlimited=False)))
    later = kit.root(op(2), revoked=kit.revoked(keys=[kit.revoked_key(1)]))
    alone = _authority(1, root=first)
    assert alone.revoked(first) is None
    assert alone.revoked(kit.root(op(2))) is None  # removed, not revoked
    assert alone.revoked(later) == "the key of `op1`, who signed, was revoked: stolen"
    assert _authority(1, 2, root=first).revoked(later) is None
    unlimited = _authority(1, 2, root=first, approve_unlimited=True)
    assert "approved the unlimited lifetime" in str(unlimited.revoked(later))
    entry = {"payload_digest": alone.payload_digest, "at": kit.NOW, "reason": "it leaks"}
    assert (
        alone.revoked(kit.root(revoked=kit.revoked(manifests=[entry]))) == "the signed manifest was revoked: it leaks"
    )
