"""The embedded vault's cryptography: keys in locked memory, salts and nonces as arguments.

    passphrase --Argon2id--+
    key file ----HKDF------+--> lock's key --AES-256-GCM--> master key --HKDF--> wrapping key --AES-256-GCM--> data key
                                                                       \\-HKDF--> sealing key          (one a secret)
    data key --AES-256-GCM--> the secret

The associated data name the vault, the agent, the secret and its version, each with its length before it: a record
opens at its own place and nowhere else. The sealing key makes an HMAC over the whole document, so that records cannot
be taken out, put back or exchanged for older ones of the same place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import constant_time, hashes, hmac
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.argon2 import Argon2id
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from msgspec import Struct

from policy.signing.keyfile import Argon2Parameters
from sandbox import progress
from sandbox.kernel.proc.secret_memory import Locked

KEY_BYTES = 32
NONCE_BYTES = 12
SALT_BYTES = 16
TAG_BYTES = 16
_DOMAIN = b"covenant-vault/1"


class WrongKeyError(Exception):
    """Another key, another place, or other bytes than were sealed: which of them cannot be told."""


class Place(Struct, frozen=True):
    """Where a secret belongs: the vault's id (hex), the agent, the name, and which version of it."""

    vault: str
    agent_id: str
    name: str
    version: int

    def bound(self, purpose: str) -> bytes:
        """The associated data of one ciphertext at this place; no two places and purposes have the same."""
        return _bound(purpose, self.vault, self.agent_id, self.name, str(self.version))


class Box(Struct, frozen=True):
    """One AES-256-GCM ciphertext, its tag at the end, with its nonce."""

    nonce: bytes
    ciphertext: bytes


def passphrase_key(passphrase: memoryview, salt: bytes, parameters: Argon2Parameters) -> Locked:
    """The key of a lock that a passphrase opens: Argon2id (RFC 9106)."""
    kdf = Argon2id(
        salt=salt,
        length=KEY_BYTES,
        iterations=parameters.iterations,
        lanes=parameters.lanes,
        memory_cost=parameters.memory_kib,
    )
    key = Locked(KEY_BYTES)
    with progress.step("opening the vault with its passphrase"):
        kdf.derive_into(passphrase, key.view)  # type: ignore[arg-type] # it takes any buffer
    return key


def file_key(content: memoryview, salt: bytes) -> Locked:
    """The key of a lock that a file of random bytes opens: HKDF (RFC 5869), since there is nothing to guess."""
    return _hkdf(content, salt, b"lock")


def wrap_master(key: Locked, master: Locked, bound: bytes, nonce: bytes) -> Box:
    """The master key under a lock's key."""
    return _encrypt(key, master.view, nonce, _bound("master", bound))


def unwrap_master(key: Locked, box: Box, bound: bytes) -> Locked:
    """The master key.

    Raises:
        WrongKeyError: the lock's key is another, or the lock was changed.
    """
    return _decrypt(key, box, _bound("master", bound))


def seal(master: Locked, vault: str, document: bytes) -> str:
    """The HMAC-SHA256 of a whole document, in hex."""
    with _hkdf(master.view, bytes.fromhex(vault), b"seal") as key:
        mac = hmac.HMAC(key.view, hashes.SHA256())
        mac.update(document)
        return mac.finalize().hex()


def is_sealed(master: Locked, vault: str, document: bytes, value: str) -> bool:
    """Whether this is the document that was sealed so."""
    return constant_time.bytes_eq(seal(master, vault, document).encode(), value.encode())


def encrypt(master: Locked, place: Place, value: memoryview, nonces: tuple[bytes, bytes]) -> tuple[Box, Box]:
    """A fresh data key, wrapped, and the secret under it."""
    with Locked(KEY_BYTES) as data_key, _wrapping(master, place.vault) as wrapping:
        data_key.fill_random()
        wrapped = _encrypt(wrapping, data_key.view, nonces[0], place.bound("data-key"))
        return wrapped, _encrypt(data_key, value, nonces[1], place.bound("secret"))


@contextlib.contextmanager
def decrypted(master: Locked, place: Place, wrapped: Box, box: Box) -> Iterator[Locked]:
    """The secret, for as long as the context lasts.

    Raises:
        WrongKeyError: these boxes were not made for this place, or were changed.
    """
    with _wrapping(master, place.vault) as wrapping, _decrypt(wrapping, wrapped, place.bound("data-key")) as data_key:
        secret = _decrypt(data_key, box, place.bound("secret"))
    with secret:
        yield secret


def rewrap(old: Locked, new: Locked, place: Place, wrapped: Box, nonce: bytes) -> Box:
    """A data key under another master key.

    Raises:
        WrongKeyError: as ``decrypted``.
    """
    bound = place.bound("data-key")
    with (
        _wrapping(old, place.vault) as opener,
        _decrypt(opener, wrapped, bound) as data_key,
        _wrapping(new, place.vault) as closer,
    ):
        return _encrypt(closer, data_key.view, nonce, bound)


def _wrapping(master: Locked, vault: str) -> Locked:
    return _hkdf(master.view, bytes.fromhex(vault), b"wrap")


def _hkdf(material: memoryview, salt: bytes, purpose: bytes) -> Locked:
    key = Locked(KEY_BYTES)
    kdf = HKDF(algorithm=hashes.SHA256(), length=KEY_BYTES, salt=salt, info=_DOMAIN + b" " + purpose)
    kdf.derive_into(material, key.view)
    return key


def _encrypt(key: Locked, value: memoryview, nonce: bytes, bound: bytes) -> Box:
    return Box(nonce, AESGCM(key.view).encrypt(nonce, value, bound))


def _decrypt(key: Locked, box: Box, bound: bytes) -> Locked:
    if len(box.nonce) != NONCE_BYTES or len(box.ciphertext) < TAG_BYTES:
        raise WrongKeyError
    value = Locked(len(box.ciphertext) - TAG_BYTES)
    try:
        AESGCM(key.view).decrypt_into(box.nonce, box.ciphertext, bound, value.view)
    except InvalidTag:
        # It has written there what it could not vouch for.
        value.close()
        raise WrongKeyError from None
    return value


def _bound(*parts: str | bytes) -> bytes:
    raw = (_DOMAIN, *(part.encode() if isinstance(part, str) else part for part in parts))
    return b"".join(len(part).to_bytes(4, "big") + part for part in raw)
