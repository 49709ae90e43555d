"""The operator's keys: files below ``COVENANT_HOME/keys`` (0700, each 0600), never overwritten.

The format is ``policy.signing.keyfile``; here are the files, the randomness, and the key of ``covenant dev``.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from policy import errors
from policy.manifest import text
from policy.signing import envelope as envelopes
from policy.signing import keyfile
from sandbox.storage import atomic_file

DIRECTORY = "keys"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_SUFFIX = ".key"
_DEV_KEY = "dev.key"


@dataclass(frozen=True, slots=True)
class StoredKey:
    """One key of the store, its secret unopened."""

    name: str
    file: keyfile.KeyFile

    @property
    def protected(self) -> bool:
        """Whether the secret is under a passphrase."""
        return self.file.sealed is not None


def new(home: Path, name: str, passphrase: bytes | None) -> envelopes.PublicKey:
    """Make a key and write its file, under the passphrase unless that is None.

    Raises:
        errors.UsageError: the name cannot be a key's name.
        errors.KeyFileError: there is a key of that name, or the file cannot be written.
    """
    file_name = _file_name(name)
    private = Ed25519PrivateKey.generate()
    if passphrase is None:
        raw = keyfile.plain(private)
    else:
        salt, nonce = os.urandom(keyfile.SALT_BYTES), os.urandom(keyfile.NONCE_BYTES)
        raw = keyfile.seal(private, passphrase, salt=salt, nonce=nonce)
    with _opened(home, make=True) as directory:
        try:
            atomic_file.create(directory, file_name, raw)
        except FileExistsError:
            raise errors.KeyFileError(
                f"there is a key `{name}` already",
                hint="a key is never overwritten; choose another name",
                where=str(home / DIRECTORY / file_name),
            ) from None
        except OSError as e:
            raise errors.KeyFileError(f"key `{name}` cannot be written: {e.strerror}") from e
    return envelopes.PublicKey.of(private)


def entries(home: Path) -> tuple[StoredKey, ...]:
    """Every key of the store, by name.

    Raises:
        errors.KeyFileError: one of them is malformed or unsafe.
    """
    return tuple(entry(home, name) for name in _names(home))


def entry(home: Path, name: str) -> StoredKey:
    """One key, its secret unopened.

    Raises:
        errors.KeyFileError: missing, malformed, a symlink, or of a wrong owner or mode.
        errors.UsageError: the name cannot be a key's name.
    """
    file_name = _file_name(name)
    where = str(home / DIRECTORY)
    raw = None
    if (home / DIRECTORY).exists():
        with _opened(home, make=False) as directory:
            raw = atomic_file.read(
                directory, file_name, max_bytes=keyfile.MAX_BYTES, where=where, error=errors.KeyFileError
            )
    if raw is None:
        near = text.nearest(name, _names(home))
        hint = f"did you mean `{near}`? If not: covenant keys new {name}" if near else f"covenant keys new {name}"
        raise errors.KeyFileError(f"there is no key `{name}`", hint=hint, where=where)
    return StoredKey(name, keyfile.read(raw, where=f"{where}/{file_name}"))


def load(home: Path, name: str, passphrase: Callable[[], bytes]) -> Ed25519PrivateKey:
    """The private key; ``passphrase`` is asked only when the file needs one.

    Raises:
        errors.KeyFileError: as ``entry``, or the passphrase is wrong.
    """
    found = entry(home, name)
    where = str(home / DIRECTORY / _file_name(name))
    return keyfile.unlock(found.file, passphrase() if found.protected else None, where=where)


def dev_key(directory: Path) -> Ed25519PrivateKey:
    """The key of ``covenant dev`` in the state directory of one agent id, made at first use.

    It is plain and lies in COVENANT_STATE, where only the supervisor's uid reads: it has no more authority than
    that uid, and what it signs is accepted by that id's dev state alone (``sandbox.storage.trust_state``).

    Raises:
        errors.KeyFileError: the file is malformed or unsafe.
    """
    fd = atomic_file.open_directory(directory, error=errors.HomeError)
    try:
        with contextlib.suppress(FileExistsError):
            if not (directory / _DEV_KEY).exists():
                atomic_file.create(fd, _DEV_KEY, keyfile.plain(Ed25519PrivateKey.generate()))
        where = str(directory)
        raw = atomic_file.read(fd, _DEV_KEY, max_bytes=keyfile.MAX_BYTES, where=where, error=errors.KeyFileError)
    finally:
        os.close(fd)
    if raw is None:
        raise errors.KeyFileError("the dev key went away", where=where)
    return keyfile.unlock(keyfile.read(raw, where=f"{where}/{_DEV_KEY}"), where=f"{where}/{_DEV_KEY}")


def check_name(name: str) -> None:
    """Refuse what cannot be a key's name.

    Raises:
        errors.UsageError: it cannot.
    """
    _file_name(name)


def _names(home: Path) -> tuple[str, ...]:
    if not (home / DIRECTORY).exists():
        return ()
    with _opened(home, make=False) as directory:
        names = sorted(n.removesuffix(_SUFFIX) for n in os.listdir(directory) if n.endswith(_SUFFIX))
    return tuple(name for name in names if _NAME.fullmatch(name))


def _file_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise errors.UsageError(
            f"`{name}` cannot be a key's name",
            hint="1 to 64 of A-Z a-z 0-9 _ . -, the first a letter or a digit",
        )
    return name + _SUFFIX


@contextlib.contextmanager
def _opened(home: Path, *, make: bool) -> Iterator[int]:
    parent = atomic_file.open_directory(home, error=errors.HomeError)
    try:
        fd = atomic_file.open_subdirectory(parent, DIRECTORY, where=str(home), make=make, error=errors.KeyFileError)
        try:
            yield fd
        finally:
            os.close(fd)
    finally:
        os.close(parent)
