"""Where the daemon's log lies, and its keys: files that are ours alone, opened by the descriptor of their directory."""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from covenant import homes
from policy import errors
from policy.audit_log import chain, note
from sandbox.storage import atomic_file

EVENTS: Final = "events.jsonl"
CHAIN: Final = "events.chain.jsonl"
HEAD: Final = "head.json"
PENDING: Final = "pending"
KEY, PUBLIC_KEY = "ledger.key", "ledger.pub"
NOTE_KEY, NOTE_PUBLIC = "checkpoint.key", "checkpoint.vkey"

_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_KEY_BYTES: Final = 32
# How long ``open`` waits for a daemon that is ending.
LOCK_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class Places:
    """The log's two directories, open: the rows in ``log``, and outside of it what signs them, in ``head``."""

    home: Path
    log: int
    head: int

    @classmethod
    def open(cls, home: Path) -> Places:
        """Open or make ``audit`` and ``audit-head`` in the daemon's home.

        Raises:
            errors.LedgerError: one is a symlink or not ours alone, or another process has the log.
        """
        with contextlib.ExitStack() as stack:
            above = atomic_file.open_directory(home, error=errors.LedgerError)
            stack.callback(os.close, above)
            names = ("audit", "audit-head")
            found = []
            with contextlib.ExitStack() as opened:
                for name in names:
                    fd = atomic_file.open_subdirectory(
                        above, name, where=str(home), make=True, error=errors.LedgerError
                    )
                    opened.callback(os.close, fd)
                    found.append(fd)
                # INVARIANT: one writer. A daemon that was killed holds the lock until its last write has ended.
                if not atomic_file.take(found[1], LOCK_SECONDS):
                    raise errors.LedgerError(
                        f"another process has had the log open for {LOCK_SECONDS:.0f} seconds",
                        hint="end what writes it; one that hangs in a disk ends with its write",
                        where=str(home / "audit"),
                    )
                opened.pop_all()
            return cls(home, *found)

    def close(self) -> None:
        """Let go of both."""
        os.close(self.log)
        os.close(self.head)

    def file(self, name: str, *, folder: int) -> int:
        """A descriptor of a private file, made empty where there is none.

        Raises:
            errors.LedgerError: it is no plain file of ours with one name.
        """
        fd = os.open(name, _FLAGS, 0o600, dir_fd=folder)
        try:
            self._check_private(os.fstat(fd), str(self.home / ("audit" if folder == self.log else "audit-head") / name))
        except BaseException:
            os.close(fd)
            raise
        return fd

    @staticmethod
    def _check_private(info: os.stat_result, place: str) -> None:
        # A second link would be a name of the same bytes outside our directory.
        if not stat.S_ISREG(info.st_mode) or info.st_nlink != 1:
            raise errors.LedgerError(f"`{place}` of the log is no plain file with one name", where=place)
        if info.st_uid != os.geteuid() or info.st_mode & 0o077:
            raise errors.LedgerError(
                f"`{place}` of the log is not ours alone", hint=homes.close_hint(place, "0600"), where=place
            )

    def file_if_there(self, name: str) -> int:
        """A descriptor of a file of the log's directory, for reading.

        Raises:
            FileNotFoundError: there is none.
        """
        return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=self.log)

    def exists(self, name: str) -> bool:
        """Whether the head's directory has it."""
        try:
            os.stat(name, dir_fd=self.head, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def signing_key(self, *, make: bool) -> Ed25519PrivateKey:
        """The key that signs heads; its public half is shown beside it.

        Raises:
            errors.LedgerError: it is missing and may not be made, or is not 32 bytes, or its public half is another's.
        """
        key = self._key(KEY, make=make)
        shown = self.read(PUBLIC_KEY)
        public = key.public_key()
        if shown is None:
            atomic_file.replace(self.head, PUBLIC_KEY, chain.public_key_file(public))
        elif chain.read_public_key(shown).public_bytes_raw() != public.public_bytes_raw():
            raise errors.LedgerError("the log's public key is not that of its key", where=PUBLIC_KEY)
        return key

    def note_key(self, origin: str) -> Ed25519PrivateKey:
        """The key that signs checkpoints, another than the head's: what it signs has no tag of ours before it."""
        key = self._key(NOTE_KEY, make=True)
        vkey = note.Verifier(origin, note.SIGNATURE, key.public_key()).text.encode() + b"\n"
        if self.read(NOTE_PUBLIC) != vkey:
            atomic_file.replace(self.head, NOTE_PUBLIC, vkey)
        return key

    def read(self, name: str) -> bytes | None:
        """A small file of the head's directory, None when there is none."""
        where = str(self.home / "audit-head")
        return atomic_file.read(self.head, name, max_bytes=64 * 1024, where=where, error=errors.LedgerError)

    def _key(self, name: str, *, make: bool) -> Ed25519PrivateKey:
        raw = self.read(name)
        if raw is None and make:
            raw = Ed25519PrivateKey.generate().private_bytes_raw()
            atomic_file.replace(self.head, name, raw)
        if raw is None or len(raw) != _KEY_BYTES:
            raise errors.LedgerError(
                f"the log's key `{name}` is {'missing' if raw is None else 'damaged'} and its head is there",
                hint="keep audit and audit-head aside as evidence before starting a new log",
                where=name,
            )
        return Ed25519PrivateKey.from_private_bytes(raw)
