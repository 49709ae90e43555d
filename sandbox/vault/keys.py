"""Keys of the embedded vault: a passphrase, a file of random bytes, or a credential that systemd passes on.

A run opens the vault without a prompt, by a file named in the configuration. A passphrase is for `covenant vault`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from msgspec import Struct

from policy import errors
from policy.signing.keyfile import MAX_PASSPHRASE_BYTES
from sandbox.config import CREDENTIAL
from sandbox.kernel import libc
from sandbox.kernel.proc.secret_memory import Locked, guard_process
from sandbox.storage import atomic_file

KEY_FILE_BYTES = 32
_MAX_FILE_BYTES = 1024


class Key(Struct, frozen=True):
    """A key, and the kind of lock that it opens."""

    kind: Literal["passphrase", "key-file"]
    secret: Locked


@contextlib.contextmanager
def passphrase(given: bytearray) -> Iterator[Key]:
    """Yield the key of a typed passphrase. ``given`` is overwritten.

    Raises:
        errors.VaultKeyError: Raised when it is empty or longer than 1,024 bytes.
    """
    if not 0 < len(given) <= MAX_PASSPHRASE_BYTES:
        raise errors.VaultKeyError(f"a passphrase has between 1 and {MAX_PASSPHRASE_BYTES} bytes")
    guard_process()
    with Locked(len(given)) as secret:
        secret.view[:] = given
        given[:] = bytes(len(given))
        yield Key("passphrase", secret)


@contextlib.contextmanager
def configured(place: str, *, has_passphrase: bool = True) -> Iterator[Key]:
    """Yield the key in the configured key file: a path, or ``credential:NAME`` of the systemd unit.

    ``has_passphrase`` is whether a passphrase may open the vault as well, which is a fix for a file that is lost.

    Raises:
        errors.VaultKeyError: Raised when there is none, it is not private, or it is too short for a key.
    """
    with contextlib.ExitStack() as stack:
        try:
            secret = stack.enter_context(private_file(path_of(place), least_bytes=KEY_FILE_BYTES))
        except errors.VaultKeyError as e:
            if isinstance(e.__cause__, FileNotFoundError):
                e.hint = _put_back(path_of(place), has_passphrase=has_passphrase)
            raise
        yield Key("key-file", secret)


def _put_back(path: Path, *, has_passphrase: bool) -> str:
    """Return the fix for a key file that is lost."""
    if not has_passphrase:
        return "put it back: no passphrase opens the vault"
    words = "--passphrase-file FILE --new-passphrase-file FILE"
    return (
        "put it back, or with a passphrase of the vault: "
        f"covenant vault rekey {words} --key-file {shlex.quote(str(path))}"
    )


@contextlib.contextmanager
def private_file(path: Path, *, least_bytes: int) -> Iterator[Locked]:
    """Read a private file of root or of our uid straight into locked memory.

    Raises:
        errors.VaultKeyError: Raised when it is missing, a symlink, not private, or not of a key's size.
    """
    # A key opens the whole vault: a process that holds one must dump no core, also for `covenant vault list`.
    guard_process()
    with Locked(_MAX_FILE_BYTES) as buffer:
        size = _read(path, buffer, least_bytes)
        with Locked(size) as secret:
            secret.view[:] = buffer.view[:size]
            buffer.close()
            yield secret


def path_of(place: str) -> Path:
    """Return the path of the key file.

    Raises:
        errors.VaultKeyError: Raised when none is configured, or this process has no credentials of systemd.
    """
    if not place:
        raise errors.VaultKeyError(
            "no key file is configured for the vault",
            hint='write [vault] key = "/etc/covenant/vault.key" in config.toml',
        )
    if not place.startswith(CREDENTIAL):
        return Path(place)
    # INVARIANT: use only this variable of the environment, and only if root's configuration says so.
    directory = os.environ.get("CREDENTIALS_DIRECTORY", "")
    if not directory.startswith("/"):
        raise errors.VaultKeyError(
            f"`{place}` needs a service of systemd", hint="write LoadCredentialEncrypted= in the unit, or name a file"
        )
    return Path(directory) / place.removeprefix(CREDENTIAL)


def make_file(path: Path) -> None:
    """Create a key file of 32 random bytes, whole or not at all, durably.

    Raises:
        errors.VaultKeyError: Raised when there is one already, or it cannot be written.
    """
    making = path.with_name(atomic_file.temporary_name(path.name))
    with Locked(KEY_FILE_BYTES) as key:
        key.fill_random()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            making.unlink(missing_ok=True)
            fd = os.open(making, flags, 0o400)
            try:
                os.write(fd, key.view)
                os.fsync(fd)
            finally:
                os.close(fd)
            try:
                libc.rename_new(str(making), str(path))
            except OSError:
                making.unlink()
                raise
            atomic_file.sync_directory(path.parent)
        except FileExistsError:
            raise errors.VaultKeyError(f"`{path}` is there already", where=str(path)) from None
        except FileNotFoundError as e:
            raise errors.VaultKeyError(
                f"the directory of key file `{path}` does not exist",
                hint=f"mkdir -p -m 0700 {shlex.quote(str(path.parent))}",
                where=str(path),
            ) from e
        except OSError as e:
            raise errors.VaultKeyError(f"key file `{path}`: {e.strerror}", where=str(path)) from e


def _read(path: Path, buffer: Locked, least_bytes: int) -> int:
    """Read a private file straight into locked memory. Returns the number of bytes."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as e:
        reason = "it is a symlink" if e.errno == errno.ELOOP else e.strerror
        raise errors.VaultKeyError(f"key file `{path}`: {reason}", where=str(path)) from e
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_mode & 0o077 or info.st_uid not in {0, os.geteuid()}:
            raise errors.VaultKeyError(
                f"key file `{path}` is not private: uid {info.st_uid}, mode {stat.S_IMODE(info.st_mode):04o}",
                hint=f"chown root {path}; chmod 0400 {path}",
                where=str(path),
            )
        if not least_bytes <= info.st_size <= _MAX_FILE_BYTES:
            raise errors.VaultKeyError(
                f"key file `{path}` has not between {least_bytes} and {_MAX_FILE_BYTES} bytes",
                hint="it holds random bytes; a passphrase is given with --passphrase-file",
                where=str(path),
            )
        return os.readv(fd, [buffer.view])
    finally:
        os.close(fd)
