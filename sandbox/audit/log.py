"""The supervisor's audit log: a record is durable in three files before ``append`` returns.

Records that need not be durable by themselves are written together with the next that must be (``append_all``): the
same lines in the same order, synced once.

Writers are serialised. Each write holds an flock and reads the signed head again, so that two runs can write at once.
The head is the acknowledgement. Lines beyond it were never acknowledged: their writer died, or the disk was full. They
are moved into a file beside the log and are never signed afterwards. Otherwise a process that can append a line could
get it signed at the next start. At most one write of ours is beyond the head, and the ids of its records show it.

Opening costs the same for a log of any length: the head, and the last line of each file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from msgspec import Struct

from policy import errors
from policy.audit_log import chain, events
from sandbox.audit import log_cut, log_files
from sandbox.kernel import libc
from sandbox.storage import atomic_file

EVENTS, CHAIN = log_files.EVENTS, log_files.CHAIN
KEY, PUBLIC_KEY = "ledger.key", "ledger.pub"
LOCK_SECONDS = 10.0

# A write takes less than this. At the end of a tree each shim has one write, and the caller waits for all of them.
_POLL_SECONDS = 0.001
_OPEN = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
MOST_RECORDS = log_files.MOST_RECORDS


class Record(Struct, frozen=True):
    """Hold one event to write: its kind, the fields of the kind, and its time (Unix milliseconds)."""

    kind: str
    fields: Mapping[str, Any]
    now_ms: int


class Ledger:
    """Write to an open log. Make it with ``Ledger.open``; close it, or use it as a context manager.

    ``recovered`` lists in words what was set aside since the log was opened.
    """

    def __init__(self, directory: Path, head: Path, key: Ed25519PrivateKey | None) -> None:
        self.recovered: list[str] = []
        self._path = directory
        self._head_path = head
        self._threads = threading.Lock()
        self._failure: str | None = None
        self._head = chain.Head()
        self._raw = b""
        self._slot = 0  # where the newest head stands
        self._unsynced = False  # whether the files may lack the records that the head carries
        with contextlib.ExitStack() as stack:
            self._dir = log_files.open_directory(directory, stack)
            self._head_dir = log_files.open_directory(head.parent, stack)
            log_cut.share(self._dir, self._head_dir, directory)
            # Which files the open ones are, by name and folder.
            self._identities: dict[tuple[str, int], tuple[int, int]] = {}
            self._events = self._open_file(EVENTS, self._dir, stack, os.O_APPEND)
            self._chain = self._open_file(CHAIN, self._dir, stack, os.O_APPEND)
            self._head_fd = -1
            with self._turn():
                self._key = key or log_files.key(KEY, self._head_dir, head=head.name, log=directory)
                self._signer = chain.key_id(self._key.public_key())
                self._open_head(stack)
                log_files.show_key(PUBLIC_KEY, self._head_dir, self._key.public_key(), log=directory)
                self._reload(opening=True)
            self._stack = stack.pop_all()

    @classmethod
    def open(cls, directory: Path, *, key: Ed25519PrivateKey | None = None, head: Path) -> Ledger:
        """Open or make the log in ``directory``, with its head record at ``head``.

        Without ``key`` the log's own key beside the head is used, and made for a new log. Both directories
        are made 0700, files 0600.

        Raises:
            errors.LedgerError: a file is unsafe, the log does not hold together, or another writer held
                the lock for 10 seconds.
        """
        try:
            return cls(directory, head, key)
        except OSError as e:
            raise errors.LedgerError(f"the log cannot be opened: {e.strerror}", where=str(directory)) from e

    def append(self, kind: str, fields: Mapping[str, Any], *, issuer: Mapping[str, str], now_ms: int) -> str:
        """Write one event and return its id; when this returns, the event, its anchor and the head are durable.

        Raises:
            errors.EventError: the fields are not those of the kind; nothing was written.
            errors.LedgerError: anything else. The log then refuses records until it is opened again.
        """
        return self.append_all([Record(kind, fields, now_ms)], issuer=issuer)[0]

    def append_all(
        self,
        records: Sequence[Record],
        *,
        issuer: Mapping[str, str],
        carried: bool = False,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> list[str]:
        """Write several records in one write, otherwise as ``append``.

        When this returns all of them are durable. When it raises, some of the first may be in the log, and never the
        last.

        ``carried`` says that a client is waiting. The disk is then synced once, where the slot of a head has room for
        the records; the files have them as well, and are synced with the next write. ``meanwhile`` is called during the
        sync or just before it. It must raise nothing.

        Raises:
            errors.EventError: Raised when fields are not those of their kind, or when the records are too many for one
                write. Nothing was written.
            errors.LedgerError: Raised as by ``append``.
        """
        first = str(uuid.uuid4())
        rows = []
        for position, record in enumerate(records):
            event_id = chain.following_id(first, position) if position else first
            line = events.event_line(record.kind, record.fields, event_id=event_id, issuer=issuer, now_ms=record.now_ms)
            rows.append(chain.ChainRow(line, event_id, record.now_ms))
        if not 0 < len(rows) <= MOST_RECORDS or sum(len(one.line) + 1 for one in rows) > log_files.MAX_TAIL_BYTES:
            raise errors.EventError(f"{len(rows)} audit events are no number, or too large, for one write")
        with self._writing(), self._turn():
            self._write(rows, meanwhile, carried=carried)
        return [one.event_id for one in rows]

    def settle(self) -> None:
        """Sync the records that a head carries to their files, so that the next write does not wait for that.

        Raises:
            errors.LedgerError: Raised as by ``append``.
        """
        # Without the turn: other processes may write meanwhile. Their heads differ, so that the next write syncs again.
        with self._writing():
            self._sync()

    @property
    def public_key(self) -> Ed25519PublicKey:
        """Return the key that verifies its head."""
        return self._key.public_key()

    @property
    def count(self) -> int:
        """Acknowledged records, as of this process's last turn."""
        return self._head.count

    @property
    def place(self) -> Path:
        """Return the log's directory."""
        return self._path

    def lines(self, start: int = 0) -> Iterator[tuple[int, bytes]]:
        """Yield the acknowledged events from byte ``start`` on, each with its offset.

        Where no line begins at ``start``, all events are yielded.

        Raises:
            errors.LedgerError: Raised when the log is inconsistent, or cannot be read.
        """
        try:
            end = self.refreshed()[1]
            if not 0 < start <= end or os.pread(self._events, 1, start - 1) != b"\n":
                start = 0
            offset = start
            for line in log_files.lines(self._events, start, end, self._path):
                yield offset, line
                offset += len(line) + 1
        except OSError as e:
            raise errors.LedgerError(f"the log cannot be read: {e.strerror}", where=str(self._path)) from e

    def rows(self, since: tuple[int, int, int]) -> Iterator[tuple[bytes, bytes]]:
        """Yield each acknowledged record from a ``mark`` on, as its anchor line and its event line.

        Raises:
            errors.LedgerError: Raised when the log is inconsistent, or cannot be read.
        """
        try:
            _, events_end, chain_end = self.refreshed()
            yield from zip(
                log_files.lines(self._chain, since[2], chain_end, self._path),
                log_files.lines(self._events, since[1], events_end, self._path),
                strict=True,
            )
        except OSError as e:
            raise errors.LedgerError(f"the log cannot be read: {e.strerror}", where=str(self._path)) from e
        except ValueError:
            self._broken("it has not as many events as chain entries")

    @property
    def mark(self) -> tuple[int, int, int]:
        """Return its length as of this process's last turn: records, bytes of events, bytes of the chain."""
        return self._head.count, self._head.events_bytes, self._head.chain_bytes

    def refreshed(self) -> tuple[int, int, int]:
        """Return ``mark`` after reading what other processes have written.

        Raises:
            errors.LedgerError: Raised when the log is inconsistent.
        """
        with self._threads, self._turn():
            self._reload()
            return self.mark

    def close(self) -> None:
        """Release the files. What was acknowledged is durable already."""
        with self._threads:
            self._failure = self._failure or "it was closed"
            self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- writing ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Let one thread write at a time, and none after a failure."""
        with self._threads:
            if self._failure is not None:
                raise errors.LedgerError(f"the log takes no more records after: {self._failure}", where=str(self._path))
            try:
                yield
            except errors.LedgerError as e:
                self._failure = e.message
                raise
            except OSError as e:
                self._failure = f"{e.strerror}"
                raise errors.LedgerError(
                    f"the audit record could not be written: {e.strerror}", where=str(self._path)
                ) from e

    def _write(self, rows: Sequence[chain.ChainRow], meanwhile: Callable[[], None], *, carried: bool) -> None:
        self._catch_up()
        entries, before, head = chain.extend(self._head, rows)
        lines = b"".join(row.line + b"\n" for row in rows)
        slot = None
        if carried and self._head.count:  # of a log's first write the other slot would say that there is nothing
            slot = chain.carrying_slot(self._head, head, lines, self._key, signer=self._signer)
        if slot is not None:
            self._carry(slot, lines, entries, meanwhile)
        else:
            self._put(lines, entries, [head, before][: len(rows)], meanwhile)
        self._head, self._raw = head, os.pread(self._head_fd, chain.HEAD_BYTES, 0)

    def _carry(self, slot: bytes, lines: bytes, entries: bytes, meanwhile: Callable[[], None]) -> None:
        """Write records inside the head, which makes them durable with it."""
        # INVARIANT: sync the records that the previous head carries to the files before that head may be overwritten.
        self._sync()
        log_files.write_all(self._events, lines)
        log_files.write_all(self._chain, entries)
        meanwhile()
        # The other slot keeps the head before all of it.
        self._show([slot])
        self._unsynced = True

    def _put(self, lines: bytes, entries: bytes, heads: Sequence[chain.Head], meanwhile: Callable[[], None]) -> None:
        # INVARIANT: both files are durable before the head is written: it never names records that a crash could take
        # away. Both are written before either is synced, so that the first sync takes most of the second along. Until
        # then a power cut may leave any part of them, and none of it was acknowledged (``log_files.set_aside``).
        for fd, content in ((self._events, lines), (self._chain, entries)):
            log_files.write_all(fd, content)
            libc.start_writing(fd)
        slots = self._slots(heads)  # while the disk takes that
        meanwhile()
        self._unsynced = True
        self._sync()
        self._show(slots)

    def _sync(self) -> None:
        """Have the disk hold the files, where it may not."""
        if self._unsynced:
            os.fdatasync(self._events)
            os.fdatasync(self._chain)
            self._unsynced = False

    def _slots(self, heads: Sequence[chain.Head]) -> list[bytes]:
        """Return the contents of the slots, the newest first.

        For a write of one row the previous head is already in its slot.
        """
        return [chain.slot(chain.signed_head(one, self._key, signer=self._signer)) for one in heads]

    def _catch_up(self) -> None:
        sizes = self._check_names()
        raw = os.pread(self._head_fd, chain.HEAD_BYTES, 0)
        if raw != self._raw or sizes != (self._head.events_bytes, self._head.chain_bytes):
            self._reload()

    def _show(self, slots: Sequence[bytes]) -> None:
        """Put the newest head in one slot, and the one before it in the other when that is not there already.

        Two slots cost half of a write, rename and directory fsync (0.5 against 1.0 ms in all), and a torn slot leaves
        the one before.
        """
        # INVARIANT: the slot of the newest acknowledged head is written only when a newer one is durable in the other.
        # That is written and durable in one call, which no kill comes between: there is no head that the next writer
        # reads and goes on from while the disk does not have it (pwritev2(2), RWF_DSYNC).
        free = chain.SLOT_BYTES - self._slot
        try:
            written = os.pwritev(self._head_fd, [slots[0]], free, os.RWF_DSYNC)
        except OSError:
            # What the disk refused is still read from memory: the next writer would go on from it, and overwrite the
            # one slot that the disk has.
            with contextlib.suppress(OSError):
                os.pwritev(self._head_fd, [self._raw[free : free + chain.SLOT_BYTES]], free, os.RWF_DSYNC)
            raise
        if written != len(slots[0]):
            raise errors.LedgerError("the head record was written in part", where=str(self._head_path))
        for slot in slots[1:]:
            with contextlib.suppress(OSError):  # the newest head is acknowledged; `covenant audit verify` reports this
                os.pwritev(self._head_fd, [slot], self._slot, 0)
        self._slot = free

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Hold the writers' lock; wait at most ``LOCK_SECONDS``."""
        with atomic_file.unstopped():
            if not atomic_file.take(self._events, LOCK_SECONDS, poll_seconds=_POLL_SECONDS):
                raise errors.LedgerError(
                    f"another process held the audit log for {LOCK_SECONDS:.0f} seconds",
                    hint="wait for it or end it, then repeat",
                    where=str(self._path),
                )
            try:
                yield
            except OSError as e:
                # INVARIANT: a writer that the disk refused writes nothing any more, and neither does a reader. The
                # records that another head carries may be the refused ones. The kernel reports the error once for each
                # open file, and keeps the unwritten pages as if they were clean. The next process that opens the log
                # writes them again (``_put_right``, ``_show_again``).
                self._failure = f"{e.strerror}"
                raise
            finally:
                fcntl.flock(self._events, fcntl.LOCK_UN)

    def _check_names(self) -> tuple[int, int]:
        """Check that the open files still have their names: a record in an unlinked file is lost.

        Returns the sizes of the two files that grow.
        """
        sizes = []
        for (name, folder), ours in self._identities.items():
            try:
                if name in (EVENTS, CHAIN):
                    info = os.stat(name, dir_fd=folder, follow_symlinks=False)
                    named, size = (info.st_dev, info.st_ino), info.st_size
                else:
                    named, size = atomic_file.which(
                        folder, name
                    )  # its size stays: a look at its times would cost its sync
            except FileNotFoundError:
                self._broken(f"`{name}` was removed while the log was open")
            if named != ours:
                self._broken(f"`{name}` was replaced while the log was open")
            sizes.append(size)
        return sizes[0], sizes[1]

    # --- opening and recovery ---------------------------------------------------------------------------

    def _open_head(self, stack: contextlib.ExitStack) -> None:
        name = self._head_path.name
        if not log_files.exists(name, self._head_dir):
            # Every log has a head before its first record, so one that lacks it and is not empty lost it.
            if log_files.size(self._events) or log_files.size(self._chain):
                self._broken("the log holds records and its head is missing")
            if log_files.exists(PUBLIC_KEY, self._head_dir):
                self._broken("the log's public key is there and its head is missing")
            blank = b" " * (chain.SLOT_BYTES - 1) + b"\n"
            atomic_file.replace(self._head_dir, name, chain.sign_head(chain.Head(), self._key) + blank)
            os.fsync(self._dir)
        self._head_fd = self._open_file(name, self._head_dir, stack, 0)

    def _reload(self, *, opening: bool = False) -> None:
        """Read the head, compare it with the last record of both files, and set aside the lines beyond it.

        With ``opening`` the records that the head carries and both heads are written again: a power cut may have taken
        them, or the disk may have refused them.
        """
        raw = os.pread(self._head_fd, chain.HEAD_BYTES, 0)
        newest = chain.newest_head(raw, self._key.public_key())
        if newest is None:
            self._broken("no head record verifies under the log's key")
        head, slot = newest
        if head.count < self._head.count:
            self._broken(f"the head went back from {self._head.count} to {head.count} records")
        if (carried := head.carried) is not None:
            # INVARIANT: before anything is put right. What it carries says nothing of the files before it.
            self._check_last(head.starts, carried.previous_hash_hex, head.count - carried.count)
        if opening:
            self._show_again(raw, slot)
        if opening and carried is not None:
            self._put_right(head.starts, carried, head.count)
        ends = head.events_bytes, head.chain_bytes
        self._check_last(ends, head.chain_hash_hex, head.count)
        # Both are looked at before either is touched.
        tails = log_files.tails(self._events, self._chain, head, self._path)
        for fd, name, end, tail in zip((self._events, self._chain), (EVENTS, CHAIN), ends, tails, strict=True):
            if tail:
                self.recovered.append(log_files.set_aside(fd, name, self._dir, end, tail, head.count))
        # All of it, or nothing: after a refusal by the disk above, the next reader reads it again.
        self._raw, self._head, self._slot = raw, head, slot
        self._unsynced = head.carried is not None and not opening

    def _show_again(self, raw: bytes, newest: int) -> None:
        """Have the disk hold both slots as they were read."""
        # INVARIANT: call this before any repair, before setting lines aside, and before writing a new slot. A read
        # returns the kernel's cache. The disk may hold something else: it refused a slot, and the writer died or could
        # not restore the old slot. The kernel does not report that again.
        # Write the newest slot first. It counts as acknowledged from here on, so the other slot must not be overwritten
        # while it alone is on the disk. Then write the other slot: there the disk may have a newer head, of rows that
        # were refused and are set aside below.
        # A power cut tears nothing that is needed. Where the disk has the same bytes, no part of them changes. Where it
        # lacks the newest head, its other slot is whole: as it was read, or with a newer head that was refused. By the
        # second call the disk has the newest head.
        for at in (newest, chain.SLOT_BYTES - newest):
            os.pwritev(self._head_fd, [raw[at : at + chain.SLOT_BYTES]], at, os.RWF_DSYNC)

    def _check_last(self, ends: tuple[int, int], chain_hash_hex: str, count: int) -> None:
        """Check that both files reach these ends, and that the last of ``count`` records is the signed one."""
        for fd, name, end in zip((self._events, self._chain), (EVENTS, CHAIN), ends, strict=True):
            if log_files.size(fd) < end:
                self._broken(f"`{name}` is shorter than its signed head says")
        last = log_files.last_line(self._events, ends[0]), log_files.last_line(self._chain, ends[1])
        if not chain.is_last(*last, chain_hash_hex, count):
            self._broken("the last record is not the one that the head signs")

    def _put_right(self, starts: tuple[int, int], carried: chain.Carried, count: int) -> None:
        files = (self._events, EVENTS, carried.events), (self._chain, CHAIN, carried.chain)
        for (fd, name, lines), start in zip(files, starts, strict=True):
            if said := log_files.put_right(fd, name, self._dir, start, lines, count):
                self.recovered.append(said)

    def _open_file(self, name: str, folder: int, stack: contextlib.ExitStack, flags: int) -> int:
        fd = os.open(name, _OPEN | flags, 0o600, dir_fd=folder)
        stack.callback(os.close, fd)
        info = atomic_file.opened(fd)
        log_files.check_private(info, name, folder)
        self._identities[name, folder] = info.st_dev, info.st_ino
        return fd

    def _broken(self, message: str) -> NoReturn:
        log_files.broken(message, self._path)
