"""The local identity: the raw Ed25519 seed of version 1 at ``identity/local.key``, made at first use.

It names who asks (``operator@local``) in intents and audit rows. It is never accepted as a manifest signer.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from policy import base58, errors
from sandbox import durable

OPERATOR = "operator@local"
_SEED_BYTES = 32


def issuer(home: Path) -> dict[str, str]:
    """``{"display", "pubkey"}`` of the local operator; makes the key when there is none.

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
        # link, not rename: whoever came first keeps the key that its rows already name
        with contextlib.suppress(FileExistsError):
            os.link(making, path)
    finally:
        making.unlink(missing_ok=True)
    return _read(path)


def _check_directory(home: Path) -> None:
    parent = durable.open_directory(home, error=errors.HomeError)
    try:
        where = str(home)
        fd = durable.open_subdirectory(parent, "identity", where=where, make=True, error=errors.KeyFileError)
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
        raise errors.KeyFileError("the identity key can be read by others", hint=f"chmod 0600 {path}", where=str(path))
    if len(seed) != _SEED_BYTES:
        raise errors.KeyFileError(f"the identity key is not {_SEED_BYTES} bytes", where=str(path))
    return seed
