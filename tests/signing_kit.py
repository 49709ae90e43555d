"""Helpers for tests of signing: fixed keys, a fixed moment, and a signed package in one call."""

from __future__ import annotations

from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from policy import package as packages
from policy.signing import envelope as envelopes
from policy.signing import root as roots
from policy.signing import statement as statements
from policy.signing import trust

NOW = 1_800_000_000_000
DAY = statements.DAY_MS
HOST = "host-a"
MANIFEST = b"""[agent]
id = "hello"
name = "hello"
version = "0.1.0"
runtime = "python3"
entry = "main.py"

[resources]
network = "off"

[sandbox]
required = true
backend = "linux-gvisor"
"""
FILES = {"agent.toml": MANIFEST, "main.py": b"print('hi')\n", "lib/data.txt": b"a\nb\n"}


def key(number: int = 1) -> Ed25519PrivateKey:
    """One of the fixed keys."""
    return Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)


def public(number: int = 1) -> envelopes.PublicKey:
    return envelopes.PublicKey.of(key(number))


def operator(number: int = 1, **changes: Any) -> dict[str, Any]:
    """An entry of a trust root for a fixed key, named op1, op2, ..."""
    return {
        "name": f"op{number}",
        "public": public(number).raw.hex(),
        "scope": scope(),
        "root": True,
        "threshold": 1,
        "not_before": 0,
        "expires_at": NOW + 1000 * DAY,
        **changes,
    }


def scope(*, agents: tuple[str, ...] = ("*",), roles: tuple[str, ...] = ("*",), unlimited: bool = True) -> Any:
    """A key's scope; everything unless said otherwise."""
    return {"agents": list(agents), "roles": list(roles), "approve_unlimited": unlimited}


def revoked(**lists: list[dict[str, Any]]) -> dict[str, Any]:
    """The revocations of a root document."""
    return {"keys": [], "manifests": [], "serials": [], **lists}


def revoked_key(number: int, **changes: Any) -> dict[str, Any]:
    """An entry of ``revoked.keys`` for a fixed key."""
    return {"keyid": public(number).keyid, "name": f"op{number}", "at": NOW, "reason": "stolen", **changes}


def root_document(*operators: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "not_before": 0,
        "expires_at": NOW + 1000 * DAY,
        "threshold": 1,
        "keys": list(operators or (operator(1),)),
        "revoked": revoked(),
        **changes,
    }


def root_bytes(document: dict[str, Any], *signers: int) -> bytes:
    """A trust root as given, well-formed or not, signed by these fixed keys."""
    from policy.signing import strict_json

    payload = strict_json.dumps(document)
    return envelopes.sign(payload, roots.PAYLOAD_TYPE, [key(n) for n in signers or (1,)]).encode()


def root(*operators: dict[str, Any], signers: tuple[int, ...] = (), **changes: Any) -> trust.TrustRoot:
    """A trust root of these operators, signed by all of them that are fixed keys, unless told by whom."""
    document = root_document(*operators, **changes)
    listed = {entry["public"] for entry in document["keys"]}
    everybody = tuple(n for n in range(1, 10) if public(n).raw.hex() in listed)
    return trust.TrustRoot.load(root_bytes(document, *(signers or everybody)), NOW)


def statement(package: packages.Package, **changes: Any) -> statements.Statement:
    values = {
        "agent_id": "hello",
        "serial": NOW,
        "not_before": NOW - 1000,
        "expires_at": NOW + 90 * DAY,
        "audience": None,
        "roles_version": 1,
        "deny_version": 1,
        "parent_digest": None,
        "approve_unlimited": False,
        "unknown_sections": (),
        "subjects": dict(package.digests),
    }
    return statements.make(values | changes)


def signed(*signers: int, files: dict[str, bytes] | None = None, **changes: Any) -> packages.Package:
    """A package under an envelope by these fixed keys; ``changes`` are fields of the statement."""
    package = packages.Package(files or FILES)
    payload = statement(package, **changes).encode()
    return package.with_envelope(envelope(payload, *signers))


def envelope(payload: bytes, *signers: int, payload_type: str = envelopes.IN_TOTO_PAYLOAD_TYPE) -> bytes:
    return envelopes.sign(payload, payload_type, [key(n) for n in signers or (1,)]).encode()


class Serials(dict[str, trust.Accepted]):
    """An in-memory ratchet."""

    def accepted(self, agent_id: str) -> trust.Accepted | None:
        return self.get(agent_id)


def verify(package: packages.Package, root_: trust.TrustRoot | None = None, **changes: Any) -> trust.TrustedPackage:
    values: dict[str, Any] = {"now_ms": NOW, "audience": HOST, "serials": Serials()}
    return trust.verify(package, root_ or root(), **(values | changes))
