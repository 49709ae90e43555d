"""Another implementation reads what we sign, and we read what it signs."""

from __future__ import annotations

import json

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from securesystemslib.dsse import Envelope as TheirEnvelope
from securesystemslib.exceptions import VerificationError
from securesystemslib.signer._crypto_signer import CryptoSigner
from securesystemslib.signer._key import SSlibKey

from policy import package as packages
from policy.signing import envelope, trust
from tests import signing_kit as kit


def _their_key(number: int = 1) -> SSlibKey:
    return SSlibKey.from_crypto(kit.key(number).public_key())


def test_key_ids_are_same() -> None:
    for number in range(1, 6):
        assert kit.public(number).keyid == _their_key(number).keyid
    fresh = Ed25519PrivateKey.generate()
    assert envelope.PublicKey.of(fresh).keyid == SSlibKey.from_crypto(fresh.public_key()).keyid


def test_they_verify_our_envelope() -> None:
    raw = kit.signed(1, 2).envelope
    assert raw is not None
    theirs = TheirEnvelope.from_dict(json.loads(raw))
    assert set(theirs.verify([_their_key(1), _their_key(2)], 2)) == {kit.public(1).keyid, kit.public(2).keyid}
    with pytest.raises(VerificationError):
        TheirEnvelope.from_dict(json.loads(raw)).verify([_their_key(3)], 1)
    theirs.payload += b" "
    with pytest.raises(VerificationError):
        theirs.verify([_their_key(1)], 1)


def test_we_verify_their_envelope() -> None:
    package = packages.Package(kit.FILES)
    theirs = TheirEnvelope(kit.statement(package).encode(), envelope.IN_TOTO_PAYLOAD_TYPE, {})
    theirs.sign(CryptoSigner(kit.key(1)))
    raw = json.dumps(theirs.to_dict(), indent=2).encode()
    trusted = kit.verify(package.with_envelope(raw))
    assert isinstance(trusted, trust.TrustedPackage)
    assert [s.keyid for s in trusted.signers] == [_their_key(1).keyid]


def test_both_sign_same_bytes() -> None:
    theirs = TheirEnvelope(b"payload", envelope.IN_TOTO_PAYLOAD_TYPE, {})
    ours = envelope.sign(b"payload", envelope.IN_TOTO_PAYLOAD_TYPE, [kit.key(1)])
    assert theirs.pae() == ours.pae()
    assert theirs.sign(CryptoSigner(kit.key(1))).signature == ours.signatures[0].sig.hex()
