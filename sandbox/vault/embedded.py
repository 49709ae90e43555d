"""The embedded vault: one file below COVENANT_STATE, replaced whole, and a head outside its folder.

A read is a procedure:

    (1) the head, then the file: private, regular, ours, not too large, each a closed document
    (2) the head names the file; an older file that was put back is refused
    (3) the master key, by the lock that fits the key; then the seal over the whole document
    (4) the record, opened at its own place

A write takes the lock, does (1) to (3), writes to the log, and replaces the file, then the head. A kill in between
leaves the new file, which names the old one as its predecessor. The next reader or writer takes the lock and writes the
head; until then the old file would be accepted as well. Only root can put back file and head together. The audit log
then has more rows of the vault than the vault itself shows.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from policy import errors
from policy.signing.keyfile import RECOMMENDED, Argon2Parameters
from sandbox.kernel.proc.secret_memory import Locked
from sandbox.storage import atomic_file
from sandbox.vault import backend, embedded_format, sealing
from sandbox.vault.backend import Before, Change, OpenedSecret, SecretEntry
from sandbox.vault.embedded_format import Ciphertext, Document, Head, Lock, SecretRecord
from sandbox.vault.keys import Key

_INIT = "covenant vault init; if [vault] key is not configured: covenant vault init --key-file FILE"
# The fix for a key of a kind that opens no lock of the vault.
_OTHER_KEY = {
    "passphrase": 'leave --passphrase-file out: its key file opens it, which [vault] key = "FILE" of config.toml names',
    "key-file": "give --passphrase-file FILE; so that runs can open it: "
    "covenant vault rekey --passphrase-file FILE --new-passphrase-file FILE --key-file NEW",
}
# The fix for another key of a kind that opens the vault.
_WRONG_KEY = {
    "passphrase": "give the passphrase of the last covenant vault init or rekey",
    "key-file": "write [vault] key in config.toml with the --key-file of the last covenant vault init or rekey",
}
FOLDER, FILE, HEAD = "vault", "vault.json", "vault-head.json"

KeySource = Callable[[], contextlib.AbstractContextManager[Key]]


class FileVault:
    """The vault in ``state`` (COVENANT_STATE). ``key`` provides its key anew for each operation.

    Between operations only the encrypted document is kept that last had a valid seal.
    """

    name = "file"

    def __init__(self, state: Path, key: KeySource, *, clock: Callable[[], float] = time.time) -> None:
        self._state, self._key, self._clock = state, key, clock
        self._where = str(state / FOLDER)
        self._sealed: tuple[str, Document] | None = None

    def entries(self, agent_id: str | None = None) -> list[SecretEntry]:
        """Implement ``Backend.entries``."""
        with self._unlocked() as (found, _):
            return [_entry(record) for record in found.records if agent_id in (None, record.agent_id)]

    def put(self, agent_id: str, name: str, value: memoryview, *, before: Before) -> SecretEntry:
        """Implement ``Backend.put``."""
        backend.check_place(agent_id, name)
        backend.check_value(value)
        with self._changing() as (found, master, write):
            if _find(found, agent_id, name) is not None:
                raise backend.taken(agent_id, name)
            record = self._record(found.id, master, agent_id, name, value, version=1)
            before(Change("put", agent_id, name, record.version))
            write([*found.records, record])
        return _entry(record)

    def rotate(self, agent_id: str, name: str, value: memoryview, *, before: Before) -> SecretEntry:
        """Implement ``Backend.rotate``."""
        backend.check_place(agent_id, name)
        backend.check_value(value)
        with self._changing() as (found, master, write):
            last = _found(found, agent_id, name)
            record = self._record(found.id, master, agent_id, name, value, version=last.version + 1)
            record = record.model_copy(update={"created_ms": last.created_ms})
            before(Change("rotated", agent_id, name, record.version))
            write([*(one for one in found.records if one is not last), record])
        return _entry(record)

    def remove(self, agent_id: str, name: str, *, before: Before) -> SecretEntry:
        """Implement ``Backend.remove``."""
        backend.check_place(agent_id, name)
        with self._changing() as (found, _, write):
            last = _found(found, agent_id, name)
            before(Change("removed", agent_id, name, last.version))
            write([one for one in found.records if one is not last])
        return _entry(last)

    @contextlib.contextmanager
    def opened(self, agent_id: str, name: str) -> Iterator[OpenedSecret | None]:
        """Implement ``Backend.opened``."""
        with self._unlocked() as (found, master):
            record = _find(found, agent_id, name)
            if record is None:
                yield None
                return
            place = sealing.Place(found.id, record.agent_id, record.name, record.version)
            try:
                with sealing.decrypted(master, place, record.key.box(), record.value.box()) as value:
                    yield OpenedSecret(record.version, value)
            except sealing.WrongKeyError:
                raise self._damaged("a record does not open at its own place") from None

    # --- the vault as a whole ---------------------------------------------------------------------

    def create(self, keys: Sequence[Key], *, before: Before, parameters: Argon2Parameters = RECOMMENDED) -> None:
        """Make an empty vault that each of ``keys`` opens.

        Raises:
            errors.VaultError: there is one, or one was there and is gone.
        """
        with self._folder(make=True) as (state, folder), atomic_file.locked(folder, where=self._where, error=_Busy):
            head = self._head(state)
            if self._raw(folder) is not None or (head is not None and head.generation):
                raise errors.VaultError(
                    "there is a vault here already, or there was one",
                    hint="covenant vault list shows it; covenant vault rekey gives it other keys",
                    where=self._where,
                )
            vault = uuid.uuid4().hex
            with Locked(sealing.KEY_BYTES) as master:
                master.fill_random()
                locks = [_lock(key, master, vault, parameters) for key in keys]
                before(Change("created", "", "", 0))
                # A head without a vault is one that was never finished; a vault without a head is none.
                _replace(state, HEAD, Head(id=vault, generation=0, digest="").encode())
                empty = _seal(
                    master,
                    Document.model_construct(id=vault, generation=1, previous="", locks=locks, records=[], seal=""),
                )
                self._write(state, folder, empty)

    def rekey(self, keys: Sequence[Key], *, before: Before, parameters: Argon2Parameters = RECOMMENDED) -> None:
        """Another master key and other locks: what opened it before does so no more. No secret is decrypted for it.

        Raises:
            errors.VaultError: it cannot be opened or written.
        """
        with self._writing() as (state, folder, key):
            found, raw = self._current(state, folder)
            with self._master(key, found, raw) as old, Locked(sealing.KEY_BYTES) as new:
                new.fill_random()
                locks = [_lock(key, new, found.id, parameters) for key in keys]
                records = [_rewrapped(record, found.id, old, new) for record in found.records]
                before(Change("rekeyed", "", "", 0))
                self._catch_up(state, found, raw)
                self._write(state, folder, _seal(new, _next(found, raw, records=records, locks=locks)))

    # --- reading ----------------------------------------------------------------------------------

    def opened_by(self) -> frozenset[str]:
        """Return the kinds of keys that the file says open it, for messages: nothing is verified.

        Raises:
            errors.VaultError: there is no vault, or its file is malformed.
        """
        with self._folder() as (state, folder):
            return frozenset(lock.kind for lock in self._current(state, folder)[0].locks)

    @contextlib.contextmanager
    def _unlocked(self) -> Iterator[tuple[Document, Locked]]:
        with self._folder() as (state, folder):
            try:
                found, raw = self._current(state, folder)
            except errors.VaultError:
                # A writer may have replaced them between the two reads: retry with the lock.
                with atomic_file.locked(folder, where=self._where, error=_Busy):
                    found, raw = self._current(state, folder)
            with self._key() as key, self._master(key, found, raw) as master:
                self._settle(state, folder, found, raw)
                yield found, master

    def _settle(self, state: int, folder: int, found: Document, raw: bytes) -> None:
        """Write the missing head of an interrupted write, after the seal of its file (``found``) is verified.

        A reader that cannot write the head is refused. While the head names the earlier file, that file would be
        accepted if it were put back. An attacker who can block the head's write could so restore a removed secret. The
        refusal costs no availability: each secret needs an audit row, and that is on the same disk.

        Raises:
            errors.VaultError: Raised when the lock is held, the head cannot be written, or the vault is damaged now.
        """
        head = self._head(state)
        if head is None or head.generation >= found.generation:
            return
        with atomic_file.locked(folder, where=self._where, error=_Busy):
            # A writer may have been between the two files, or another reader here. Then the head is written already.
            if self._current(state, folder)[1] == raw:
                self._catch_up(state, found, raw)

    def _current(self, state: int, folder: int) -> tuple[Document, bytes]:
        """(1) and (2): return the document and the bytes that it was parsed from."""
        head, raw = self._head(state), self._raw(folder)
        if raw is None:
            gone = head is not None and head.generation
            hint = "restore it from a backup" if gone else _INIT
            raise errors.VaultError("the vault is gone" if gone else "there is no vault", hint=hint, where=self._where)
        if head is None:
            raise self._damaged("its head is gone")
        found = self._parsed(raw)
        if not head.names(found, raw):
            older = found.id == head.id and found.generation < head.generation
            raise self._damaged("an older one was put back" if older else "its head names another")
        return found, raw

    def _parsed(self, raw: bytes) -> Document:
        if self._sealed is not None and self._sealed[0] == embedded_format.digest(raw):
            return self._sealed[1]
        return embedded_format.parse(Document, raw, max_bytes=embedded_format.MAX_BYTES, where=f"{self._where}/{FILE}")

    @contextlib.contextmanager
    def _master(self, key: Key, found: Document, raw: bytes) -> Iterator[Locked]:
        """(3) Yield the master key once the seal is verified."""
        with _opened_by(key, found, self._where) as master:
            digest = embedded_format.digest(raw)
            if self._sealed is None or self._sealed[0] != digest:
                if not sealing.is_sealed(master, found.id, found.body(), found.seal):
                    raise self._damaged("its seal does not hold")
                self._sealed = (digest, found)
            yield master

    def _head(self, state: int) -> Head | None:
        where = str(self._state)
        raw = atomic_file.read(state, HEAD, max_bytes=embedded_format.HEAD_BYTES, where=where, error=errors.VaultError)
        if raw is None:
            return None
        return embedded_format.parse(Head, raw, max_bytes=embedded_format.HEAD_BYTES, where=f"{where}/{HEAD}")

    def _raw(self, folder: int) -> bytes | None:
        return atomic_file.read(
            folder, FILE, max_bytes=embedded_format.MAX_BYTES, where=self._where, error=errors.VaultError
        )

    # --- writing ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _changing(self) -> Iterator[tuple[Document, Locked, Callable[[list[SecretRecord]], None]]]:
        with self._writing() as (state, folder, key):
            found, raw = self._current(state, folder)
            with self._master(key, found, raw) as master:

                def write(records: list[SecretRecord]) -> None:
                    self._catch_up(state, found, raw)
                    self._write(state, folder, _seal(master, _next(found, raw, records=records, locks=found.locks)))

                yield found, master, write

    @contextlib.contextmanager
    def _writing(self) -> Iterator[tuple[int, int, Key]]:
        """Yield the descriptors and the key, with the lock held.

        Key before lock: otherwise other writers would wait while a passphrase is typed.
        """
        with (
            self._folder() as (state, folder),
            self._key() as key,
            atomic_file.locked(folder, where=self._where, error=_Busy),
        ):
            yield state, folder, key

    def _catch_up(self, state: int, found: Document, raw: bytes) -> None:
        """Write the head of an interrupted write: a file may be at most one generation ahead of the head."""
        head = self._head(state)
        if head is None or head.generation != found.generation:
            _replace(state, HEAD, _head_of(found, raw))

    def _write(self, state: int, folder: int, new: Document) -> None:
        raw = new.encode()
        if len(raw) > embedded_format.MAX_BYTES or len(new.records) > embedded_format.MAX_RECORDS:
            raise errors.VaultError("the vault is full", where=self._where)
        _replace(folder, FILE, raw)
        _replace(state, HEAD, _head_of(new, raw))
        self._sealed = (embedded_format.digest(raw), new)

    def _record(
        self, vault: str, master: Locked, agent_id: str, name: str, value: memoryview, *, version: int
    ) -> SecretRecord:
        now_ms = int(self._clock() * 1000)
        nonces = (os.urandom(sealing.NONCE_BYTES), os.urandom(sealing.NONCE_BYTES))
        key, box = sealing.encrypt(master, sealing.Place(vault, agent_id, name, version), value, nonces)
        return SecretRecord(
            agent_id=agent_id,
            name=name,
            version=version,
            created_ms=now_ms,
            changed_ms=now_ms,
            key=Ciphertext.of(key),
            value=Ciphertext.of(box),
        )

    @contextlib.contextmanager
    def _folder(self, *, make: bool = False) -> Iterator[tuple[int, int]]:
        """Descriptors of the state and of the vault's folder in it, both ours alone."""
        with contextlib.ExitStack() as stack:
            state = atomic_file.open_directory(self._state, error=errors.VaultError)
            stack.callback(os.close, state)
            if not make and not _exists(state):
                raise errors.VaultError("there is no vault", hint=_INIT, where=self._where)
            folder = atomic_file.open_subdirectory(
                state, FOLDER, where=str(self._state), make=make, error=errors.VaultError
            )
            stack.callback(os.close, folder)
            yield state, folder

    def _damaged(self, why: str) -> errors.VaultError:
        return errors.VaultError(f"the vault is damaged: {why}", hint="restore it from a backup", where=self._where)


_Busy = errors.VaultError


def _exists(state: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        os.stat(FOLDER, dir_fd=state, follow_symlinks=False)
        return True
    return False


def _replace(directory: int, name: str, raw: bytes) -> None:
    try:
        atomic_file.replace(directory, name, raw)
    except OSError as e:
        raise errors.VaultError(f"the vault cannot be written: {e.strerror}") from e


def _head_of(found: Document, raw: bytes) -> bytes:
    return Head(id=found.id, generation=found.generation, digest=embedded_format.digest(raw)).encode()


def _next(found: Document, raw: bytes, *, records: list[SecretRecord], locks: list[Lock]) -> Document:
    return Document.model_construct(
        id=found.id,
        generation=found.generation + 1,
        previous=embedded_format.digest(raw),
        locks=locks,
        records=sorted(records, key=lambda record: record.place),
        seal="",
    )


def _seal(master: Locked, unsealed: Document) -> Document:
    """The document with its seal; what is written has been validated as what is read."""
    value = sealing.seal(master, unsealed.id, unsealed.body())
    return Document.model_validate({**unsealed.model_dump(exclude={"seal"}), "seal": value})


def _lock(key: Key, master: Locked, vault: str, parameters: Argon2Parameters) -> Lock:
    salt, cost = os.urandom(sealing.SALT_BYTES), parameters if key.kind == "passphrase" else None
    empty = Ciphertext(nonce="", ciphertext="")
    lock = Lock(kind=key.kind, parameters=cost, salt=salt.hex(), master=empty)
    with _key_of(lock, key) as opener:
        box = sealing.wrap_master(opener, master, lock.bound(vault), os.urandom(sealing.NONCE_BYTES))
    return lock.model_copy(update={"master": Ciphertext.of(box)})


def _key_of(lock: Lock, key: Key) -> Locked:
    salt = bytes.fromhex(lock.salt)
    if lock.parameters is not None:
        return sealing.passphrase_key(key.secret.view, salt, lock.parameters)
    return sealing.file_key(key.secret.view, salt)


def _opened_by(key: Key, found: Document, where: str) -> Locked:
    for lock in (one for one in found.locks if one.kind == key.kind):
        with contextlib.suppress(sealing.WrongKeyError), _key_of(lock, key) as opener:
            return sealing.unwrap_master(opener, lock.master.box(), lock.bound(found.id))
    what = "passphrase" if key.kind == "passphrase" else "key file"
    if all(one.kind != key.kind for one in found.locks):
        raise errors.VaultKeyError(f"no {what} opens the vault", hint=_OTHER_KEY[key.kind], where=where)
    message = f"this {what} does not open the vault, or its locks were changed"
    raise errors.VaultKeyError(message, hint=_WRONG_KEY[key.kind], where=where)


def _rewrapped(record: SecretRecord, vault: str, old: Locked, new: Locked) -> SecretRecord:
    place = sealing.Place(vault, record.agent_id, record.name, record.version)
    try:
        box = sealing.rewrap(old, new, place, record.key.box(), os.urandom(sealing.NONCE_BYTES))
    except sealing.WrongKeyError:
        raise errors.VaultError("the vault is damaged: a record does not open at its own place") from None
    return record.model_copy(update={"key": Ciphertext.of(box)})


def _find(found: Document, agent_id: str, name: str) -> SecretRecord | None:
    return next((record for record in found.records if record.place == (agent_id, name)), None)


def _found(found: Document, agent_id: str, name: str) -> SecretRecord:
    record = _find(found, agent_id, name)
    if record is None:
        raise backend.missing(agent_id, name)
    return record


def _entry(record: SecretRecord) -> SecretEntry:
    return SecretEntry(record.agent_id, record.name, record.version, record.created_ms, record.changed_ms)
