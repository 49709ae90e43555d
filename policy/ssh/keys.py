"""Signatures of SSH keys, which are verified. SHA-1 is never taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

from policy.ssh import wire

RSA_HASHES: Final[Mapping[str, type[hashes.SHA256] | type[hashes.SHA512]]] = {
    "rsa-sha2-256": hashes.SHA256,
    "rsa-sha2-512": hashes.SHA512,
}
CURVES: Final[Mapping[str, tuple[type[ec.EllipticCurve], type[hashes.HashAlgorithm]]]] = {
    "ecdsa-sha2-nistp256": (ec.SECP256R1, hashes.SHA256),
    "ecdsa-sha2-nistp384": (ec.SECP384R1, hashes.SHA384),
    "ecdsa-sha2-nistp521": (ec.SECP521R1, hashes.SHA512),
}


def algorithms(kind: str) -> tuple[str, ...]:
    """Return the signature algorithms of a key's type."""
    return tuple(RSA_HASHES) if kind == wire.RSA else (kind,)


def verifies(blob: bytes, signature: bytes, data: bytes) -> bool:
    """Whether a signature over ``data`` is by the key ``blob``. Anything malformed is no signature."""
    try:
        kind, fields = wire.key_type(blob), wire.Reader(signature)
        algorithm, value = fields.word(), fields.string()
        fields.end()
        if algorithm not in algorithms(kind):
            return False
        _verify(blob, kind, algorithm, value, data)
    except (wire.WireError, InvalidSignature, UnsupportedAlgorithm, ValueError):
        return False
    return True


def _verify(blob: bytes, kind: str, algorithm: str, value: bytes, data: bytes) -> None:
    fields = wire.Reader(blob)
    fields.string()
    if kind == wire.ED25519:
        ed25519.Ed25519PublicKey.from_public_bytes(fields.string()).verify(value, data)
    elif kind == wire.RSA:
        exponent, modulus = fields.integer(), fields.integer()
        public = rsa.RSAPublicNumbers(exponent, modulus).public_key()
        public.verify(value, data, padding.PKCS1v15(), RSA_HASHES[algorithm]())
    else:
        curve, digest = CURVES[kind]
        fields.string()
        parts = wire.Reader(value)
        encoded = encode_dss_signature(parts.integer(), parts.integer())
        parts.end()
        ec.EllipticCurvePublicKey.from_encoded_point(curve(), fields.string()).verify(encoded, data, ec.ECDSA(digest()))
