"""The embedded vault's file and its head, as closed documents.

    vault/vault.json    id, generation, digest of the file before it, locks, records, and an HMAC over all of that
    vault-head.json     outside the folder: the id, the last generation, and the digest of its file

Names and times are in the clear, in a file that only the supervisor's uid can read; the seal protects them.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import Annotated, Literal, TypeVar

import pydantic

from policy import errors
from policy.manifest.agent import AGENT_ID
from policy.manifest.permissions import CREDENTIAL_NAME
from policy.signing import strict_json
from policy.signing.keyfile import Argon2Parameters
from sandbox.vault import sealing

MAX_BYTES = 16 * 1024 * 1024
MAX_RECORDS = 10_000
# A record has some 14 values, its two ciphertexts included; the rest is for the locks.
_MAX_VALUES = 16 * MAX_RECORDS + 1024
HEAD_BYTES = 4096

_Hex32 = Annotated[str, pydantic.Field(pattern=r"^[0-9a-f]{64}$")]
_Count = Annotated[int, pydantic.Field(ge=1, le=2**53)]
_Base64 = Annotated[str, pydantic.Field(pattern=r"^[A-Za-z0-9+/]*={0,2}$", max_length=65_536)]


class _Closed(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)


class Ciphertext(_Closed):
    """A nonce and the text encrypted with it, in base64."""

    nonce: _Base64
    ciphertext: _Base64

    @classmethod
    def of(cls, box: sealing.Box) -> Ciphertext:
        """Encode it for the file."""
        return cls(nonce=base64.b64encode(box.nonce).decode(), ciphertext=base64.b64encode(box.ciphertext).decode())

    def box(self) -> sealing.Box:
        """Decode it for decryption.

        Raises:
            sealing.WrongKeyError: not base64, which no key opens.
        """
        try:
            return sealing.Box(*(base64.b64decode(one, validate=True) for one in (self.nonce, self.ciphertext)))
        except (binascii.Error, ValueError):
            raise sealing.WrongKeyError from None


class Lock(_Closed):
    """One way to the master key: by a passphrase (with what a guess costs) or by a file of random bytes."""

    kind: Literal["passphrase", "key-file"]
    parameters: Argon2Parameters | None
    salt: Annotated[str, pydantic.Field(pattern=r"^[0-9a-f]{32}$")]
    master: Ciphertext

    @pydantic.model_validator(mode="after")
    def _cost(self) -> Lock:
        if (self.kind == "passphrase") != (self.parameters is not None):
            raise ValueError("a lock has `parameters` exactly when a passphrase opens it")
        return self

    def bound(self, vault: str) -> bytes:
        """The associated data of the wrapped master key: the vault's id, and all other fields of the lock."""
        return strict_json.dumps({"vault": vault, **self.model_dump(exclude={"master"})})


class SecretRecord(_Closed):
    """One secret: its agent, its name, its data key and its value, both encrypted."""

    agent_id: Annotated[str, pydantic.Field(pattern=rf"^{AGENT_ID}$")]
    name: Annotated[str, pydantic.Field(pattern=rf"^{CREDENTIAL_NAME}$")]
    version: _Count
    created_ms: _Count
    changed_ms: _Count
    key: Ciphertext
    value: Ciphertext

    @property
    def place(self) -> tuple[str, str]:
        """The agent id and the name."""
        return self.agent_id, self.name


class Document(_Closed):
    """The whole vault. ``seal`` is an HMAC over ``body()``; ``previous`` the digest of the file that this replaces."""

    kind: Literal["covenant-vault"] = "covenant-vault"
    version: Literal[1] = 1
    id: Annotated[str, pydantic.Field(pattern=r"^[0-9a-f]{32}$")]
    generation: _Count
    previous: _Hex32 | Literal[""]
    locks: Annotated[list[Lock], pydantic.Field(min_length=1, max_length=8)]
    records: Annotated[list[SecretRecord], pydantic.Field(max_length=MAX_RECORDS)]
    seal: _Hex32

    @pydantic.model_validator(mode="after")
    def _one_each(self) -> Document:
        places = [record.place for record in self.records]
        if places != sorted(set(places)):
            raise ValueError("records are sorted, one a place")
        return self

    def body(self) -> bytes:
        """The sealed content: everything but the seal."""
        return strict_json.dumps(self.model_dump(exclude={"seal"}))

    def encode(self) -> bytes:
        """The file."""
        return strict_json.dumps(self.model_dump()) + b"\n"


class Head(_Closed):
    """Identity of the last file. Generation 0, without a digest, means a vault that is about to be made."""

    kind: Literal["covenant-vault-head"] = "covenant-vault-head"
    id: Annotated[str, pydantic.Field(pattern=r"^[0-9a-f]{32}$")]
    generation: Annotated[int, pydantic.Field(ge=0, le=2**53)]
    digest: _Hex32 | Literal[""]

    def encode(self) -> bytes:
        """The file."""
        return strict_json.dumps(self.model_dump()) + b"\n"

    def names(self, document: Document, raw: bytes) -> bool:
        """Whether this is the last file, or the one after it, whose writer was stopped before it wrote the head."""
        if document.id != self.id:
            return False
        if document.generation == self.generation:
            return digest(raw) == self.digest
        return document.generation == self.generation + 1 and document.previous == self.digest


def digest(raw: bytes) -> str:
    """Return the digest of a file for its head."""
    return hashlib.sha256(raw).hexdigest()


_Model = TypeVar("_Model", Document, Head)


def parse(model: type[_Model], raw: bytes, *, max_bytes: int, where: str) -> _Model:
    """The document in these bytes.

    Raises:
        errors.VaultError: they are none; an empty vault is never made up.
    """
    try:
        return strict_json.validate(model, strict_json.loads(raw, max_bytes=max_bytes, max_values=_MAX_VALUES))
    except strict_json.MalformedJsonError as e:
        raise errors.VaultError(f"the vault is damaged: {e}", hint="restore it from a backup", where=where) from None
