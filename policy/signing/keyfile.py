"""Operator key files as bytes: Ed25519, under a passphrase or plain. Salt and nonce are arguments.

Under a passphrase: Argon2id (RFC 9106) makes a key for ChaCha20-Poly1305, whose associated data are all other
fields, so that neither the public key nor the parameters can be changed without the passphrase. The parameters
stand in the file and are bounded before they are used: a file must not be able to take the memory of the machine.
"""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Any, Literal

import pydantic
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.argon2 import Argon2id

from policy import errors
from policy.signing import envelope as envelopes
from policy.signing import strict_json

MAX_BYTES = 16 * 1024
SALT_BYTES = 16
NONCE_BYTES = 12
MAX_PASSPHRASE_BYTES = 1024

_HEX_32 = r"^[0-9a-f]{64}$"


class _Closed(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)


class Argon2Parameters(_Closed):
    """Cost of one guess. The upper bounds keep a file from taking the machine's memory or its day."""

    memory_kib: Annotated[int, pydantic.Field(ge=8 * 1024, le=256 * 1024)]
    iterations: Annotated[int, pydantic.Field(ge=1, le=16)]
    lanes: Annotated[int, pydantic.Field(ge=1, le=16)]


# RFC 9106, section 4, second recommended option: 64 MiB, 3 passes, 4 lanes.
RECOMMENDED = Argon2Parameters(memory_kib=64 * 1024, iterations=3, lanes=4)


class _Sealed(_Closed):
    kdf: Literal["argon2id"]
    parameters: Argon2Parameters
    salt: str
    aead: Literal["chacha20-poly1305"]
    nonce: str
    ciphertext: str


class KeyFile(_Closed):
    """A key file: its public half, and the secret either ``plain`` (hex) or ``sealed``."""

    kind: Literal["covenant-key"]
    version: Literal[1]
    algorithm: Literal["ed25519"]
    public: Annotated[str, pydantic.Field(pattern=_HEX_32)]
    plain: Annotated[str, pydantic.Field(pattern=_HEX_32)] | None = pydantic.Field(default=None, repr=False)
    sealed: _Sealed | None = None

    @pydantic.model_validator(mode="after")
    def _one_secret(self) -> KeyFile:
        envelopes.public_key(bytes.fromhex(self.public))
        if (self.plain is None) == (self.sealed is None):
            raise ValueError("a key file has either `plain` or `sealed`")
        return self

    @property
    def key(self) -> envelopes.PublicKey:
        """The public half. Until the secret is opened it is what the file says of itself."""
        return envelopes.public_key(bytes.fromhex(self.public))


def plain(private: Ed25519PrivateKey) -> bytes:
    """A key file without a passphrase."""
    return _encode(_header(private) | {"plain": private.private_bytes_raw().hex()})


def seal(
    private: Ed25519PrivateKey,
    passphrase: bytes,
    *,
    salt: bytes,
    nonce: bytes,
    parameters: Argon2Parameters = RECOMMENDED,
) -> bytes:
    """A key file under a passphrase. ``salt`` (16 bytes) and ``nonce`` (12) are fresh random bytes.

    Raises:
        errors.KeyFileError: the passphrase is empty or longer than 1,024 bytes.
        ValueError: salt or nonce has a wrong length.
    """
    if len(salt) != SALT_BYTES or len(nonce) != NONCE_BYTES:
        raise ValueError("salt has 16 bytes and nonce 12")
    sealed: dict[str, Any] = {
        "kdf": "argon2id",
        "parameters": parameters.model_dump(),
        "salt": base64.b64encode(salt).decode(),
        "aead": "chacha20-poly1305",
        "nonce": base64.b64encode(nonce).decode(),
    }
    document = _header(private) | {"sealed": sealed}
    bound = strict_json.dumps(document)
    aead = ChaCha20Poly1305(derive_key(passphrase, salt, parameters))
    sealed["ciphertext"] = base64.b64encode(aead.encrypt(nonce, private.private_bytes_raw(), bound)).decode()
    return _encode(document)


def read(raw: bytes, *, where: str = "") -> KeyFile:
    """The key file in ``raw``, its secret not yet opened.

    Raises:
        errors.KeyFileError: not one closed key file within its limits.
    """
    try:
        return strict_json.validate(KeyFile, strict_json.loads(raw, max_bytes=MAX_BYTES))
    except strict_json.MalformedJsonError as e:
        raise errors.KeyFileError(f"the key file is malformed: {e}", where=where) from None


def unlock(file: KeyFile, passphrase: bytes | None = None, *, where: str = "") -> Ed25519PrivateKey:
    """The private key, checked against the public half that the file names.

    Raises:
        errors.KeyFileError: no or a wrong passphrase, a changed file, or two halves that do not fit.
    """
    secret = bytes.fromhex(file.plain) if file.plain is not None else _open(file, passphrase, where)
    private = Ed25519PrivateKey.from_private_bytes(secret)
    if private.public_key().public_bytes_raw().hex() != file.public:
        raise errors.KeyFileError("the secret is not that of the file's public key", where=where)
    return private


def _open(file: KeyFile, passphrase: bytes | None, where: str) -> bytes:
    sealed = file.sealed
    assert sealed is not None
    if passphrase is None:
        raise errors.KeyFileError("the key file needs its passphrase", hint="give --passphrase-file FILE", where=where)
    document = file.model_dump(exclude={"plain": True, "sealed": {"ciphertext"}})
    try:
        salt, nonce, ciphertext = (
            base64.b64decode(text, validate=True) for text in (sealed.salt, sealed.nonce, sealed.ciphertext)
        )
    except (binascii.Error, ValueError):
        raise errors.KeyFileError("the key file is malformed: not base64", where=where) from None
    if len(salt) != SALT_BYTES or len(nonce) != NONCE_BYTES:
        raise errors.KeyFileError("the key file is malformed: salt or nonce", where=where)
    aead = ChaCha20Poly1305(derive_key(passphrase, salt, sealed.parameters))
    try:
        secret = aead.decrypt(nonce, ciphertext, strict_json.dumps(document))
    except InvalidTag:
        raise errors.KeyFileError("the passphrase is wrong, or the key file was changed", where=where) from None
    if len(secret) != envelopes.KEY_BYTES:
        raise errors.KeyFileError("the key file does not hold an Ed25519 key", where=where)
    return secret


def derive_key(passphrase: bytes, salt: bytes, parameters: Argon2Parameters) -> bytes:
    """Return the key that a passphrase gives with this salt.

    Raises:
        errors.KeyFileError: the passphrase is empty or too long.
    """
    if not 0 < len(passphrase) <= MAX_PASSPHRASE_BYTES:
        raise errors.KeyFileError(f"a passphrase has between 1 and {MAX_PASSPHRASE_BYTES} bytes")
    kdf = Argon2id(
        salt=salt,
        length=32,
        iterations=parameters.iterations,
        lanes=parameters.lanes,
        memory_cost=parameters.memory_kib,
    )
    return kdf.derive(passphrase)


def _header(private: Ed25519PrivateKey) -> dict[str, Any]:
    public = private.public_key().public_bytes_raw().hex()
    return {"kind": "covenant-key", "version": 1, "algorithm": "ed25519", "public": public}


def _encode(document: dict[str, Any]) -> bytes:
    return strict_json.dumps(document) + b"\n"
