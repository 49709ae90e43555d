"""The log's files, for use by one thread. One sync acknowledges a group of rows.

    audit-head/pending                               written and synced first: the rows, then the signed head after
                                                     them (policy.audit_log.write_ahead)
    audit/events.jsonl, audit/events.chain.jsonl     written while the disk takes ``pending``, synced now and then
    audit-head/head.json                             written after ``pending`` is synced, itself synced now and then

The files therefore hold every row of ``pending`` or lack some; the next opening adds the missing ones. Bytes beyond
those rows, as a power cut may leave, were never acknowledged: the opening moves them to a separate file and reports it.
Readers wait for the lock that a writer holds on ``events.jsonl`` (``covenant audit verify``).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

from covenant.stores.audit import paths
from policy import errors
from policy.audit_log import chain, events, write_ahead
from sandbox.storage import atomic_file

# The capacity of `pending`: when it is full, the files are synced and it begins anew. Its blocks are allocated from the
# start, so that a sync of it writes no metadata.
PENDING_BYTES: Final = 4 * 1024 * 1024
LOCK_SECONDS: Final = 1.0
_POLL_SECONDS: Final = 0.002

_CHUNK_BYTES: Final = 1 << 20
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_BLANK: Final = b" " * (chain.SLOT_BYTES - 1) + b"\n"
_HINT: Final = "run `covenant audit verify`; keep audit and audit-head aside as evidence before starting a new log"


@dataclass(frozen=True, slots=True)
class AuditSnapshot:
    """The acknowledged head, the bytes of ``head.json``, and the lengths of the files."""

    head: chain.Head
    shown: bytes
    events_bytes: int
    chain_bytes: int


class Files:
    """The open files of the log. ``head`` is the acknowledged head; ``recovered`` lists the repairs of the opening."""

    def __init__(self, at: paths.Places) -> None:
        """Open the files.

        Raises:
            errors.LedgerError: a file is unsafe, or the log fails verification.
        """
        self.recovered: list[str] = []
        self.at = at
        self.head = self._before = chain.Head()
        self._end = 0
        self._last_signed: tuple[chain.Head, bytes] | None = None
        self._writing = threading.Lock()
        # True after a failed write: the disk's state is unknown until the next opening.
        self._failed = False
        with contextlib.ExitStack() as stack:
            new = not any(at.exists(name) for name in (paths.HEAD, paths.KEY, paths.PENDING))
            self.events = self._file(paths.EVENTS, at.log, stack)
            self.chain = self._file(paths.CHAIN, at.log, stack)
            if new and (os.fstat(self.events).st_size or os.fstat(self.chain).st_size):
                self._broken("the log holds records and its head is missing")
            self.key = at.signing_key(make=new or not at.exists(paths.HEAD))
            self._signer = chain.key_id(self.key.public_key())
            self._head_fd = self._file(paths.HEAD, at.head, stack)
            self._pending = self._file(paths.PENDING, at.head, stack)
            with self._turn():
                self._recover()
            self._identify()
            self._stack = stack.pop_all()

    def append(self, rows: Sequence[chain.ChainRow]) -> None:
        """Acknowledge rows: they are durable when this returns.

        Raises:
            errors.StoreFullError: there is no room for them; the log is unchanged.
            errors.LedgerError, OSError: any other failure; the disk's state is unknown until the next opening.
        """
        lines = b"".join([row.line + b"\n" for row in rows])
        entries, before, head = chain.extend(self.head, rows)
        record = b"".join((self._signed(head), b"\n", lines))
        with self._writing, self._turn():
            self._check_names()
            if self._end + len(record) > PENDING_BYTES:
                self._settle()
            try:
                write_bytes(self._pending, record, self._end)
                # This starts the write to disk without waiting, while the other files are written. It is only advice
                # that a file system may ignore; the sync below returns any error.
                with contextlib.suppress(OSError):
                    os.posix_fadvise(self._pending, self._end, len(record), os.POSIX_FADV_DONTNEED)
                write_bytes(self.events, lines, self.head.events_bytes)
                write_bytes(self.chain, entries, self.head.chain_bytes)
                shown = self._slots(head, before)
                os.fdatasync(self._pending)
            except OSError as e:
                if e.errno not in _FULL:
                    raise
                self._take_back()
                raise self._full(f"the audit log could not take {len(rows)} rows", e) from e
            self.head, self._before = head, before
            self._end += len(record)
            write_bytes(self._head_fd, shown, 0)

    def settle(self) -> None:
        """Sync the files, so that they need no row of ``pending``."""
        with self._turn():
            self._settle()

    def replace(self, before: chain.Head, head: chain.Head) -> None:
        """Replace the log's files by the synced ones named ``.new`` beside them: all of them or none.

        ``head`` is the head of the new files, ``before`` the one a row earlier.
        """
        with self._turn():
            self._settle()
            # The commit: a crash before it leaves the old log; after it the next opening completes the replacement.
            replaced = self._signed(self._before), self._signed(self.head)
            record = write_ahead.opening(self._signed(before), self._signed(head), replaced=replaced)
            write_bytes(self._pending, record, 0)
            os.fdatasync(self._pending)
            self._rename(head)
            self.head, self._before = head, before
            self._show_again()
            self._settle()

    def lines(self, start: int = 0, end: int | None = None) -> Iterator[tuple[int, bytes]]:
        """Yield the acknowledged lines between two offsets, each with its own. Both offsets must be starts of lines."""
        stop = self.head.events_bytes if end is None else end
        return _lines(self.events, start, stop)

    def entries(self) -> Iterator[tuple[int, bytes]]:
        """Yield the acknowledged lines of the chain with their offsets."""
        return _lines(self.chain, 0, self.head.chain_bytes)

    def snapshot(self) -> AuditSnapshot:
        """Return the state of the files between two writes."""
        with self._writing:
            sizes = (os.fstat(fd).st_size for fd in (self.events, self.chain))
            return AuditSnapshot(self.head, os.pread(self._head_fd, chain.HEAD_BYTES, 0), *sizes)

    def close(self) -> None:
        """Sync and close the files. After a failed write only close them."""
        # INVARIANT: the kernel reports a failed writeback once (lib/errseq.c of Linux), and the next sync succeeds
        # without the rows. So `pending`, which still holds them, must not begin anew.
        if not self._failed:
            with contextlib.suppress(OSError, errors.CovenantError):
                self.settle()
        self._stack.close()

    # --- opening ----------------------------------------------------------------------------------------

    def _file(self, name: str, folder: int, stack: contextlib.ExitStack) -> int:
        fd = self.at.file(name, folder=folder)
        stack.callback(os.close, fd)
        return fd

    def _recover(self) -> None:
        """Bring the files to the acknowledged state.

        (1) Find the acknowledged head: in `pending` if it begins with a head that verifies, else the newest in
        `head.json`.
        (2) Refuse a `pending` that is older than `head.json`. Complete a cut that was committed.
        (3) Write the rows of `pending` again, even those that are present; set bytes beyond them aside.
        (4) The last record must be the one that the head signs.
        (5) Sync the files and `head.json`.
        """
        # (1)
        public = self.key.public_key()
        raw = os.pread(self._pending, os.fstat(self._pending).st_size, 0)
        found = write_ahead.replay(raw, public)
        shown_raw = os.pread(self._head_fd, chain.HEAD_BYTES, 0)
        slots = chain.read_heads(shown_raw, public)
        shown = slots[0] if slots else None
        if found is None:
            if shown is None and (os.fstat(self._head_fd).st_size or os.fstat(self.events).st_size):
                self._broken("no head record verifies under the log's key")
            head = shown or chain.Head()
            found = write_ahead.Replay(head, head, slots[-1] if slots else head, b"", b"", 0, b"")
        # INVARIANT: this comes before a file changes or `head.json` names its rows. A killed daemon may have left
        # `pending` unsynced.
        _hear_of_refusals(self._pending)
        write_bytes(self._pending, raw[: found.end], 0)
        os.fdatasync(self._pending)
        # (2)
        if write_ahead.is_behind(found, shown):
            self._broken(write_ahead.BEHIND)
        if found.replaced:
            self._rename(found.base)
        else:
            self._discard_new()
        # (3)
        _hear_of_refusals(self.events, self.chain, self._head_fd)
        base, head = found.base, found.head
        self._complete(self.events, paths.EVENTS, found.events, base.events_bytes, head)
        self._complete(self.chain, paths.CHAIN, found.chain, base.chain_bytes, head)
        # (4)
        self._check_last(head)
        self.head, self._before = head, found.before
        self._show_again()
        # (5)
        self._settle()

    def _complete(self, fd: int, name: str, lines: bytes, base: int, head: chain.Head) -> None:
        size, end = os.fstat(fd).st_size, base + len(lines)
        if size < base:
            self._broken(f"`{name}` is shorter than its signed head says")
        there = os.pread(fd, len(lines), base)
        if there != lines:
            # After a power cut, blocks of a file may hold zeros or be missing.
            if there.strip(b"\0") and not lines.startswith(there):
                self._aside(name, there, head.count)
            self.recovered.append(f"`{name}` got {len(lines)} acknowledged bytes that it lacked or held otherwise")
        # INVARIANT: rewrite the rows even if they are present. The page cache shows data that the disk refused as if it
        # were written, and the error went to a daemon that is gone.
        write_bytes(fd, lines, base)
        if size > end:
            self._aside(name, os.pread(fd, size - end, end), head.count)
            os.ftruncate(fd, end)

    def _aside(self, name: str, tail: bytes, count: int) -> None:
        # Named by content: after a crash here, the same steps end in the same file.
        aside = f"{name}.aside-{count}-{hashlib.sha256(tail).hexdigest()[:16]}"
        atomic_file.replace(self.at.log, aside, tail)
        self.recovered.append(f"{len(tail)} unacknowledged bytes of `{name}` set aside in `{aside}`")

    def _check_last(self, head: chain.Head) -> None:
        if not head.count:
            return
        event = last_line(self.events, head.events_bytes)
        anchor = chain.Anchor.parse(last_line(self.chain, head.chain_bytes))
        expected = (head.chain_hash_hex, chain.event_hash(event), head.count - 1)
        if anchor is None or (anchor.chain_hash_hex, anchor.event_hash_hex, anchor.index) != expected:
            self._broken("the last record is not the one that the head signs")

    # --- writing ----------------------------------------------------------------------------------------

    def _signed(self, head: chain.Head) -> bytes:
        # Ed25519 signatures are deterministic (RFC 8032), and the newest head is signed repeatedly.
        last = self._last_signed
        if last is None or last[0] is not head:
            last = self._last_signed = head, chain.signed_head(head, self.key, signer=self._signer)
        return last[1]

    def _show_again(self) -> None:
        write_bytes(self._head_fd, self._slots(self.head, self._before), 0)

    def _slots(self, head: chain.Head, before: chain.Head) -> bytes:
        """Return the bytes of ``head.json``: both heads signed, each in its slot; a slot without a head is blank."""
        heads = {one.count: one for one in (before, head)}.values()
        # ``head`` first: ``_signed`` still caches its signature.
        signed = {chain.slot_offset(one): chain.slot(self._signed(one)) for one in reversed(heads)}
        return signed.get(0, _BLANK) + signed.get(chain.SLOT_BYTES, _BLANK)

    def _settle(self) -> None:
        if not os.fstat(self._head_fd).st_size:
            self._show_again()
        for fd in (self.events, self.chain, self._head_fd):
            os.fdatasync(fd)
        # INVARIANT: only after the syncs: until then `pending` has the only durable copy of rows that the files lack.
        record = write_ahead.opening(self._signed(self._before), self._signed(self.head))
        size = os.fstat(self._pending).st_size
        if size != PENDING_BYTES:
            # INVARIANT: no row may follow a missing opening. If this fails, the next append finds `pending` full and
            # begins here.
            self._end = PENDING_BYTES
            try:
                os.ftruncate(self._pending, 0)
                write_bytes(self._pending, record + bytes(PENDING_BYTES - len(record)), 0)
                os.fsync(self._pending)
            except OSError as e:
                if e.errno not in _FULL:
                    raise
                # The files need no row of `pending`, and no other write has begun.
                raise self._full("the audit log has no room for the rows that come", e) from e
        else:
            # The zero byte after the record ends the contents of an earlier use.
            write_bytes(self._pending, record + b"\0", 0)
            # INVARIANT: sync the opening before rows follow it. A power cut may keep any subset of the pages of one
            # sync: new rows after the old opening would not be read as rows, and the log would end before its head.
            os.fdatasync(self._pending)
        self._end = len(record)

    def _take_back(self) -> None:
        """Undo a group of rows that the disk had no room for."""
        os.ftruncate(self.events, self.head.events_bytes)
        os.ftruncate(self.chain, self.head.chain_bytes)
        if os.fstat(self._pending).st_size > PENDING_BYTES:
            os.ftruncate(self._pending, max(PENDING_BYTES, self._end))
        write_bytes(self._pending, b"\0", self._end)
        os.fdatasync(self._pending)

    def _rename(self, head: chain.Head) -> None:
        held: int | None = None
        try:
            for name, size in ((paths.EVENTS, head.events_bytes), (paths.CHAIN, head.chain_bytes)):
                with contextlib.suppress(FileNotFoundError):
                    self._check_size(name + write_ahead.NEW, size)
                    if name == paths.EVENTS:
                        # INVARIANT: a reader that opens the new file by its name finds it locked: its chain is renamed
                        # later.
                        held = self.at.file(name + write_ahead.NEW, folder=self.at.log)
                        fcntl.flock(held, fcntl.LOCK_EX)
                    os.rename(name + write_ahead.NEW, name, src_dir_fd=self.at.log, dst_dir_fd=self.at.log)
            os.fsync(self.at.log)
            if held is not None:
                # A reader that waited for the lock of the old file checks again which file has the name (covenant
                # audit).
                os.dup2(held, self.events, inheritable=False)
        finally:
            if held is not None:
                os.close(held)
        for fd, name in ((self.events, paths.EVENTS), (self.chain, paths.CHAIN)):
            self._take_over(fd, name)
        self._identify()

    def _check_size(self, name: str, size: int) -> None:
        fd = self.at.file_if_there(name)
        try:
            if os.fstat(fd).st_size != size:
                self._broken(f"`{name}` is not what the signed head says")
        finally:
            os.close(fd)

    def _take_over(self, fd: int, name: str) -> None:
        """Make the descriptor refer to the file that now has the name."""
        fresh = self.at.file(name, folder=self.at.log)
        try:
            if not os.path.sameopenfile(fd, fresh):
                os.dup2(fresh, fd, inheritable=False)
        finally:
            os.close(fresh)

    def _identify(self) -> None:
        infos = (os.fstat(fd) for fd in (self.events, self.chain, self._pending, self._head_fd))
        self._identities = [(info.st_dev, info.st_ino) for info in infos]

    def _discard_new(self) -> None:
        for name in (paths.EVENTS, paths.CHAIN):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name + write_ahead.NEW, dir_fd=self.at.log)

    def _check_names(self) -> None:
        """Check that the open files are still those under their names, with the sizes we wrote. Any difference is not
        ours."""
        for name, folder, identity, size in (
            (paths.EVENTS, self.at.log, self._identities[0], self.head.events_bytes),
            (paths.CHAIN, self.at.log, self._identities[1], self.head.chain_bytes),
            (paths.PENDING, self.at.head, self._identities[2], None),
            (paths.HEAD, self.at.head, self._identities[3], None),
        ):
            try:
                found, length = atomic_file.which(folder, name)
            except FileNotFoundError:
                self._broken(f"`{name}` was removed while the log was open")
            if found != identity:
                self._broken(f"`{name}` was replaced while the log was open")
            if size is not None and length != size:
                self._broken(f"somebody else wrote to `{name}`")

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Hold the lock that readers wait for; wait at most ``LOCK_SECONDS`` for them.

        The lock lets readers see the files between two writes. A reader needs it only to read the sizes. After the
        timeout the writer goes on without it, so a slow reader cannot hold up the log.
        """
        atomic_file.take(self.events, LOCK_SECONDS, poll_seconds=_POLL_SECONDS)
        try:
            yield
        except errors.StoreFullError:
            raise
        except BaseException:
            self._failed = True
            raise
        finally:
            fcntl.flock(self.events, fcntl.LOCK_UN)

    def _full(self, message: str, error: OSError) -> errors.StoreFullError:
        where = str(self.at.home / "audit")
        return errors.StoreFullError(
            f"{message}: {error.strerror}", hint="make room on the disk and repeat", where=where
        )

    def _broken(self, message: str) -> NoReturn:
        raise errors.LedgerError(message, hint=_HINT, where=str(self.at.home / "audit"))


def _hear_of_refusals(*fds: int) -> None:
    """Collect pending write errors: the kernel reports an earlier failed write to the first sync after an opening.

    The caller then rewrites all data that such an error can concern, so a later error is about its own writes.
    """
    for fd in fds:
        with contextlib.suppress(OSError):
            os.fdatasync(fd)


def last_line(fd: int, end: int) -> bytes:
    """Return the line that ends, with its newline, at offset ``end``; empty if there is none of allowed length."""
    size = 4096
    while True:
        start = max(0, end - size)
        chunk = os.pread(fd, end - start, start)
        if not chunk.endswith(b"\n"):
            return b""
        at = chunk.rfind(b"\n", 0, -1)
        if at >= 0 or not start:
            return chunk[at + 1 : -1]
        if size > events.MAX_LINE_BYTES:
            return b""
        size *= 8


def _lines(fd: int, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    rest, offset = b"", start
    while start < end:
        chunk = os.pread(fd, min(_CHUNK_BYTES, end - start), start)
        if not chunk:
            raise errors.LedgerError("the log became shorter while it was read")
        start += len(chunk)
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield offset, line
            offset += len(line) + 1


def write_bytes(fd: int, data: bytes, offset: int) -> None:
    """Write all bytes at an offset."""
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done
