"""The local identity: version 1's raw Ed25519 seed at ``identity/local.key``, created at first use.

It names the caller (``operator@local``) in intents and audit rows. It is never accepted as a manifest signer.

The key signs three things only: a capability token's canonical bytes, built here from its fields, tasks for other hosts
(``Identity.seal``), and messages with the tag of their domain. INVARIANT: the tag is longer than 36 bytes and has no
zero byte. A token has the length of its action, at most 512, in bytes 32 to 35, where a tagged message has more than 16
million: so neither can be read as the other. tests/unit/covenant/keys/test_signing_doors.py tests it with every door.
"""

from __future__ import annotations

import contextlib
import enum
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final

from covenant import homes
from policy import base58, errors
from sandbox.storage import atomic_file

if TYPE_CHECKING:
    from covenant.wire.types import AgentId
    from policy.capabilities.token import Token

OPERATOR = "operator@local"
MAX_MESSAGE_BYTES: Final = 1 << 20
_SEED_BYTES = 32
_TAG: Final = "covenant.keys.identity.signs.only.under.a.domain.v1/"


class Domain(enum.Enum):
    """The domains of the key's signatures besides capability tokens."""

    ATTESTATION = "attestation"
    CAPABILITY_REVOCATION = "capability.revocation"

    @property
    def tag(self) -> bytes:
        """The prefix of the message: no tag is a prefix of another."""
        return f"{_TAG}{self.value}\n".encode()


class Identity:
    """The daemon's key and agent id. No method returns the key, and none signs bytes that it did not tag or build."""

    __slots__ = ("_key", "agent")

    def __init__(self, seed: bytes) -> None:
        from cryptography.hazmat.primitives.asymmetric import ed25519

        from covenant.wire.types import AgentId

        self._key = ed25519.Ed25519PrivateKey.from_private_bytes(seed)
        self.agent: AgentId = AgentId(display=OPERATOR, pubkey=base58.encode(self._key.public_key().public_bytes_raw()))

    @classmethod
    def load(cls, home: Path) -> Identity:
        """Return the identity of a home; creates the key if there is none.

        Raises:
            errors.KeyFileError: as ``issuer``.
        """
        return cls(_seed(home))

    def sign(self, domain: Domain, message: bytes) -> bytes:
        """Return the 64-byte signature over the domain's tag and the message.

        Raises:
            errors.AttestationError: it is longer than ``MAX_MESSAGE_BYTES``.
        """
        if len(message) > MAX_MESSAGE_BYTES:
            raise errors.AttestationError(f"the message is longer than {MAX_MESSAGE_BYTES} bytes")
        return self._key.sign(domain.tag + message)

    def grant(self, token: Token) -> str:
        """Return the signature, in base58, of a capability that this identity grants.

        Raises:
            errors.GrantRefusedError: another is named as its grantor, or it has no canonical bytes.
        """
        if token.granted_by != self.agent.pubkey:
            raise errors.GrantRefusedError("the token names another grantor")
        try:
            message = token.message()
        except ValueError as e:
            raise errors.GrantRefusedError(str(e)) from None
        return base58.encode(self._key.sign(message))

    def seal(self, issued_at_ms: int, task_json: bytes) -> bytes:
        """Return the signature of a task for another host, under version 1's tag.

        INVARIANT: that tag is short, so a token's length of its action stands where the time ends and the task begins;
        a task that begins with `{"` makes it more than 31,000, and the time fits six bytes.

        Raises:
            errors.AttestationError: the task begins otherwise, is too long, or the time is none.
        """
        if task_json[:2] != b'{"' or len(task_json) > MAX_MESSAGE_BYTES or not 0 <= issued_at_ms < 1 << 48:
            raise errors.AttestationError("this is no task for another host")
        from covenant.wire import cross_host

        return self._key.sign(cross_host.message(issued_at_ms, task_json))

    def __repr__(self) -> str:
        return f"Identity({self.agent.pubkey})"


def verifies(pubkey: str, domain: Domain, message: bytes, signature: bytes) -> bool:
    """Whether the key, given in base58, made the signature over a tagged message."""
    return _verifies(pubkey, domain.tag + message, signature)


def sealed(pubkey: str, message: bytes, signature: bytes) -> bool:
    """Whether the key made the signature of a task for another host (``covenant.wire.cross_host.message``)."""
    return _verifies(pubkey, message, signature)


def _verifies(pubkey: str, message: bytes, signature: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric import ed25519

    try:
        key = ed25519.Ed25519PublicKey.from_public_bytes(base58.decode(pubkey, length=_SEED_BYTES))
        key.verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def issuer(home: Path) -> dict[str, str]:
    """Return ``{"display", "pubkey"}`` of the local operator; creates the key if there is none.

    Raises:
        errors.KeyFileError: the key is a symlink, of a wrong size, or readable by others.
    """
    from cryptography.hazmat.primitives.asymmetric import ed25519

    seed = _seed(home)
    public = ed25519.Ed25519PrivateKey.from_private_bytes(seed).public_key()
    return {"display": OPERATOR, "pubkey": base58.encode(public.public_bytes_raw())}


def _seed(home: Path) -> bytes:
    path = home / "identity" / "local.key"
    _check_directory(home)
    with contextlib.suppress(FileNotFoundError):
        return _read(path)
    making = path.with_name(f".local.key.{os.getpid()}")
    fd = os.open(making, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(fd, "wb") as stream:
            stream.write(os.urandom(_SEED_BYTES))
            stream.flush()
            os.fsync(fd)
        # link, not rename: of two concurrent creators the first one's key stays, which its rows already name
        with contextlib.suppress(FileExistsError):
            os.link(making, path)
    finally:
        making.unlink(missing_ok=True)
    return _read(path)


def _check_directory(home: Path) -> None:
    parent = atomic_file.open_directory(home, error=errors.HomeError)
    try:
        where = str(home)
        fd = atomic_file.open_subdirectory(parent, "identity", where=where, make=True, error=errors.KeyFileError)
        os.close(fd)
    finally:
        os.close(parent)


def _read(path: Path) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as e:
        raise errors.KeyFileError(f"identity key: {e.strerror}", where=str(path)) from e
    with os.fdopen(fd, "rb") as stream:
        info = os.fstat(fd)
        seed = stream.read(_SEED_BYTES + 1)
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
        raise errors.KeyFileError(
            "the identity key can be read by others", hint=homes.close_hint(path, "0600"), where=str(path)
        )
    if len(seed) != _SEED_BYTES:
        raise errors.KeyFileError(f"the identity key is not {_SEED_BYTES} bytes", where=str(path))
    return seed
