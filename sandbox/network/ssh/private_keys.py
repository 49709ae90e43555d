"""Private keys of SSH in the process that signs: read from a secret, used once, and dropped. SHA-1 is never made."""

from __future__ import annotations

from typing import Final

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

from policy.ssh import keys, wire

# A signature by more bits takes tens of milliseconds, in the process that serves all of a run.
RSA_BITS: Final = 4_096
Private = ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey


def load(secret: bytes | memoryview) -> Private:
    """Return the private key of a file of OpenSSH or of PKCS#8, which has no passphrase.

    Raises:
        ValueError: it is none, or of a type that is not supported.
    """
    raw = bytes(secret)
    read = serialization.load_ssh_private_key if b"OPENSSH PRIVATE KEY" in raw else serialization.load_pem_private_key
    try:
        # A file that lost its last line end is common. The primes are the operator's: to test them takes a second.
        whole = raw if raw.endswith(b"\n") else raw + b"\n"
        found = read(whole, password=None, unsafe_skip_rsa_key_validation=True)
    except (TypeError, UnsupportedAlgorithm) as e:
        raise ValueError("the key has a passphrase, or a type that is not supported") from e
    if not isinstance(found, ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey):
        raise ValueError("the key has a type that is not supported")
    if isinstance(found, rsa.RSAPrivateKey) and found.key_size > RSA_BITS:
        raise ValueError("the key has more bits than are signed with")
    public(found)
    return found


def public(private: Private) -> bytes:
    """Return the public key of a private one.

    Raises:
        ValueError: it is of a type that is not supported.
    """
    form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    return wire.read_line(private.public_key().public_bytes(*form).decode("ascii"))


def sign(private: Private, algorithm: str, data: bytes) -> bytes:
    """Return the signature in the form of the agent protocol.

    Raises:
        ValueError: the key has no such algorithm, or its signature does not verify.
    """
    own = public(private)
    if algorithm not in keys.algorithms(wire.key_type(own)):
        raise ValueError("the key has no such algorithm")
    if isinstance(private, ed25519.Ed25519PrivateKey):
        value = private.sign(data)
    elif isinstance(private, rsa.RSAPrivateKey):
        value = private.sign(data, padding.PKCS1v15(), keys.RSA_HASHES[algorithm]())
    else:
        r, s = decode_dss_signature(private.sign(data, ec.ECDSA(keys.CURVES[algorithm][1]())))
        value = wire.integer(r) + wire.integer(s)
    made = wire.string(algorithm) + wire.string(value)
    # A wrong signature of RSA would tell a factor of the key.
    if not keys.verifies(own, made, data):
        raise ValueError("the key makes wrong signatures")
    return made
