"""Attack: say something beside the payload that a reader would believe. Nothing there means anything."""

from __future__ import annotations

import json
from typing import Any

import pytest

from policy import errors, package
from policy.signing import root as roots
from policy.signing import statement, strict_json
from tests import signing_kit as kit

NOW = kit.NOW
op = kit.operator
MADE = kit.signed(1)
RAW: dict[str, Any] = json.loads(MADE.envelope or b"")


def _verify(document: Any, root: roots.TrustRoot | None = None) -> Any:
    return kit.verify(MADE.with_envelope(json.dumps(document).encode()), root)


@pytest.mark.parametrize(
    "key", ["agent_id", "serial", "expires_at", "audience", "approve_unlimited", "keys", "_type", ""]
)
def test_key_beside_payload_is_refused(key: str) -> None:
    _verify(RAW)
    with pytest.raises(errors.SignatureError, match="unknown key"):
        _verify({**RAW, key: True})


@pytest.mark.parametrize("key", ["name", "scope", "threshold", "approve_unlimited", "cert", "public", "at"])
def test_key_beside_signature_is_refused(key: str) -> None:
    with pytest.raises(errors.SignatureError, match="unknown key"):
        _verify({**RAW, "signatures": [{**RAW["signatures"][0], key: 1}]})


def test_key_id_decides_nothing_but_which_key_is_asked() -> None:
    root = kit.root(op(1, scope=kit.scope(agents=("elsewhere",))), op(2))
    # Signed by op1, who may not sign this agent; the id says op2, who may.
    claimed = {**RAW, "signatures": [{**RAW["signatures"][0], "keyid": kit.public(2).keyid}]}
    with pytest.raises(errors.SignatureError, match="does not fit"):
        _verify(claimed, root)
    for signatures in (RAW["signatures"], [{"sig": RAW["signatures"][0]["sig"]}]):
        with pytest.raises(errors.UnknownKeyError, match="no signer may sign for agent `hello`"):
            _verify({**RAW, "signatures": signatures}, root)
        assert _verify({**RAW, "signatures": signatures}).signers[0].name == "op1"


def test_order_of_signatures_decides_nothing() -> None:
    both: dict[str, Any] = json.loads(kit.signed(1, 2).envelope or b"")
    root = kit.root(op(1), op(2))
    forward, backward = _verify(both, root), _verify({**both, "signatures": both["signatures"][::-1]}, root)
    assert forward.signers == backward.signers
    assert forward.payload_digest == backward.payload_digest


def test_signature_added_changes_neither_payload_nor_serial() -> None:
    root = kit.root(op(1), op(2))
    one, both = _verify(RAW, root), _verify(json.loads(kit.signed(1, 2).envelope or b""), root)
    assert (one.payload_digest, one.statement) == (both.payload_digest, both.statement)


def test_envelope_itself_is_no_file_of_package_and_nothing_else_is_left_out() -> None:
    assert set(MADE.files) == set(kit.FILES)
    for name in ("agent.dsse.json.bak", "AGENT.DSSE.JSON", "lib/agent.dsse.json", ".hidden"):
        try:
            offered = package.Package({**kit.FILES, name: b"{}"}, MADE.envelope)
        except errors.PackageError:
            continue
        with pytest.raises(errors.DigestMismatchError, match="is not in the signed statement"):
            kit.verify(offered)


def _without(document: dict[str, Any], *path: str) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(json.dumps(document))
    at = made
    for key in path[:-1]:
        at = at[key]
    del at[path[-1]]
    return made


def test_what_is_not_written_is_not_assumed() -> None:
    wire = json.loads(kit.statement(package.Package(kit.FILES)).encode())
    statement.parse(strict_json.dumps(wire))
    for field in wire["predicate"]:
        with pytest.raises(strict_json.MalformedJsonError):
            statement.parse(strict_json.dumps(_without(wire, "predicate", field)))
    for field in wire:
        with pytest.raises(strict_json.MalformedJsonError):
            statement.parse(strict_json.dumps(_without(wire, field)))
    document = kit.root_document()
    for field in document:
        with pytest.raises(errors.TrustError, match="malformed"):
            roots.TrustRoot.load(kit.root_bytes(_without(document, field)), NOW)
    for field in document["keys"][0]:
        entry = _without(document["keys"][0], field)
        with pytest.raises(errors.TrustError, match="malformed"):
            roots.TrustRoot.load(kit.root_bytes({**document, "keys": [entry]}), NOW)
    for field in document["revoked"]:
        with pytest.raises(errors.TrustError, match="malformed"):
            roots.TrustRoot.load(kit.root_bytes(_without(document, "revoked", field)), NOW)
