"""Attack: take two honest documents apart and put the parts together in another way."""

from __future__ import annotations

import pytest
from msgspec import structs

from policy import errors, package
from policy.signing import envelope, trust
from policy.signing import root as roots
from tests import signing_kit as kit

NOW = kit.NOW
op = kit.operator
BOTH = kit.root(op(1, threshold=2), op(2, threshold=2))


def _of(made: package.Package) -> envelope.Envelope:
    return envelope.decode(made.envelope or b"")


def test_signatures_of_two_packages_do_not_add_up() -> None:
    one, other = kit.signed(1), kit.signed(2, serial=NOW + 1)
    kit.verify(kit.signed(1, 2), BOTH)
    for base in (one, other):
        mixed = structs.replace(_of(base), signatures=_of(one).signatures + _of(other).signatures)
        with pytest.raises(errors.SignatureError, match="1 operators signed and 2 are needed"):
            kit.verify(base.with_envelope(mixed.encode()), BOTH)


def test_files_of_one_package_under_envelope_of_another() -> None:
    newer = {**kit.FILES, "main.py": b"print('mended')\n"}
    old, new = kit.signed(), kit.signed(files=newer, serial=NOW + 1)
    kit.verify(new)
    with pytest.raises(errors.DigestMismatchError):
        kit.verify(old.with_envelope(new.envelope))
    with pytest.raises(errors.DigestMismatchError):
        kit.verify(new.with_envelope(old.envelope))
    # Nor file by file.
    halves = package.Package({**kit.FILES, "main.py": newer["main.py"]}, old.envelope)
    with pytest.raises(errors.DigestMismatchError, match=r"`main\.py`"):
        kit.verify(halves)


def test_statement_of_one_agent_over_manifest_of_another() -> None:
    # An operator may sign for `hello` only; the files say that they are `other`.
    files = {**kit.FILES, "agent.toml": kit.MANIFEST.replace(b'"hello"', b'"other"')}
    trusted = kit.verify(kit.signed(files=files), kit.root(op(1, scope=kit.scope(agents=("hello",)))))
    with pytest.raises(errors.SignatureError, match="the manifest is of agent `other`"):
        trust.authorise(trusted, agent_id="other", role=None, operator=None)
    assert trust.authorise(kit.verify(kit.signed()), agent_id="hello", role=None, operator=None)


def test_signatures_of_two_candidates_for_one_version_do_not_add_up() -> None:
    present = kit.root(op(1), op(2), threshold=2)
    mine = kit.root_document(op(1), op(2), op(3), version=2, threshold=2)
    theirs = kit.root_document(op(1), op(2), op(4), version=2, threshold=2)
    signed = [envelope.decode(kit.root_bytes(d, n)) for d, n in ((mine, 1), (theirs, 2))]
    for base in signed:
        mixed = structs.replace(base, signatures=signed[0].signatures + signed[1].signatures)
        with pytest.raises(errors.TrustError, match="is not signed by the keys of version 1"):
            present.successor(mixed.encode(), NOW)
    assert present.successor(kit.root_bytes(mine, 1, 2), NOW).version == 2


def test_successor_of_one_root_does_not_follow_another_with_same_number() -> None:
    here, elsewhere = kit.root(op(1)), kit.root(op(2))
    raw = kit.root_bytes(kit.root_document(op(2), version=2), 2)
    assert elsewhere.successor(raw, NOW).version == 2
    with pytest.raises(errors.TrustError, match="is not signed by the keys of version 1"):
        here.successor(raw, NOW)


def test_signature_on_version_1_is_none_on_version_2() -> None:
    first, second = kit.root_document(op(1)), kit.root_document(op(1), version=2)
    old = envelope.decode(kit.root_bytes(first, 1))
    mixed = structs.replace(envelope.decode(kit.root_bytes(second, 9)), signatures=old.signatures)
    with pytest.raises(errors.TrustError, match="not signed"):
        roots.TrustRoot.parse(mixed.encode())
    with pytest.raises(errors.TrustError, match="is not signed by the keys"):
        kit.root(op(1)).successor(mixed.encode(), NOW)
    assert kit.root(op(1)).successor(kit.root_bytes(second, 1), NOW).version == 2
