"""Signed documents, and those that say who may sign: JSON that decides, read once and strictly."""

from __future__ import annotations

import json
from typing import Any

from policy import errors
from policy.signing import envelope as envelopes
from policy.signing import keyfile, proposal, strict_json
from policy.signing import root as roots
from policy.signing import statement as statements
from tests import signing_kit as kit
from tests.fuzz.drive import Target

_SMALL = keyfile.Argon2Parameters(memory_kib=8 * 1024, iterations=1, lanes=1)


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len({key for key, _ in pairs}) == len(pairs), "an object with a key twice was accepted"
    return dict(pairs)


def strict(raw: bytes) -> str:
    """JSON: what is accepted, Python's reader reads the same, no key twice, no float, and so does its one spelling."""
    value = strict_json.loads(raw, max_bytes=20_000)
    assert json.loads(raw, object_pairs_hook=_no_doubles) == value
    assert _plain(value)
    assert strict_json.loads(strict_json.dumps(value), max_bytes=200_000) == value
    return type(value).__name__


def _plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_plain(inner) for inner in value.values())
    if isinstance(value, list):
        return all(_plain(inner) for inner in value)
    return value is None or type(value) in (bool, int, str)


def envelope(raw: bytes) -> str:
    """A DSSE envelope: written again it is the same envelope, and its bytes are canonical base64."""
    read = envelopes.decode(raw)
    assert envelopes.decode(read.encode()) == read
    assert 1 <= len(read.signatures) <= envelopes.MAX_SIGNATURES
    assert all(len(s.sig) == envelopes.SIGNATURE_BYTES for s in read.signatures)
    assert read.pae().endswith(read.payload)
    return f"{len(read.signatures)} signatures"


def statement(raw: bytes) -> str:
    """A statement: its own bytes say all of it, and nothing stands beside it."""
    read = statements.parse(raw)
    assert statements.parse(read.encode()) == read
    assert read.not_before < read.expires_at
    said = json.loads(raw)
    assert set(said) == {"_type", "subject", "predicateType", "predicate"}
    assert len(said["subject"]) == len(read.subjects)
    assert said["predicate"]["agent_id"] == read.agent_id
    assert "@" not in read.agent_id
    return f"{min(len(read.subjects), 9)} subjects"


def root(raw: bytes) -> str:
    """Decode a trust root in a made-up envelope: closed, consistent, and signed by itself."""
    signed = envelopes.Envelope(raw, roots.PAYLOAD_TYPE, (envelopes.Signature("", bytes(64)),)).encode()
    document, _ = roots.decode(signed)
    again = envelopes.Envelope(document.encode(), roots.PAYLOAD_TYPE, (envelopes.Signature("", bytes(64)),)).encode()
    assert roots.decode(again)[0] == document
    assert document.threshold <= len(document.root_keys)
    ids = [key.key.keyid for key in document.keys]
    assert len(set(ids)) == len(ids)
    assert not set(ids) & {key.keyid for key in document.revoked.keys}
    assert proposal.decode(again).document == document
    try:
        roots.TrustRoot.parse(again)
    except errors.TrustError:
        return f"{len(ids)} keys"
    raise AssertionError("a root that nobody signed was taken")


def root_file(raw: bytes) -> str:
    """A trust root as a file: only the two roots that were really signed are ever taken."""
    read = roots.TrustRoot.parse(raw)
    assert read.document.encode() in _SIGNED_DOCUMENTS
    return f"version {read.version}"


def key(raw: bytes) -> str:
    """A key file: written again it is the same; a plain secret opens only when it is that of its public half."""
    read = keyfile.read(raw)
    assert (read.plain is None) != (read.sealed is None)
    if read.plain is None:
        return "sealed"
    private = keyfile.unlock(read)
    assert envelopes.PublicKey.of(private) == read.key
    assert keyfile.read(keyfile.plain(private)) == read
    return "plain"


def _statement() -> bytes:
    from policy import package

    return kit.statement(package.Package(kit.FILES)).encode()


_DOCUMENTS = (kit.root_document(), kit.root_document(kit.operator(1), kit.operator(2), threshold=1))
_SIGNED_DOCUMENTS = [strict_json.dumps(document) for document in _DOCUMENTS]
_KEYS = (b'"keyid"', b'"sig"', b'"payload"', b'"payloadType"', b"==", b"-_", b"+/", b"application/vnd.in-toto+json")


def _keys() -> list[bytes]:
    sealed = keyfile.seal(kit.key(2), b"p", salt=bytes(16), nonce=bytes(12), parameters=_SMALL)
    return [keyfile.plain(kit.key(1)), sealed]


_MALFORMED = (strict_json.MalformedJsonError, errors.CovenantError)

TARGETS = (
    Target(
        "strict json",
        strict,
        lambda: (b'{"a":[1,-2,"\\u00e9"],"b":{"c":null,"d":true}}', b"[]"),
        (b'"a":1,', b"1.0", b"\\ud800", b"1" * 5000),
        refusals=_MALFORMED,
        share=16,
    ),
    Target(
        "envelope",
        envelope,
        lambda: (kit.envelope(b"{}"), kit.envelope(b"x" * 40, 1, 2)),
        _KEYS,
        refusals=_MALFORMED,
        share=6,
    ),
    Target(
        "envelope tree",
        envelope,
        lambda: (kit.envelope(b"{}"), kit.envelope(b"x" * 40, 1, 2)),
        _KEYS,
        refusals=_MALFORMED,
        share=6,
        json=True,
    ),
    Target(
        "statement",
        statement,
        lambda: (_statement(),),
        (b"..", b"a/b", b"Agent.toml", b"*"),
        refusals=_MALFORMED,
        share=8,
        json=True,
    ),
    Target(
        "trust root",
        root,
        lambda: _SIGNED_DOCUMENTS,
        (b"*", b"op1", b"a-*", b"root"),
        refusals=_MALFORMED,
        share=5,
        json=True,
    ),
    Target(
        "trust root file",
        root_file,
        lambda: [kit.root_bytes(d) for d in _DOCUMENTS],
        _KEYS,
        refusals=_MALFORMED,
        share=5,
    ),
    Target("key file", key, _keys, (b'"plain"', b'"sealed"', b"null"), refusals=_MALFORMED, share=6, json=True),
)
